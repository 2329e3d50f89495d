"""Kinds of DFlash drafter, told apart by the keys of their config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Kinds of drafter beside plain DFlash, in the order they are looked for: name, and whether SGLang 0.5.23's own DFLASH
# worker serves it as it was trained. It does not where the anchor's slot predicts too (it reads the wrong slots), where
# the drafter has an embedding of its own (it uses the target's), and for DSpark, which is another algorithm there.
VARIANTS: dict[str, bool] = {
    "lilicorr": True,
    "domino": True,
    "dspark": False,
    "dflash2": True,
    "laguna": True,
    "muse": True,
    "anchor-predicts": False,
    "nemotron": True,
    "own-embedding": False,
    "quantized": True,
    "attention-sink": True,
    "scaled-logits": True,
    "gemma-norm": True,
    "rope-layout": True,
    "mask-embedding": True,
}
# What sglang-dflash itself serves.
SERVED = ("dflash", "mask-embedding")
# A trained embedding for the block's mask slots, beside the checkpoint; the target's table keeps its own row.
MASK_EMBEDDING_FILE = "mask_embedding.pt"


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
        "nemotron": has("has_embed_tokens") and has("quantization_config"),
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
