"""Inject target features: project them once, then store keys and values of every draft layer.

For a token with concatenated tapped hidden states f (D) the drafter's cache holds, in each layer l,

    c = hidden_norm(fc f)        k_l = rope(k_norm_l(K_l c), position)        v_l = V_l c

with the same K_l and V_l that the block's own tokens use (arXiv 2602.06036, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class DraftLayers:
    """What injection reads of the drafter. Filled by `host.draft_model`.

    Attributes:
        fuse: features (N, D) to the fused context (N, H).
        project: the context to keys, then values, of every layer (N, L, E), any strides; by the drafter's own weights.
        k_norm_LD: weight of each layer's key norm, D here the head's size.
        eps_L: float32, epsilon of each layer's key norm.
        cos_sin_PR: rotary table, a row a position. Held here: captured graphs read it; SGLang may replace its own.
        value_scale: factor on the values, 1.0 for none.
        caches: the drafter's cache, `sglang_dflash_kernels.CachePointers`.
    """

    fuse: Callable[[torch.Tensor], torch.Tensor]
    project: Callable[[torch.Tensor], torch.Tensor]
    k_norm_LD: torch.Tensor
    eps_L: torch.Tensor
    cos_sin_PR: torch.Tensor
    value_scale: float
    caches: Any


def project(weight_LEH: torch.Tensor, bias_LE: torch.Tensor | None, context_NH: torch.Tensor) -> torch.Tensor:
    """`DraftLayers.project` by dense weights: of each layer the key rows, then the value rows, and their biases."""
    kv_LNE = torch.bmm(context_NH.expand(weight_LEH.shape[0], *context_NH.shape), weight_LEH.transpose(1, 2))
    if bias_LE is not None:
        kv_LNE += bias_LE[:, None]
    return kv_LNE.transpose(0, 1)


class FeatureInjector:
    """Writes the keys and values of the target's tokens into the drafter's cache, all layers in one kernel."""

    def __init__(self, ops: Any, layers: DraftLayers) -> None:
        self._store_features = ops.store_features
        self._layers = layers

    def inject(
        self,
        features_ND: torch.Tensor,
        positions_N: torch.Tensor,
        slots_N: torch.Tensor,
    ) -> None:
        """Store the features of N tokens. Capture-safe.

        Args:
            features_ND: tapped hidden states.
            positions_N: int64, absolute positions.
            slots_N: int64, cache slots.
        """
        layers = self._layers
        self._store_features(
            layers.project(layers.fuse(features_ND)),
            positions_N,
            slots_N,
            k_norm_LD=layers.k_norm_LD,
            eps_L=layers.eps_L,
            cos_sin_PR=layers.cos_sin_PR,
            value_scale=layers.value_scale,
            caches=layers.caches,
        )
