"""Triton `skinny_linear`: a program takes 64 outputs and all rows; the weight is read once, at memory's rate.

The weight stands on the left of the product, where the tensor cores take 64 rows for four warps, and the few rows of x
on the right. Where a weight has too few outputs to occupy the card, programs share a tile's inputs and the last of them
to arrive adds up their sums, always in the same order: one launch, and the same bits every time, whatever the number of
rows. The kernel is launched while the one before it ends, and waits for it (programmatic dependent launch).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash_kernels import contracts

# Bytes of weight and x on their way to a program that has a multiprocessor for itself, and where three share one.
_ALONE = 128 * 1024
_SHARED = 64 * 1024


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    outputs,
    inputs,
    share,
    x_stride,
    out_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile * TILE + tl.arange(0, TILE)
    row = tl.arange(0, ROWS)
    part = tl.arange(0, TILE)
    is_row = (row < num_rows)[None, :]
    first = split * share
    last = tl.minimum(first + share, inputs)
    weight_row = weight_ptr + output[:, None].to(tl.int64) * inputs + part[None, :]
    x_row = x_ptr + row[None, :].to(tl.int64) * x_stride + part[:, None]
    if DEPENDENT:
        # In this order: what is launched next finds all before this kernel done, and waits for this one itself.
        gdc_wait()
        gdc_launch_dependents()

    total = tl.zeros((TILE, ROWS), tl.float32)
    for at in tl.range(first, last, TILE, num_stages=STAGES):
        weight = tl.load(weight_row + at, eviction_policy="evict_first")
        x = tl.load(x_row + at, mask=is_row, other=0.0)
        total = tl.dot(weight, x, total)

    if SPLITS > 1:
        place = row[None, :] * outputs + output[:, None]
        size = num_rows * outputs
        tl.store(partial_ptr + split * size + place, total, mask=is_row)
        tl.debug_barrier()  # all of this program's sums are written before it says so
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        total = tl.zeros((TILE, ROWS), tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(partial_ptr + other * size + place, mask=is_row, other=0.0, cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output).to(tl.float32)[:, None]
    out = out_ptr + row[None, :].to(tl.int64) * out_stride + output[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row)


def skinny_linear(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    *,
    out_NO: torch.Tensor,
    partial_SNO: torch.Tensor,
    arrived_T: torch.Tensor,
) -> None:
    """Contract: `reference.skinny_linear`. Capture-safe, allocates nothing."""
    num_rows, outputs, inputs = contracts.skinny_linear(
        x_NI, weight_OI, bias_O, out_NO=out_NO, partial_SNO=partial_SNO, arrived_T=arrived_T
    )
    tile, splits = contracts.SKINNY_TILE, partial_SNO.shape[0]
    rows = max(16, triton.next_power_of_2(num_rows))
    grid = (outputs // tile, splits)
    in_flight = _ALONE if grid[0] * splits <= contracts.SKINNY_PROGRAMS else _SHARED
    dependent = {"DEPENDENT": True, "launch_pdl": True} if x_NI.is_cuda else {"DEPENDENT": False}
    _skinny_linear_kernel[grid](
        x_NI,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        out_NO,
        partial_SNO,
        arrived_T,
        num_rows,
        outputs,
        inputs,
        contracts.skinny_share(inputs, splits),
        x_NI.stride(0),
        out_NO.stride(0),
        HAS_BIAS=bias_O is not None,
        ROWS=rows,
        TILE=tile,
        SPLITS=splits,
        STAGES=in_flight // (x_NI.element_size() * tile * (tile + rows)),
        num_warps=4,
        **dependent,
    )
