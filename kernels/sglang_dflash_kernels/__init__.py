"""The device code of DFlash decoding: block preparation, greedy acceptance, feature storage, top-1, products
in FP8, and products of a few rows.

Every op exists twice under one name and one signature: a Triton kernel in this package and its oracle in pure torch in
`sglang_dflash_kernels.reference`. `select` chooses a set once, from the device; nothing switches later. Importing this
package does not import triton.

Size letters of the argument names: B requests, K tokens of a block, W verified width, N flat tokens, V vocabulary,
H hidden size, L draft layers, E = 2 * kv_heads * head_dim, D head_dim, P positions, R rotary_dim,
I inputs and O outputs of a product.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from sglang_dflash_kernels.cache_pointers import CachePointers
from sglang_dflash_kernels.contracts import SKINNY_MAX_ROWS, SKINNY_MAX_SPLITS, SKINNY_TILE, skinny_splits
from sglang_dflash_kernels.top1_workspace import Top1Workspace, top1_workspace

__all__ = [
    "SKINNY_MAX_ROWS",
    "SKINNY_MAX_SPLITS",
    "SKINNY_TILE",
    "CachePointers",
    "Ops",
    "Top1Workspace",
    "select",
    "skinny_splits",
    "top1_workspace",
]


@dataclass(frozen=True)
class Ops:
    """One implementation of every op. The signatures are those of the modules in `reference/`."""

    name: str  # "triton" or "reference"
    prepare_block: Callable[..., None]
    accept_greedy: Callable[..., None]
    store_features: Callable[..., None]
    top1: Callable[..., None]
    fp8_logits: Callable[..., None]
    round_fp8: Callable[..., None]
    rms_norm_fp8: Callable[..., None]
    silu_mul_fp8: Callable[..., None]
    skinny_linear: Callable[..., None]


def select(device: torch.device) -> Ops:
    """The Triton ops for a CUDA device, the reference ops for any other."""
    names = [field.name for field in fields(Ops) if field.name != "name"]
    if device.type == "cuda":
        modules = (importlib.import_module(f"sglang_dflash_kernels.{name}") for name in names)
        return Ops("triton", *(getattr(module, name) for module, name in zip(modules, names, strict=True)))

    from sglang_dflash_kernels import reference

    return Ops("reference", *(getattr(reference, name) for name in names))
