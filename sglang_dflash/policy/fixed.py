"""Every round verifies the same width."""

from __future__ import annotations


class FixedWidth:
    """Verify `width` tokens of every block, the anchor included."""

    def __init__(self, width: int) -> None:
        self.width = width

    def choose(self, num_requests: int) -> int:
        """Width of this round, for a batch of `num_requests`."""
        return self.width
