"""Triton `prepare_block`: one program a request, one lane a token of its block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash_kernels import contracts


# No integer argument is specialized: one compilation serves every width, stride and mask token.
@triton.jit(
    do_not_specialize=[
        "mask_token_id",
        "max_context",
        "width",
        "table_stride",
        "ids_stride",
        "positions_stride",
        "slots_stride",
    ]
)
def _prepare_block_kernel(
    anchor_ptr,
    seq_lens_ptr,
    rows_ptr,
    req_to_token_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    mask_token_id,
    max_context,
    width,
    table_stride,
    ids_stride,
    positions_stride,
    slots_stride,
    LANES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    in_block = lane < width

    anchor = tl.load(anchor_ptr + request).to(tl.int64)
    tl.store(ids_ptr + request * ids_stride + lane, tl.where(lane == 0, anchor, mask_token_id), mask=in_block)

    position = tl.load(seq_lens_ptr + request).to(tl.int64) + lane
    tl.store(positions_ptr + request * positions_stride + lane, position, mask=in_block)

    row = tl.load(rows_ptr + request).to(tl.int64)
    in_table = in_block & (position < max_context) & (row > 0)
    slot = tl.load(req_to_token_ptr + row * table_stride + position, mask=in_table, other=0).to(tl.int64)
    tl.store(slots_ptr + request * slots_stride + lane, slot, mask=in_block)


def prepare_block(
    anchor_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    rows_B: torch.Tensor,
    req_to_token: torch.Tensor,
    mask_token_id: int,
    *,
    ids_BK: torch.Tensor,
    positions_BK: torch.Tensor,
    slots_BK: torch.Tensor,
) -> None:
    """Contract: `reference.prepare_block`. Capture-safe, allocates nothing."""
    size, width = contracts.prepare_block(
        anchor_B, seq_lens_B, rows_B, req_to_token, ids_BK=ids_BK, positions_BK=positions_BK, slots_BK=slots_BK
    )
    if size == 0:
        return
    _prepare_block_kernel[(size,)](
        anchor_B,
        seq_lens_B,
        rows_B,
        req_to_token,
        ids_BK,
        positions_BK,
        slots_BK,
        mask_token_id,
        req_to_token.shape[1],
        width,
        req_to_token.stride(0),
        ids_BK.stride(0),
        positions_BK.stride(0),
        slots_BK.stride(0),
        LANES=contracts.MAX_WIDTH,
        num_warps=1,
    )
