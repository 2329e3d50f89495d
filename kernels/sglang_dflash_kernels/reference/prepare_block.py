"""Reference of `prepare_block`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts


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
    """Fill the block to draft: the anchor and K-1 mask tokens, their positions and their cache slots.

        ids[b, 0] = anchor[b], ids[b, 1:] = mask_token_id
        positions[b, k] = seq_lens[b] + k
        slots[b, k] = req_to_token[rows[b], positions[b, k]], and 0 for a position past the table's last column

    Row 0 is nobody's: a padded request has it, and slots 0 whatever stands in the table.

    Args:
        anchor_B, seq_lens_B, rows_B: int32 or int64, shape [B], each contiguous; rows index req_to_token.
        req_to_token: int32 or int64, shape [rows, max_context].
        ids_BK, positions_BK, slots_BK: int64 outputs, shape [B, K], 1 <= K <= 64, any row stride.
    """
    size, width = contracts.prepare_block(
        anchor_B, seq_lens_B, rows_B, req_to_token, ids_BK=ids_BK, positions_BK=positions_BK, slots_BK=slots_BK
    )
    if size == 0:
        return
    ids_BK.fill_(mask_token_id)
    ids_BK[:, 0] = anchor_B
    positions = seq_lens_B.long()[:, None] + torch.arange(width, device=seq_lens_B.device)
    positions_BK.copy_(positions)
    last_column = req_to_token.shape[1] - 1
    slots = req_to_token[rows_B.long()[:, None], positions.clamp(max=last_column)]
    slots_BK.copy_(slots.masked_fill((positions > last_column) | (rows_B == 0)[:, None], 0))
