"""Every static buffer of a round, sized once. Shape letters: see `records`."""

from __future__ import annotations

import torch


class Buffers:
    """Outputs of a round's kernels.

    Sized for the most requests a round can hold, padded rows of a captured graph included, so that addresses never
    change and captured graphs may hold them.
    """

    def __init__(self, max_requests: int, block_size: int, device: torch.device) -> None:
        def block(dtype: torch.dtype, columns: int = block_size) -> torch.Tensor:
            return torch.zeros((max_requests, columns), dtype=dtype, device=device)

        self.max_requests = max_requests
        self.block_size = block_size
        self.ids_BK = block(torch.int64)
        self.positions_BK = block(torch.int64)
        self.slots_BK = block(torch.int64)
        self.drafted_BK = block(torch.int64)
        self.confidence = block(torch.float32, block_size - 1)
        self._accepted = [_AcceptedBuffers(max_requests, block_size, device) for _ in range(2)]

    def next_accepted(self) -> _AcceptedBuffers:
        """Buffers of this round's accepted tokens.

        They alternate: with overlapped scheduling the host still copies the last round's tokens while this round runs.
        """
        self._accepted.reverse()
        return self._accepted[0]


class _AcceptedBuffers:
    def __init__(self, max_requests: int, block_size: int, device: torch.device) -> None:
        self.commit_B = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.bonus_B = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self.tokens_BK = torch.zeros((max_requests, block_size), dtype=torch.int64, device=device)
        self.new_lens_B = torch.zeros(max_requests, dtype=torch.int64, device=device)
