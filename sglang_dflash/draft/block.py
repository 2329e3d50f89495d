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

    @property
    def max_requests(self) -> int:
        """Blocks there is room for."""
        return self._buffers.max_requests

    def fill(
        self, anchor_B: torch.Tensor, seq_lens_B: torch.Tensor, rows_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lay out B blocks; returns `blocks(B)`. Capture-safe."""
        ids_BK, positions_BK, slots_BK = self.blocks(anchor_B.shape[0])
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

    def blocks(self, num_requests: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and slots of the blocks laid out last, each int64 (B, K), views of static buffers."""
        buffers = self._buffers
        return buffers.ids_BK[:num_requests], buffers.positions_BK[:num_requests], buffers.slots_BK[:num_requests]
