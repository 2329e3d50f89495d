"""Which request options are served: a request with another is refused by name, never answered wrong."""

from __future__ import annotations

from typing import Any


def refusal(req: Any, seeded: bool) -> str | None:
    """Why a request cannot be served, as one sentence for its sender; None when it can.

    Args:
        req: SGLang's `Req`, its sampling parameters normalised. SGLang prefills a refused one all the same, so what its
            sampler cannot bear is taken out of it.
        seeded: all draws have seeds (`--enable-deterministic-inference`).
    """
    options = _unserved(req)
    if seeded and req.sampling_params.min_p > 0:
        # SGLang's sampler fails an assertion there, and the server with it, plain decoding's too.
        options.append("min_p with --enable-deterministic-inference")
        req.sampling_params.min_p = 0.0
    if req.sampling_params.min_new_tokens > 0 and req.tokenizer is None:
        # SGLang's penalizer asks the tokenizer for stop tokens.
        options.append("min_new_tokens without a tokenizer")
        req.sampling_params.min_new_tokens = 0
    if not options:
        return None
    return (
        f"sglang-dflash {_version()} cannot serve {', '.join(options)}. Leave it out, or start the server without the "
        "plugin (SGLANG_PLUGINS=none)."
    )


def _version() -> str:
    from sglang_dflash import __version__

    return __version__


def _unserved(req: Any) -> list[str]:
    params = req.sampling_params
    options = [
        name for name in ("json_schema", "regex", "ebnf", "structural_tag", "watermark") if getattr(params, name)
    ]
    options += [
        name
        for name in (
            "return_hidden_states",
            "return_sampling_mask",
            "custom_logit_processor",
            "lora_id",
            "positional_embed_overrides",
        )
        if getattr(req, name)
    ]
    return options
