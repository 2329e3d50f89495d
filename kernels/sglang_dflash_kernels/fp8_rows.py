"""The kernel of the ops that leave rows in FP8: a program takes a row, which it reads once and holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash_kernels import contracts


@triton.jit
def _fp8_rows_kernel(
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
    OP: tl.constexpr,
    FP8_MAX: tl.constexpr,
    FP8_LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    x = x_ptr + row * x_stride + column
    value = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if OP == "silu_mul":
        value = value * tl.sigmoid(value) * tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    if OP == "rms_norm":
        if residual_ptr is not None:
            residual = residual_ptr + row * residual_stride + column
            value += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
            tl.store(residual, value.to(residual_ptr.dtype.element_ty), mask=mask)
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / columns + eps)
        value *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0), FP8_LEAST) / FP8_MAX
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * out_stride + column, (value / scale).to(tl.float8e4nv), mask=mask)


def launch(
    op: str,
    x: torch.Tensor,
    out: torch.Tensor,
    scale_N: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """The rows of x, after `op` ("round", "rms_norm" or "silu_mul"), into those of `out`. Allocates nothing."""
    num_rows, columns = out.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(columns)
    _fp8_rows_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        scale_N,
        eps,
        columns,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        OP=op,
        FP8_MAX=contracts.FP8_MAX,
        FP8_LEAST=contracts.FP8_LEAST,
        BLOCK=block,
        # 16 columns a thread, more in rows of over 8,192.
        num_warps=min(max(block // 512, 1), 16),
    )
