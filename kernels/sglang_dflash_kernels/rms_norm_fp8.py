"""Triton `rms_norm_fp8`: a program takes a row, which it reads once and holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.fp8_rows import num_warps, store_rounded


@triton.jit
def _rms_norm_fp8_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    eps,
    columns,
    x_stride,
    residual_stride,
    out_stride,
    ADD: tl.constexpr,
    FP8_MAX: tl.constexpr,
    FP8_LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    value = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual = residual_ptr + row * residual_stride + column
        value += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual, value.to(residual_ptr.dtype.element_ty), mask=mask)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / columns + eps)
    value *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    store_rounded(value, out_ptr + row * out_stride + column, scale_ptr + row, mask, FP8_MAX, FP8_LEAST)


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
    num_rows, columns = contracts.rms_norm_fp8(x_NH, residual_NH, weight_H, out_NH=out_NH, scale_N=scale_N)
    if num_rows == 0:
        return
    _rms_norm_fp8_kernel[(num_rows,)](
        x_NH,
        residual_NH,
        weight_H,
        out_NH,
        scale_N,
        eps,
        columns,
        x_NH.stride(0),
        0 if residual_NH is None else residual_NH.stride(0),
        out_NH.stride(0),
        ADD=residual_NH is not None,
        FP8_MAX=contracts.FP8_MAX,
        FP8_LEAST=contracts.FP8_LEAST,
        BLOCK=triton.next_power_of_2(columns),
        num_warps=num_warps(columns),
    )
