"""Triton `rms_norm_fp8`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.fp8_rows import launch


def rms_norm_fp8(
    x_NH: torch.Tensor,
    residual_NH: torch.Tensor | None,
    weight_H: torch.Tensor,
    eps: float,
    *,
    out_NH: torch.Tensor,
    scale_N: torch.Tensor,
) -> None:
    """Contract: `reference.rms_norm_fp8`. Capture-safe, allocates nothing."""
    contracts.rms_norm_fp8(x_NH, residual_NH, weight_H, out_NH=out_NH, scale_N=scale_N)
    launch("rms_norm", x_NH, out_NH, scale_N, residual_NH, weight_H, eps)
