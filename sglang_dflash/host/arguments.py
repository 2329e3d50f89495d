"""Resolution of the DFLASH arguments, in place of SGLang's `_handle_dflash`, before any process or weight is loaded.

A wrong drafter, or a drafter that does not fit the target, is refused here with a sentence that says what to change.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash import checkpoint, config, cpu, drafter_config, drafter_fit, paths, token_map
from sglang_dflash.drafter_variants import MASK_EMBEDDING_FILE, SERVED

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_SOURCE = "sglang_dflash"
# Without --max-running-requests never fewer than SGLang's own limit for speculative decoding.
LEAST_MAX_RUNNING_REQUESTS = 48
# Bytes a verified token and a token of the vocabulary, of all that a round holds at once, and the share of the device's
# memory that they get; `_default_max_running_requests` names them.
CHOSEN_BYTES, DRAWN_BYTES = 16, 24
LOGITS_SHARE = 0.05


def _view(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def _declare(server_args: Any, **fields: Any) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, _SOURCE, **fields)


def reasons_for_stock(server_args: Any) -> list[str]:
    """What of a configuration our worker does not serve, a phrase each; empty when it serves all of it."""
    from sglang.srt.runtime_context import attn_dp_enabled_of

    cfg = _view(server_args)
    # SGLang gives the drafter the target's --quantization where it has none of its own.
    draft_quantization = cfg.speculative_draft_model_quantization
    reasons = [
        phrase
        for phrase, present in (
            (f"--tp-size {cfg.tp_size}", cfg.tp_size > 1),
            (f"--pp-size {cfg.pp_size}", cfg.pp_size > 1),
            ("attention data parallelism", attn_dp_enabled_of(cfg)),
            (f"--disaggregation-mode {cfg.disaggregation_mode}", cfg.disaggregation_mode != "null"),
            ("--enable-hierarchical-cache", cfg.enable_hierarchical_cache),
            ("--enable-unified-cache-external-linker", cfg.enable_unified_cache_external_linker),
            ("--enable-flexkv", cfg.enable_flexkv),
            ("--enable-lmcache", cfg.enable_lmcache),
            # A cache of another package may bring the target's keys without the drafter's.
            (f"--radix-cache-backend {cfg.radix_cache_backend}", cfg.radix_cache_backend is not None),
            ("--enable-hisparse", cfg.enable_hisparse),
            # SGLang turns --enable-lora on for --lora-paths, after this.
            ("--enable-lora", cfg.enable_lora or cfg.lora_paths),
            ("--enable-mixed-chunk", cfg.enable_mixed_chunk),
            # Its prefill goes past the speculative worker.
            ("--enable-pdmux", cfg.enable_pdmux),
            ("--enable-unified-memory", cfg.enable_unified_memory),
            # It puts a grammar on requests that ask for none.
            ("--enable-strict-thinking", cfg.enable_strict_thinking),
            ("--speculative-draft-window-size", cfg.speculative_draft_window_size is not None),
            (f"--kv-cache-dtype {cfg.kv_cache_dtype}", _is_quantized(cfg.kv_cache_dtype)),
            (
                f"--speculative-draft-kv-cache-dtype {cfg.speculative_draft_kv_cache_dtype}",
                _is_quantized(cfg.speculative_draft_kv_cache_dtype),
            ),
            (
                f"a drafter quantized with {draft_quantization} (--speculative-draft-model-quantization unquant keeps "
                "it as it is)",
                draft_quantization is not None and (draft_quantization != "fp8" or cfg.device != "cuda"),
            ),
            (f"device {cfg.device}", cfg.device not in ("cuda", "cpu")),
        )
        if present
    ]
    if not reasons and _has_recurrent_layers(server_args):
        reasons.append("a target with recurrent layers, whose state each round must commit")
    if not reasons and cfg.speculative_draft_model_path is not None:
        drafter = drafter_config.read_config(drafter_dir(cfg))
        if drafter.variant not in SERVED:
            if not drafter.served_by_stock:
                raise ValueError(
                    f"the drafter {cfg.speculative_draft_model_path}: expected a DFlash drafter, got the variant "
                    f"{drafter.variant}, which neither sglang-dflash nor SGLang's DFLASH worker serves as it was "
                    "trained; use a DFlash drafter of the same target."
                )
            reasons.append(f"a drafter of the variant {drafter.variant}")
    return reasons


def _is_quantized(kv_cache_dtype: str | None) -> bool:
    return kv_cache_dtype not in (None, "auto", "bfloat16", "bf16")


def _has_recurrent_layers(server_args: Any) -> bool:
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config_of(server_args)) is not None


def drafter_dir(cfg: Any) -> Path:
    """Local directory of the drafter; a hub name is fetched into the hub client's cache.

    Raises:
        ValueError: neither a directory nor a model that the hub or its cache has.
    """
    path = Path(cfg.speculative_draft_model_path)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                cfg.speculative_draft_model_path,
                revision=cfg.speculative_draft_model_revision,
                allow_patterns=["*.json", "*.safetensors", MASK_EMBEDDING_FILE],
            )
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--speculative-draft-model-path: expected a directory or a model of the hub, got "
            f"{cfg.speculative_draft_model_path}; correct the path or download the drafter ({error})"
        ) from error


def point_to_readable_drafter(server_args: Any) -> None:
    """Replace a drafter in the speculators form by its rewritten copy; any other is left alone."""
    cfg = _view(server_args)
    if (cfg.speculative_algorithm or "").upper() != "DFLASH" or cfg.speculative_draft_model_path is None:
        return
    path = drafter_dir(cfg)
    readable = checkpoint.sglang_form(path, paths.home() / "drafters")
    if readable != path:
        _declare(server_args, speculative_draft_model_path=str(readable))


def resolve(server_args: Any) -> None:
    """Check the drafter against the target and settle every DFLASH argument.

    Raises:
        ValueError: a missing, malformed or misfitting drafter, or an argument out of range.
    """
    cfg = _view(server_args)
    if cfg.speculative_draft_model_path is None:
        raise ValueError(
            "--speculative-algorithm DFLASH: expected --speculative-draft-model-path, got none; name a DFlash drafter "
            "that was trained for the target."
        )
    block_size = _requested_block_size(cfg)
    path = drafter_dir(cfg)
    drafter = drafter_config.read_config(path)
    facts = _target_facts(server_args, drafter)
    drafter_fit.validate(drafter, facts, block_size)
    checkpoint.load_mask_embedding(path, drafter, drafter_fit.resolve_mask_token_id(drafter, facts))
    if (cfg.speculative_draft_load_format or cfg.load_format) != "dummy":
        checkpoint.check_tensors(path, drafter)
    for name in ("speculative_num_steps", "speculative_eagle_topk"):
        if getattr(cfg, name) not in (None, 1):
            raise ValueError(
                f"--{name.replace('_', '-')}: expected 1 or nothing, got {getattr(cfg, name)}; DFlash drafts a whole "
                "block in one step. Leave the flag out."
            )
    _refuse_unused(cfg)
    drafted_tokens(server_args)
    _declare(
        server_args,
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=block_size or drafter.block_size,
    )
    _resolve_scheduling(server_args)
    _resolve_attention(server_args)
    if cfg.enable_memory_saver and not cfg.enable_weights_cpu_backup:
        # The target gets its weights back from a trainer when a sleeping server wakes; nobody has the drafter's.
        _declare(server_args, enable_draft_weights_cpu_backup=True)


def _refuse_unused(cfg: Any) -> None:
    """Refuse flags of speculative decoding that nothing here would read."""
    given = [
        flag
        for flag, present in (
            ("--speculative-accept-threshold-single", cfg.speculative_accept_threshold_single != 1.0),
            ("--speculative-accept-threshold-acc", cfg.speculative_accept_threshold_acc != 1.0),
            ("--speculative-use-rejection-sampling", cfg.speculative_use_rejection_sampling),
            ("--speculative-use-block-verification", cfg.speculative_use_block_verification),
        )
        if present
    ]
    if given:
        raise ValueError(f"{', '.join(given)}: expected only flags that DFlash reads, got these; leave them out.")


def drafter(server_args: Any) -> drafter_config.DrafterConfig:
    """The drafter's config."""
    return drafter_config.read_config(drafter_dir(_view(server_args)))


def mask_token_id(server_args: Any) -> int:
    """The drafter's mask token, by the rule that `resolve` checked it with."""
    config = drafter(server_args)
    return drafter_fit.resolve_mask_token_id(config, _target_facts(server_args, config))


def mask_embedding(server_args: Any) -> torch.Tensor | None:
    """The drafter's own embedding (H) of the mask token, None where it uses the target's."""
    path = drafter_dir(_view(server_args))
    return checkpoint.load_mask_embedding(path, drafter(server_args), mask_token_id(server_args))


def has_token_map(server_args: Any) -> bool:
    return _view(server_args).speculative_token_map is not None


def drafted_tokens(server_args: Any) -> torch.Tensor | None:
    """The ids (S), int64, that --speculative-token-map lets the drafter draft; None for all.

    Raises:
        ValueError: a file that is no map of the target's tokens.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of

    path = _view(server_args).speculative_token_map
    return None if path is None else token_map.load(path, int(model_config_of(server_args).hf_text_config.vocab_size))


def _requested_block_size(cfg: Any) -> int | None:
    wide, short = cfg.speculative_num_draft_tokens, cfg.speculative_dflash_block_size
    if wide is not None and short is not None and int(wide) != int(short):
        raise ValueError(
            f"--speculative-num-draft-tokens {wide} and --speculative-dflash-block-size {short} name the same thing: "
            "expected one value; leave one of them out."
        )
    size = wide if wide is not None else short
    if size is not None and int(size) < 2:
        raise ValueError(
            f"--speculative-num-draft-tokens: expected at least 2 (the anchor and one draft), got {size}; use the "
            "drafter's block size by leaving the flag out."
        )
    return None if size is None else int(size)


def _target_facts(server_args: Any, drafter: drafter_config.DrafterConfig) -> drafter_fit.TargetFacts:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    model = model_config_of(server_args)
    text = model.hf_text_config
    return drafter_fit.TargetFacts(
        name=_view(server_args).model_path,
        hidden_size=int(text.hidden_size),
        num_hidden_layers=int(text.num_hidden_layers),
        vocab_size=int(text.vocab_size),
        last_tap=drafter_fit.last_tap(model.hf_config.architectures[0], int(text.num_hidden_layers)),
        token_ids=_token_ids(server_args) if drafter.mask_token or drafter.mask_token_id is None else None,
    )


def _token_ids(server_args: Any) -> dict[str, int]:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    cfg = _view(server_args)
    tokenizer = get_tokenizer(
        cfg.tokenizer_path or cfg.model_path,
        tokenizer_mode=cfg.tokenizer_mode,
        trust_remote_code=cfg.trust_remote_code,
        revision=cfg.revision,
    )
    return tokenizer.get_vocab()


def _resolve_scheduling(server_args: Any) -> None:
    cfg = _view(server_args)
    if cfg.max_running_requests is None:
        limit = _default_max_running_requests(server_args)
        _declare(server_args, max_running_requests=limit)
        logger.warning("At most %d requests run at once; set --max-running-requests to change it.", limit)
    if cfg.min_free_slots_delay is None:
        # SGLang would hold new requests back until several slots are free, for DFLASH alone.
        _declare(server_args, min_free_slots_delay=0)


def _default_max_running_requests(server_args: Any) -> int:
    """As many requests as SGLang captures graphs for, where what their blocks' logits become fits on the device.

    The largest tensors of a round are as wide as the vocabulary, a row a verified token: logits in the head's dtype and
    in float32, and where requests sample their probabilities and what the filters leave of them; where drafts are drawn
    theirs too. All of them together get a twentieth of the device's memory.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.utils.common import get_device_memory_capacity

    cfg = _view(server_args)
    memory_mib = get_device_memory_capacity(cfg.device)
    if memory_mib is None or cfg.device == "cpu":
        return LEAST_MAX_RUNNING_REQUESTS
    vocab_size = int(model_config_of(server_args).hf_text_config.vocab_size)
    # A proposer of the user's own may draw too.
    token_bytes = CHOSEN_BYTES if config.load().proposer == "argmax" else DRAWN_BYTES
    block_bytes = int(cfg.speculative_num_draft_tokens) * vocab_size * token_bytes
    fitting = int(memory_mib * 2**20 * LOGITS_SHARE / block_bytes) // 8 * 8
    captured = cfg.cuda_graph_config.decode.max_bs or LEAST_MAX_RUNNING_REQUESTS
    return max(min(fitting, captured), LEAST_MAX_RUNNING_REQUESTS)


def _resolve_attention(server_args: Any) -> None:
    if cpu.is_cpu_engine():
        _declare(server_args, speculative_draft_attention_backend=cpu.ATTENTION_BACKEND)
        return
    from sglang.srt.arg_groups.speculative_hook import _resolve_dflash_draft_attention_backend

    _resolve_dflash_draft_attention_backend(server_args)
