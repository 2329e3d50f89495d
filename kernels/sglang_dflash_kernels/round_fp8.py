"""Triton `round_fp8`: a program takes a row, which it reads once and holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.fp8_rows import num_warps, store_rounded


@triton.jit
def _round_fp8_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    columns,
    x_stride,
    out_stride,
    FP8_MAX: tl.constexpr,
    FP8_LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    value = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    store_rounded(value, out_ptr + row * out_stride + column, scale_ptr + row, mask, FP8_MAX, FP8_LEAST)


def round_fp8(x_NH: torch.Tensor, *, out_NH: torch.Tensor, scale_N: torch.Tensor) -> None:
    """Contract: `reference.round_fp8`. Capture-safe, allocates nothing."""
    num_rows, columns = contracts.round_fp8(x_NH, out_NH=out_NH, scale_N=scale_N)
    if num_rows == 0:
        return
    _round_fp8_kernel[(num_rows,)](
        x_NH,
        out_NH,
        scale_N,
        columns,
        x_NH.stride(0),
        out_NH.stride(0),
        FP8_MAX=contracts.FP8_MAX,
        FP8_LEAST=contracts.FP8_LEAST,
        BLOCK=triton.next_power_of_2(columns),
        num_warps=num_warps(columns),
    )
