"""Triton `accept_greedy`: one program a request, one lane a verified token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash_kernels import contracts


# No integer argument is specialized: one compilation serves every width and stride.
@triton.jit(do_not_specialize=["width", "tokens_stride", "target_stride", "output_stride"])
def _accept_greedy_kernel(
    tokens_ptr,
    target_ptr,
    seq_lens_ptr,
    widths_ptr,
    commit_ptr,
    bonus_ptr,
    output_ptr,
    new_lens_ptr,
    width,
    tokens_stride,
    target_stride,
    output_stride,
    HAS_WIDTHS: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    verified = width
    if HAS_WIDTHS:
        verified = tl.load(widths_ptr + request).to(tl.int32)
    has_draft = lane + 1 < verified

    target = tl.load(target_ptr + request * target_stride + lane, mask=lane < width, other=0)
    draft = tl.load(tokens_ptr + request * tokens_stride + lane + 1, mask=has_draft, other=0)
    # Lane verified-1 has no draft, so the first mismatch is at most there.
    accepted = tl.min(tl.where(has_draft & (draft == target), LANES, lane), axis=0)

    # An accepted draft equals the target's token, so the committed tokens are a prefix of the target's row.
    committed = (lane <= accepted) & (verified > 0)
    commit = tl.sum(committed.to(tl.int32), axis=0)
    bonus = tl.sum(tl.where(committed & (lane == accepted), target, 0), axis=0)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)

    tl.store(output_ptr + request * output_stride + lane, tl.where(committed, target, 0), mask=lane < width)
    tl.store(commit_ptr + request, commit)
    tl.store(bonus_ptr + request, bonus)
    tl.store(new_lens_ptr + request, seq_len + commit)


def accept_greedy(
    tokens_BK: torch.Tensor,
    target_BW: torch.Tensor,
    seq_lens_B: torch.Tensor,
    widths_B: torch.Tensor | None,
    *,
    commit_B: torch.Tensor,
    bonus_B: torch.Tensor,
    tokens_BW: torch.Tensor,
    new_lens_B: torch.Tensor,
) -> None:
    """Contract: `reference.accept_greedy`. Capture-safe, allocates nothing."""
    size, width = contracts.accept_greedy(
        tokens_BK,
        target_BW,
        seq_lens_B,
        widths_B,
        commit_B=commit_B,
        bonus_B=bonus_B,
        tokens_BW=tokens_BW,
        new_lens_B=new_lens_B,
    )
    if size == 0:
        return
    _accept_greedy_kernel[(size,)](
        tokens_BK,
        target_BW,
        seq_lens_B,
        widths_B,
        commit_B,
        bonus_B,
        tokens_BW,
        new_lens_B,
        width,
        tokens_BK.stride(0),
        target_BW.stride(0),
        tokens_BW.stride(0),
        HAS_WIDTHS=widths_B is not None,
        LANES=contracts.MAX_WIDTH,
        num_warps=1,
    )
