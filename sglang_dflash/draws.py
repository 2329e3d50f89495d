"""Draws from distributions without a word to the host."""

from __future__ import annotations

import torch


def draw(weights: torch.Tensor) -> torch.Tensor:
    """One index of the last dimension a row, drawn in proportion to its weight.

    By the largest weight over an exponential of its own, as `torch.multinomial` does, whose check of what it is given
    waits for the device.

    Args:
        weights: (..., V), of a float dtype, none negative and not all zero in a row; they need not add up to 1.

    Returns:
        int64 (...).
    """
    exponentials = torch.empty_like(weights).exponential_().clamp_min_(torch.finfo(weights.dtype).tiny)
    return (weights / exponentials).argmax(dim=-1)
