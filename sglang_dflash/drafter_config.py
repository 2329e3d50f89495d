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

from sglang_dflash.drafter_variants import MASK_EMBEDDING_FILE, VARIANTS, find_variant

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
    variant: str = "dflash"  # anything else: see drafter_variants
    source: str = field(default="", compare=False)  # where it was read, for messages

    @property
    def served_by_stock(self) -> bool:
        """Whether SGLang 0.5.23's own worker loads this checkpoint as it is and serves it as it was trained."""
        return self.form == "z-lab" and VARIANTS.get(self.variant, True)

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
    raw = _json_object(file)
    speculators = "speculators_model_type" in raw
    keys = _Keys(str(file), raw, speculators)
    variant = find_variant(raw, has_mask_embedding=(Path(path) / MASK_EMBEDDING_FILE).exists())
    _check_kind(keys, raw, variant)
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
        attention_bias=keys.flag("attention_bias") or False,
        hidden_act=keys.text("hidden_act") or "silu",
        layer_types=_layer_types(keys),
        sliding_window=_sliding_window(keys),
        is_causal=_is_causal(keys, speculators),
        form="speculators" if speculators else "z-lab",
        variant=variant,
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
    return {
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


def _json_object(file: Path) -> dict[str, Any]:
    """A config.json whose nested objects are objects too."""
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON, got {error}; restore the file") from None
    nested = ("dflash_config", "text_config", "transformer_layer_config", "rope_parameters", "rope_scaling")
    objects = {"the file": raw} if not isinstance(raw, dict) else {key: raw.get(key) or {} for key in nested}
    for key, value in objects.items():
        if not isinstance(value, dict):
            raise ValueError(f"{file}: {key}: expected a JSON object, got {value!r}; restore it")
    return raw


def _check_kind(keys: _Keys, raw: Mapping[str, Any], variant: str) -> None:
    """Refuse what is no DFlash drafter of any kind, such as the target itself or an EAGLE-3 head."""
    if "speculators_model_type" in raw:
        key, kind, known = (
            "speculators_model_type",
            raw["speculators_model_type"],
            raw["speculators_model_type"] == "dflash",
        )
    else:
        key, kind = "architectures", raw.get("architectures")
        known = "DFlashDraftModel" in (kind or [])
    if not known and variant == "dflash":
        wanted = "dflash" if key == "speculators_model_type" else "DFlashDraftModel"
        keys.problems.append(f"{key}: expected {wanted}, got {kind!r}; pass a DFlash drafter")


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

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{key}: expected true or false, got {value!r}; correct it")
            return None
        return value

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
    if any(isinstance(value, dict) for value in scaling.values()):
        keys.problems.append(f"rope_parameters: expected one set for all layers, got {scaling}; keep one of them")
        return {}
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
    return keys.integer("sliding_window", 1) if keys.flag("use_sliding_window") else None


def _is_causal(keys: _Keys, speculators: bool) -> bool | None:
    if speculators:  # full layers are always bidirectional; sliding layers are causal unless this key is set
        return False if keys.flag("sliding_window_non_causal") else None
    return keys.flag("is_causal")
