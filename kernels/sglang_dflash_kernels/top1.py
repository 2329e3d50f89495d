"""Triton `top1`: a row is split over programs that each reduce 4096 logits in registers; a second kernel combines them.

A split reports (maximum, its first index, sum of exp(logit - maximum)); a split with a NaN reports maximum NaN and the
first NaN's index, and one of -inf only reports total 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.top1_workspace import MAX_SPLITS, SPLIT_LOGITS, Top1Workspace, top1_workspace

# Added to an index to rank it behind every index without: above any vocabulary, and twice it is still an int32.
_BEHIND = tl.constexpr(1 << 29)

_SPLIT_WARPS = 4


@triton.jit
def _first_of(candidate, is_nan, index):
    """The first NaN's index, else the first candidate's index plus _BEHIND."""
    rank = tl.where(is_nan, index, tl.where(candidate, index + _BEHIND, 2 * _BEHIND))
    return tl.min(rank, axis=0)


@triton.jit
def _split_kernel(
    logits_ptr, maximum_ptr, index_ptr, total_ptr, vocab, logits_stride, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    index = split * BLOCK + tl.arange(0, BLOCK)
    in_row = index < vocab
    logit = tl.load(logits_ptr + row * logits_stride + index, mask=in_row, other=float("-inf")).to(tl.float32)

    is_nan = logit != logit
    maximum = tl.max(logit, axis=0)  # any value where there is a NaN: nothing below depends on it then
    # A lane past the row holds -inf and stands behind a lane of the row, so it is never the first.
    rank = _first_of(logit == maximum, is_nan, index)
    # exp(-inf - -inf) is NaN; a split of -inf only must add nothing to the row.
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.exp(logit - shift), axis=0)

    partial = row * MAX_SPLITS + split
    has_nan = rank < _BEHIND
    tl.store(maximum_ptr + partial, tl.where(has_nan, float("nan"), maximum))
    tl.store(index_ptr + partial, tl.where(has_nan, rank, rank - _BEHIND))
    tl.store(total_ptr + partial, total)


@triton.jit(do_not_specialize=["num_splits", "columns", "tokens_stride", "confidence_stride"])
def _combine_kernel(
    maximum_ptr,
    index_ptr,
    total_ptr,
    tokens_ptr,
    confidence_ptr,
    num_splits,
    columns,
    tokens_stride,
    confidence_stride,
    MAX_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MAX_SPLITS)
    in_row = split < num_splits
    partial = row * MAX_SPLITS + split
    maxima = tl.load(maximum_ptr + partial, mask=in_row, other=float("-inf"))
    index = tl.load(index_ptr + partial, mask=in_row, other=0)
    totals = tl.load(total_ptr + partial, mask=in_row, other=0.0)

    is_nan = maxima != maxima
    maximum = tl.max(maxima, axis=0)
    rank = _first_of(maxima == maximum, is_nan, index)
    has_nan = rank < _BEHIND
    # NaN where softmax is: with a NaN or +inf in the row, and as -inf - -inf in a row of -inf only.
    total = tl.sum(totals * tl.exp(maxima - maximum), axis=0)

    tl.store(tokens_ptr + row // columns * tokens_stride + row % columns, tl.where(has_nan, rank, rank - _BEHIND))
    tl.store(confidence_ptr + row // columns * confidence_stride + row % columns, 1.0 / total)


def top1(
    logits_NV: torch.Tensor,
    *,
    tokens_N: torch.Tensor,
    confidence_N: torch.Tensor,
    workspace: Top1Workspace | None = None,
) -> None:
    """Contract: `reference.top1`. Capture-safe; allocates a workspace where none is given."""
    num_rows, vocab = contracts.top1(logits_NV, tokens_N=tokens_N, confidence_N=confidence_N, workspace=workspace)
    if num_rows == 0:
        return
    if workspace is None:
        workspace = top1_workspace(num_rows, logits_NV.device)
    num_splits = triton.cdiv(vocab, SPLIT_LOGITS)
    _split_kernel[(num_rows, num_splits)](
        logits_NV,
        *workspace,
        vocab,
        logits_NV.stride(0),
        MAX_SPLITS=MAX_SPLITS,
        BLOCK=SPLIT_LOGITS,
        num_warps=_SPLIT_WARPS,
    )
    _combine_kernel[(num_rows,)](
        *workspace,
        tokens_N,
        confidence_N,
        num_splits,
        tokens_N.shape[-1],
        tokens_N.stride(0),
        confidence_N.stride(0),
        MAX_SPLITS=MAX_SPLITS,
        num_warps=1,
    )
