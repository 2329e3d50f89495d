"""Triton `silu_mul_fp8`: a program takes a row, which it reads once and holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.fp8_rows import num_warps, store_rounded


@triton.jit
def _silu_mul_fp8_kernel(
    gate_up_ptr,
    out_ptr,
    scale_ptr,
    columns,
    gate_up_stride,
    out_stride,
    FP8_MAX: tl.constexpr,
    FP8_LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    gate_row = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(gate_row, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_row + columns, mask=mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    store_rounded(value, out_ptr + row * out_stride + column, scale_ptr + row, mask, FP8_MAX, FP8_LEAST)


def silu_mul_fp8(gate_up_NI: torch.Tensor, *, out_NI: torch.Tensor, scale_N: torch.Tensor) -> None:
    """Contract: `reference.silu_mul_fp8`. Capture-safe, allocates nothing."""
    num_rows, columns = contracts.silu_mul_fp8(gate_up_NI, out_NI=out_NI, scale_N=scale_N)
    if num_rows == 0:
        return
    _silu_mul_fp8_kernel[(num_rows,)](
        gate_up_NI,
        out_NI,
        scale_N,
        columns,
        gate_up_NI.stride(0),
        out_NI.stride(0),
        FP8_MAX=contracts.FP8_MAX,
        FP8_LEAST=contracts.FP8_LEAST,
        BLOCK=triton.next_power_of_2(columns),
        num_warps=num_warps(columns),
    )
