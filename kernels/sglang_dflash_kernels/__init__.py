"""The device code of DFlash decoding: block preparation, greedy acceptance, feature storage, top-1, FP8 logits.

Every op exists twice under one name and one signature: a Triton kernel in this package and its oracle in pure torch in
`sglang_dflash_kernels.reference`. `select` chooses a set once, from the device; nothing switches later. Importing this
package does not import triton.

Size letters of the argument names: B requests, K tokens of a block, W verified width, N flat tokens, V vocabulary,
H hidden size, L draft layers, E = 2 * kv_heads * head_dim, D head_dim, P positions, R rotary_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_dflash_kernels.cache_pointers import CachePointers
from sglang_dflash_kernels.top1_workspace import Top1Workspace, top1_workspace

__all__ = ["CachePointers", "Ops", "Top1Workspace", "select", "top1_workspace"]


@dataclass(frozen=True)
class Ops:
    """One implementation of every op. The signatures are those of the modules in `reference/`."""

    name: str  # "triton" or "reference"
    prepare_block: Callable[..., None]
    accept_greedy: Callable[..., None]
    store_features: Callable[..., None]
    top1: Callable[..., None]
    fp8_logits: Callable[..., None]


def select(device: torch.device) -> Ops:
    """The Triton ops for a CUDA device, the reference ops for any other."""
    if device.type == "cuda":
        from sglang_dflash_kernels.accept_greedy import accept_greedy
        from sglang_dflash_kernels.fp8_logits import fp8_logits
        from sglang_dflash_kernels.prepare_block import prepare_block
        from sglang_dflash_kernels.store_features import store_features
        from sglang_dflash_kernels.top1 import top1

        return Ops("triton", prepare_block, accept_greedy, store_features, top1, fp8_logits)

    from sglang_dflash_kernels import reference

    names = ("prepare_block", "accept_greedy", "store_features", "top1", "fp8_logits")
    return Ops("reference", *(getattr(reference, name) for name in names))
