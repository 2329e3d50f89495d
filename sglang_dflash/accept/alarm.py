"""A warning where the drafter does not pay: nearly no draft accepted, over many blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

NUM_BLOCKS = 4096  # judged together
# Accepted drafts a block. A drafter that fits its target accepts one or more; one of random weights about none.
TOO_FEW = 0.05


class AcceptanceAlarm:
    """Warns once, of the first `num_blocks` blocks in a row whose drafts were nearly all rejected."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self._num_blocks = num_blocks
        self._blocks = self._accepted = 0
        self._warned = False

    def observe(self, accepted: Sequence[int]) -> None:
        """Accepted drafts of each block of a round."""
        self._blocks += len(accepted)
        self._accepted += sum(accepted)
        if self._blocks < self._num_blocks:
            return
        if self._accepted < TOO_FEW * self._blocks and not self._warned:
            self._warned = True
            logger.warning(
                "Of the last %d blocks the target accepted %.3f drafts a block: DFlash costs time here and saves none. "
                "Likely the drafter was trained for other weights than the target's (another model, a fine-tune), its "
                "config.json names other target_layer_ids or another mask_token_id than it was trained with, or a "
                "converted checkpoint has its tensors in another layout. `sglang-dflash train evaluate` tells "
                "acceptance by kind of prompt.",
                self._blocks,
                self._accepted / self._blocks,
            )
        self._blocks = self._accepted = 0
