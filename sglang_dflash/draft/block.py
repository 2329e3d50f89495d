"""Lay out a round's blocks: token ids, positions and cache slots."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.buffers import Buffers


class BlockLayout:
    """Fills the block buffers: anchor and masks, positions after the cached prefix, and these positions' slots."""

    def __init__(self, ops: Any, buffers: Buffers, req_to_token: torch.Tensor, mask_token_id: int) -> None:
        self._prepare_block = ops.prepare_block
        self._buffers = buffers
        self._req_to_token = req_to_token
        self._mask_token_id = mask_token_id

    def fill(
        self, anchor_B: torch.Tensor, seq_lens_B: torch.Tensor, rows_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and slots, each int64 of shape (B, K), views of static buffers."""
        num_requests = anchor_B.shape[0]
        ids_BK = self._buffers.ids_BK[:num_requests]
        positions_BK = self._buffers.positions_BK[:num_requests]
        slots_BK = self._buffers.slots_BK[:num_requests]
        self._prepare_block(
            anchor_B,
            seq_lens_B,
            rows_B,
            self._req_to_token,
            self._mask_token_id,
            ids_BK=ids_BK,
            positions_BK=positions_BK,
            slots_BK=slots_BK,
        )
        return ids_BK, positions_BK, slots_BK
