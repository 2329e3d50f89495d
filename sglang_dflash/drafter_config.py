"""What a drafter's config.json says, in one record, whichever of the two published forms it has.

z-lab form: `DFlashDraftModel`, a Qwen3-style config with the DFlash keys in `dflash_config` or at the top level.
Speculators form: `speculators_model_type: "dflash"`, the layer sizes in `transformer_layer_config`, and taps counted
one higher (`aux_hidden_state_layer_ids`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Name that SGLang 0.5.23 looks up in the tokenizer where a drafter names no mask token.
DEFAULT_MASK_TOKEN = "<|MASK|>"

# Values that Transformers' Qwen3Config takes for a key the file leaves out (it saves only what differs from them).
_QWEN3_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "intermediate_size": 22016,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "max_window_layers": 28,
    "sliding_window": 4096,
}
_DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A drafter's sizes and DFlash keys. Filled by `read_config`; a frozen value object otherwise.

    Tap i of `target_layer_ids` is the output of target layer i (Transformers' `hidden_states[i + 1]`).
    """

    block_size: int  # tokens of a block, anchor included
    mask_token_id: int | None
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = _DEFAULT_ROPE_THETA
    rope_scaling: Mapping[str, Any] | None = None  # None: plain RoPE
    max_position_embeddings: int = 32768
    num_target_layers: int | None = None
    mask_token: str | None = None
    layer_types: tuple[str, ...] = ()  # one per layer; empty means full attention everywhere
    sliding_window: int | None = None  # tokens, the query itself included
    is_causal: bool | None = None  # None: full layers bidirectional in the block, sliding layers causal
    attention_bias: bool = False
    attention_value_scale: float | None = None  # factor on V, of context and block
    hidden_act: str = "silu"
    draft_vocab_size: int | None = None  # speculators form only
    form: str = "z-lab"  # or "speculators"
    variant: str = "dflash"  # anything else: see VARIANTS
    source: str = field(default="", compare=False)  # where it was read, for messages

    def layer_type(self, layer: int) -> str:
        return self.layer_types[layer] if self.layer_types else "full_attention"

    def layer_is_causal(self, layer: int) -> bool:
        """Whether a slot of the block sees only the slots before it in this layer."""
        return self.layer_type(layer) == "sliding_attention" if self.is_causal is None else self.is_causal

    def layer_window(self, layer: int) -> int | None:
        """Tokens that a query sees at most in this layer, itself included; None for all."""
        return self.sliding_window if self.layer_type(layer) == "sliding_attention" else None


def default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Target layers tapped where a drafter lists none: evenly from 1 to the third-last (DFlash, arXiv 2602.06036)."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    if last < first:
        raise ValueError(f"expected a target of at least 4 layers, got {num_target_layers}; list target_layer_ids")
    return tuple(round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps))


def read_config(path: str | Path) -> DrafterConfig:
    """Read `config.json` of a drafter directory, in either form.

    Raises ValueError that lists every missing or mistyped key. A drafter of another kind than plain DFlash is read too
    and named in `variant`, so that the caller decides.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"expected a drafter directory with config.json, got {path}; download the drafter first")
    raw = json.loads(file.read_text())
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(raw).__name__}; restore the file")
    speculators = "speculators_model_type" in raw
    keys = _Keys(str(file), raw, speculators)
    config = DrafterConfig(
        block_size=keys.integer("block_size", minimum=1),
        mask_token_id=keys.optional_integer("mask_token_id"),
        mask_token=keys.text("mask_token"),
        target_layer_ids=_taps(keys, speculators),
        num_target_layers=keys.optional_integer("num_target_layers"),
        draft_vocab_size=keys.optional_integer("draft_vocab_size") if speculators else None,
        attention_value_scale=keys.number("attention_value_scale", None),
        hidden_size=keys.integer("hidden_size", minimum=1),
        num_hidden_layers=keys.integer("num_hidden_layers", minimum=1),
        num_attention_heads=keys.integer("num_attention_heads", minimum=1),
        num_key_value_heads=keys.integer("num_key_value_heads", minimum=1),
        head_dim=keys.integer("head_dim", minimum=1),
        intermediate_size=keys.integer("intermediate_size", minimum=1),
        vocab_size=keys.integer("vocab_size", minimum=1),
        max_position_embeddings=keys.integer("max_position_embeddings", minimum=1),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6) or 1e-6,
        attention_bias=bool(keys.get("attention_bias") or False),
        hidden_act=keys.text("hidden_act") or "silu",
        layer_types=_layer_types(keys),
        sliding_window=_sliding_window(keys),
        is_causal=_is_causal(keys, speculators),
        form="speculators" if speculators else "z-lab",
        variant=find_variant(raw, has_mask_embedding=(Path(path) / "mask_embedding.pt").exists()),
        source=str(path),
        **_rope(keys),
    )
    keys.raise_problems()
    return config


def config_json(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """config.json of the z-lab form; SGLang finds the class by `architectures` and reads the rest as a Qwen3Config.

    `dtype` is the tensors' dtype by torch's name, such as "bfloat16".
    """
    dflash: dict[str, Any] = {"target_layer_ids": list(config.target_layer_ids)}
    optional = {
        "mask_token_id": config.mask_token_id,
        "mask_token": config.mask_token,
        "attention_value_scale": config.attention_value_scale,
    }
    dflash |= {key: value for key, value in optional.items() if value is not None}
    values: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": dflash,
        "num_target_layers": config.num_target_layers,
        "is_causal": config.is_causal,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "layer_types": [config.layer_type(i) for i in range(config.num_hidden_layers)],
        "max_window_layers": config.num_hidden_layers,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    nullable = ("sliding_window", "rope_scaling")
    return {key: value for key, value in values.items() if value is not None or key in nullable}


def config_for_target(
    target: Mapping[str, Any], num_layers: int, block_size: int, mask_token_id: int, taps: tuple[int, ...] | None
) -> DrafterConfig:
    """An untrained drafter's config with the sizes of the target's config.json; `taps` None means `default_taps`."""
    rope = target.get("rope_parameters") or {}
    heads = target["num_attention_heads"]
    head_dim = target.get("head_dim") or (
        128 if target.get("model_type") == "qwen3" else target["hidden_size"] // heads
    )
    return DrafterConfig(
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=taps or default_taps(target["num_hidden_layers"], num_layers),
        num_target_layers=target["num_hidden_layers"],
        hidden_size=target["hidden_size"],
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=target.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate_size=target["intermediate_size"],
        vocab_size=target["vocab_size"],
        rms_norm_eps=target.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or target.get("rope_theta") or 10000.0),
        max_position_embeddings=target.get("max_position_embeddings", 32768),
    )


class _Keys:
    """Typed look-ups in a config; problems are collected and raised together."""

    def __init__(self, name: str, raw: Mapping[str, Any], speculators: bool) -> None:
        nested = raw.get("transformer_layer_config" if speculators else "text_config") or {}
        # The DFlash keys come first, as SGLang reads them; then the layer sizes; then the top level.
        self.scopes: list[Mapping[str, Any]] = [raw.get("dflash_config") or {}, nested, raw]
        model_type = nested.get("model_type") or ("qwen3" if speculators else raw.get("model_type"))
        self.defaults = _QWEN3_DEFAULTS if model_type == "qwen3" else {}
        self.name, self.problems = name, list[str]()

    def get(self, key: str) -> Any:
        for scope in self.scopes:
            if scope.get(key) is not None:
                return scope[key]
        return None

    def optional_integer(self, key: str, minimum: int = 0) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.problems.append(f"{key}: expected an integer of at least {minimum}, got {value!r}; correct it")
            return None
        return value

    def integer(self, key: str, minimum: int = 0) -> int:
        if self.get(key) is None and key not in self.defaults:
            self.problems.append(f"{key}: expected an integer, got no such key; add it")
        value = self.optional_integer(key, minimum)
        return self.defaults.get(key, minimum) if value is None else value

    def number(self, key: str, default: float | None) -> float | None:
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            self.problems.append(f"{key}: expected a number, got {value!r}; correct it")
            return default
        return default if value is None else float(value)

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            self.problems.append(f"{key}: expected a non-empty string, got {value!r}; correct it or remove it")
            return None
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not value or any(type(x) is not int for x in value):
            self.problems.append(f"{key}: expected a non-empty list of integers, got {value!r}; correct it")
            return ()
        return tuple(value)

    def raise_problems(self) -> None:
        if self.problems:
            raise ValueError(f"{self.name} is not a drafter's config:\n  - " + "\n  - ".join(self.problems))


def _taps(keys: _Keys, speculators: bool) -> tuple[int, ...]:
    if speculators:
        ids = keys.integers("aux_hidden_state_layer_ids")
        if ids is None:
            keys.problems.append("aux_hidden_state_layer_ids: expected a list of target layers, got none; add it")
        return tuple(i - 1 for i in ids or ())
    ids = keys.integers("target_layer_ids")
    if ids is not None:
        return ids
    num_target_layers, num_layers = keys.optional_integer("num_target_layers"), keys.integer("num_hidden_layers", 1)
    if num_target_layers is None:
        keys.problems.append("target_layer_ids: expected it or num_target_layers, got neither; add target_layer_ids")
        return ()
    return default_taps(num_target_layers, num_layers)


def _rope(keys: _Keys) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, from the keys of Transformers 4 or from `rope_parameters` of Transformers 5."""
    scaling = dict(keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or keys.get("rope_theta") or _DEFAULT_ROPE_THETA
    plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    return {"rope_theta": float(theta), "rope_scaling": None if plain else scaling}


def _layer_types(keys: _Keys) -> tuple[str, ...]:
    types = keys.get("layer_types")
    num_layers = keys.integer("num_hidden_layers", 1)
    if types is None:  # as Qwen3Config fills them
        window, first = _sliding_window(keys), keys.integer("max_window_layers")
        types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        keys.problems.append(f"layer_types: expected a list of {num_layers} names, got {types!r}; correct it")
        return ()
    return () if set(types) == {"full_attention"} else tuple(types)


def _sliding_window(keys: _Keys) -> int | None:
    """Qwen3Config drops `sliding_window` unless `use_sliding_window` is set, and so does SGLang."""
    return keys.integer("sliding_window", 1) if keys.get("use_sliding_window") else None


def _is_causal(keys: _Keys, speculators: bool) -> bool | None:
    if speculators:  # full layers are always bidirectional; sliding layers are causal unless this key is set
        return False if keys.get("sliding_window_non_causal") else None
    value = keys.get("is_causal")
    return None if value is None else bool(value)


# Kinds of drafter beside plain DFlash, in the order they are looked for: name, and whether SGLang 0.5.23's own worker
# serves it (it runs a drafter whose anchor slot predicts too, or whose labels are shifted, with the wrong slots).
VARIANTS: dict[str, bool] = {
    "lilicorr": True,
    "domino": True,
    "dspark": True,
    "dflash2": True,
    "laguna": True,
    "muse": True,
    "anchor-predicts": False,
    "own-embedding": True,
    "quantized": True,
    "attention-sink": True,
    "scaled-logits": True,
    "gemma-norm": True,
    "rope-layout": True,
    "mask-embedding": True,
}


def find_variant(raw: Mapping[str, Any], *, has_mask_embedding: bool = False) -> str:
    """Name the kind of drafter from its config: "dflash", or a key of `VARIANTS`."""
    nested = raw.get("dflash_config") or {}
    layer = raw.get("transformer_layer_config") or raw.get("text_config") or {}
    architectures = " ".join(raw.get("architectures") or [])
    model_type = str(raw.get("speculators_model_type", "dflash"))

    def has(*keys: str) -> bool:
        return any(scope.get(key) for scope in (nested, raw, layer) for key in keys)

    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    partial = {float(scope.get("partial_rotary_factor") or 1.0) for scope in (raw, layer, rope)} != {1.0}
    neox = all(scope.get(key, True) for scope in (raw, layer) for key in ("rope_is_neox_style", "is_neox_style"))
    signs = {
        "lilicorr": "LiLiCorr" in architectures or any(key.startswith("lilicorr_") for key in nested),
        "domino": "domino" in (nested.get("projector_type"), raw.get("projector_type"), model_type),
        "dspark": "DSpark" in architectures or model_type == "dspark" or has("markov_rank"),
        "dflash2": "DFlash2" in architectures
        or model_type == "dflash2"
        or has("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"),
        "laguna": "Laguna" in architectures or has("gating"),
        "muse": "MuseGlimmer" in architectures,
        "anchor-predicts": has("sample_from_anchor", "query_zero_predicts_next", "shift_label"),
        "own-embedding": has("has_embed_tokens", "has_lm_head"),
        "quantized": has("quantization_config"),
        "attention-sink": has("attention_sink_bias"),
        "scaled-logits": has("final_logit_softcapping") or nested.get("output_multiplier", 1.0) != 1.0,
        "gemma-norm": has("use_gemma_norm"),
        "rope-layout": partial or not neox or "rope_dim" in rope,
        "mask-embedding": has_mask_embedding,
    }
    assert signs.keys() == VARIANTS.keys(), "one sign a variant"
    return next((name for name, found in signs.items() if found), "dflash")
