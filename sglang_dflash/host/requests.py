"""Which request options are served: a request with another is refused by name, never answered wrong."""

from __future__ import annotations

from typing import Any

from sglang_dflash import __version__

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
# Backends whose grammars can be taken back over drafts and give a mask of one bit a token.
GRAMMAR_BACKENDS = (None, "xgrammar", "llguidance", "none")


def refusal(req: Any, seeded: bool, grammar_backend: str | None) -> str | None:
    """Why a request cannot be served, as one sentence for its sender; None when it can.

    Args:
        req: SGLang's `Req`, its sampling parameters normalised. SGLang prefills a refused one all the same, so what its
            sampler cannot bear is taken out of it.
        seeded: all draws have seeds (`--enable-deterministic-inference`).
        grammar_backend: SGLang's, None for its default.
    """
    options = _unserved(req)
    if grammar_backend not in GRAMMAR_BACKENDS:
        asked = [name for name in GRAMMARS if getattr(req.sampling_params, name)]
        options += [f"{name} with --grammar-backend {grammar_backend}" for name in asked]
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
    return f"sglang-dflash {__version__} cannot serve {', '.join(options)}. Leave it out."


def _unserved(req: Any) -> list[str]:
    options = ["watermark"] if req.sampling_params.watermark else []
    fields = ("return_hidden_states", "return_sampling_mask", "lora_id", "positional_embed_overrides")
    return options + [name for name in fields if getattr(req, name)]
