"""Whether a drafter fits a target: everything that can be known before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_dflash.drafter_config import DEFAULT_MASK_TOKEN, DrafterConfig
from sglang_dflash_kernels.contracts import MAX_WIDTH

# Target classes of SGLang 0.5.23 that also hand out the output of their last layer, before the final norm. Every other
# class hands out a layer's output where the next layer reads it, so its last layer has none to give.
_LAST_LAYER_CAPTURED = frozenset(
    {
        "BeamForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "GptOssForCausalLM",
        "KimiK3ForConditionalGeneration",
        "KimiK3LinearForCausalLM",
        "LagunaForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Lfm2VlForConditionalGeneration",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
    }
)


def last_tap(architecture: str, num_hidden_layers: int) -> int:
    """The last layer whose output a target class of SGLang 0.5.23 can hand to a drafter, counted from 0."""
    return num_hidden_layers - (1 if architecture in _LAST_LAYER_CAPTURED else 2)


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What of the target decides whether a drafter fits it. Filled by the caller from the target's config."""

    name: str  # path or model id, for messages
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int  # rows of the embedding
    last_tap: int  # see `last_tap()`
    token_ids: Mapping[str, int] | None = None  # the tokenizer's vocabulary, None where there is no tokenizer


def resolve_mask_token_id(config: DrafterConfig, target: TargetFacts) -> int:
    """The mask token's id: the config's own, else the tokenizer's id of the config's mask token.

    Raises ValueError where the two contradict each other, where neither gives an id, or where the target's embedding
    has no such row.
    """
    token, own = config.mask_token or DEFAULT_MASK_TOKEN, config.mask_token_id
    known = None if target.token_ids is None else target.token_ids.get(token)
    key = "mask_token_id"
    if own is not None and known is not None and known != own:
        expected = f"{known}, the tokenizer's id of {token!r}"
        raise ValueError(_problem(key, expected, own, "keep the id of the training and correct mask_token"))
    mask_token_id = known if own is None else own
    if mask_token_id is None:
        got = "no id, and no tokenizer" if target.token_ids is None else f"no id, and no {token!r} in the tokenizer"
        raise ValueError(_problem(key, "an id in config.json or of the tokenizer", got, "add the id of the training"))
    if not 0 <= mask_token_id < target.vocab_size:
        expected = f"an id below the target's vocabulary size {target.vocab_size}"
        raise ValueError(_problem(key, expected, mask_token_id, "use the target that the drafter was trained for"))
    return mask_token_id


def validate(config: DrafterConfig, target: TargetFacts, block_size: int | None = None) -> None:
    """Refuse a drafter that does not fit the target, or a block that it was not trained for.

    `block_size` is the requested block, anchor included; None means the trained one. A narrower block than the trained
    one is served: drafters generalise down and not up (DFlash, arXiv 2602.06036, ablations).

    Raises one ValueError with every problem found, each as: key, expected, got, what to change.
    """
    problems = _taps(config, target) + _sizes(config, target) + _layers(config) + _block(config, block_size)
    try:
        resolve_mask_token_id(config, target)
    except ValueError as problem:
        problems.append(str(problem))
    if problems:
        who = config.source or "the drafter"
        raise ValueError(f"{who} does not fit target {target.name}:\n  - " + "\n  - ".join(problems))


def _problem(key: str, expected: object, got: object, do: str) -> str:
    return f"{key}: expected {expected}, got {got}; {do}"


def _taps(config: DrafterConfig, target: TargetFacts) -> list[str]:
    key, taps, problems = "target_layer_ids", list(config.target_layer_ids), []
    if outside := [tap for tap in taps if not 0 <= tap <= target.last_tap]:
        expected = f"layers 0 to {target.last_tap}, whose output SGLang hands out (of {target.num_hidden_layers})"
        problems.append(_problem(key, expected, outside, "use a drafter trained on such layers"))
    if taps != sorted(set(taps)):
        do = "reorder the list and the column blocks of fc.weight with it"
        problems.append(_problem(key, "ascending, distinct layers (the order their features arrive in)", taps, do))
    return problems


def _sizes(config: DrafterConfig, target: TargetFacts) -> list[str]:
    problems = []
    other = "use the drafter made for this target"
    for key, got, expected in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_hidden_layers),
    ):
        if got is not None and got != expected:
            problems.append(_problem(key, f"{expected} as the target's", got, other))
    if config.draft_vocab_size not in (None, config.vocab_size):
        expected_vocab = f"the whole vocabulary ({config.vocab_size})"
        do = "export the drafter without a reduced vocabulary"
        problems.append(_problem("draft_vocab_size", expected_vocab, config.draft_vocab_size, do))
    return problems


def _layers(config: DrafterConfig) -> list[str]:
    problems = []
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        expected = f"a multiple of num_key_value_heads ({kv_heads})"
        problems.append(_problem("num_attention_heads", expected, heads, "correct the two"))
    if config.head_dim % 2:
        problems.append(_problem("head_dim", "an even number, for RoPE", config.head_dim, "correct it"))
    if config.hidden_act != "silu":
        problems.append(_problem("hidden_act", "silu", config.hidden_act, "use a drafter with SwiGLU layers"))
    if unknown := sorted(set(config.layer_types) - {"full_attention", "sliding_attention"}):
        problems.append(_problem("layer_types", "full_attention or sliding_attention", unknown, "correct the list"))
    window = config.sliding_window
    if "sliding_attention" in config.layer_types and (window is None or window < config.block_size):
        expected = f"at least block_size ({config.block_size}) for the sliding_attention layers"
        problems.append(_problem("sliding_window", expected, window, "set sliding_window and use_sliding_window"))
    return problems


def _block(config: DrafterConfig, block_size: int | None) -> list[str]:
    trained = config.block_size
    if trained < 2:
        return [_problem("block_size", "at least 2 (anchor and one draft)", trained, "correct config.json")]
    if block_size is not None and not 2 <= block_size <= trained:
        expected = f"2 to {trained}, the width the drafter was trained with"
        return [_problem("block size", expected, block_size, f"request at most {trained} draft tokens")]
    if (width := block_size or trained) > MAX_WIDTH:
        expected = f"at most {MAX_WIDTH}, the widest block that the kernels lay out"
        return [_problem("block size", expected, width, f"set --speculative-num-draft-tokens to at most {MAX_WIDTH}")]
    return []
