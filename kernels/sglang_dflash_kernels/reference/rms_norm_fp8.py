"""Reference of `rms_norm_fp8`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.reference.fp8_rows import store_rounded


def rms_norm_fp8(
    x_NH: torch.Tensor,
    residual_NH: torch.Tensor | None,
    weight_H: torch.Tensor,
    eps: float,
    *,
    out_NH: torch.Tensor,
    scale_N: torch.Tensor,
) -> None:
    """RMSNorm of each row, in FP8 (E4M3) with a scale a row; with a residual, of the sum of the two.

        residual[n] += x[n]                                       first, where there is one
        y[n] = s[n] / sqrt(mean(s[n]^2) + eps) * weight           s the sum before it is rounded to the residual's dtype
        scale[n] = max(|y[n]|) / 448                              FP8's largest number
        out[n] = fp8(y[n] / scale[n])

    Args:
        x_NH: float, shape [N, H], any row stride.
        residual_NH: float, shape [N, H], any row stride, written; None for none.
        weight_H: float, shape [H].
        eps: added to the mean of squares.
        out_NH: float8_e4m3fn output, shape [N, H], any row stride.
        scale_N: float32 output, shape [N].
    """
    contracts.rms_norm_fp8(x_NH, residual_NH, weight_H, out_NH=out_NH, scale_N=scale_N)
    value_NH = x_NH.float()
    if residual_NH is not None:
        value_NH = value_NH + residual_NH.float()
        residual_NH.copy_(value_NH)
    value_NH = value_NH * torch.rsqrt(value_NH.square().mean(dim=1, keepdim=True) + eps)
    store_rounded(value_NH * weight_H.float(), out_NH, scale_N)
