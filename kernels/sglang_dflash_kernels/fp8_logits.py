"""Triton `fp8_logits`: a program takes 128 tokens of the head and all rows; the head is read once, at memory's rate.

The head stands on the left of the product, where the tensor cores take 64 rows for four warps, and the few hidden
states on the right.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash_kernels import contracts

_TOKENS = 128
_STAGES = 4
_WARPS = 8


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_logits_kernel(
    hidden_ptr,
    weight_ptr,
    scale_ptr,
    logits_ptr,
    num_rows,
    vocab,
    hidden_size,
    hidden_stride,
    logits_stride,
    FP8_MAX: tl.constexpr,
    FP8_LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PART)
    in_vocab = token < vocab
    is_row = row < num_rows
    weight_row = weight_ptr + token[:, None].to(tl.int64) * hidden_size
    hidden_row = hidden_ptr + row[:, None].to(tl.int64) * hidden_stride

    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for first in tl.range(0, hidden_size, PART, num_stages=STAGES):
        in_row = first + column < hidden_size
        weight = tl.load(weight_row + first + column[None, :], mask=in_vocab[:, None] & in_row[None, :], other=0.0)
        hidden = tl.load(hidden_row + first + column[None, :], mask=is_row[:, None] & in_row[None, :], other=0.0)
        hidden = hidden.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(hidden), axis=1), FP8_LEAST) / FP8_MAX
        rounded = (hidden / scale[:, None]).to(tl.float8e4nv)
        total += tl.dot(weight, tl.trans(rounded)) * scale[None, :]
    total *= tl.load(scale_ptr + token, mask=in_vocab, other=0.0)[:, None]
    logits = logits_ptr + row[None, :].to(tl.int64) * logits_stride + token[:, None]
    tl.store(logits, total.to(tl.bfloat16), mask=is_row[None, :] & in_vocab[:, None])


def fp8_logits(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, scale_V: torch.Tensor, *, logits_NV: torch.Tensor
) -> None:
    """Contract: `reference.fp8_logits`. Capture-safe, allocates nothing."""
    num_rows, vocab = contracts.fp8_logits(hidden_NH, weight_VH, scale_V, logits_NV=logits_NV)
    _fp8_logits_kernel[(triton.cdiv(vocab, _TOKENS),)](
        hidden_NH,
        weight_VH,
        scale_V,
        logits_NV,
        num_rows,
        vocab,
        hidden_NH.shape[1],
        hidden_NH.stride(0),
        logits_NV.stride(0),
        FP8_MAX=contracts.FP8_MAX,
        FP8_LEAST=contracts.FP8_LEAST,
        ROWS=contracts.FP8_MAX_ROWS,
        TOKENS=_TOKENS,
        PART=contracts.FP8_PART,
        STAGES=_STAGES,
        num_warps=_WARPS,
    )
