"""Triton `round_fp8`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.fp8_rows import launch


def round_fp8(x_NH: torch.Tensor, *, out_NH: torch.Tensor, scale_N: torch.Tensor) -> None:
    """Contract: `reference.round_fp8`. Capture-safe, allocates nothing."""
    contracts.round_fp8(x_NH, out_NH=out_NH, scale_N=scale_N)
    launch("round", x_NH, out_NH, scale_N)
