"""The loss of a block drafter: cross entropy of every slot, weighted by what the slot is worth.

A draft counts only if all drafts before it in the block are right, so early slots are worth more. Shape letters: see
`blocks`; J = K - 1 slots that predict.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# Rows whose logits stand in memory at once: 8192 x 49152 float32 logits are 1.6 GB.
CHUNK_ROWS = 8192


@dataclass(frozen=True)
class SlotScores:
    """What the drafter says of every slot.

    Attributes:
        nll_NJ: float32, negative log-likelihood of the label, with gradient.
        right_NJ: bool, the most probable token is the label.
    """

    nll_NJ: torch.Tensor
    right_NJ: torch.Tensor


def score(hidden_NJH: torch.Tensor, head_VH: torch.Tensor, labels_NJ: torch.Tensor) -> SlotScores:
    """Score N blocks; logits are made a chunk of rows at a time, again in the backward pass.

    Args:
        hidden_NJH: the drafter's hidden states of slots 1 .. K-1.
        head_VH: the target's head, frozen.
        labels_NJ: int64.
    """
    rows, labels = hidden_NJH.flatten(0, 1), labels_NJ.flatten()
    parts = [
        checkpoint(_score_rows, part, head_VH, label, use_reentrant=False)
        for part, label in zip(rows.split(CHUNK_ROWS), labels.split(CHUNK_ROWS), strict=True)
    ]
    nll, right = (torch.cat(pieces).view(labels_NJ.shape) for pieces in zip(*parts, strict=True))
    return SlotScores(nll, right)


def _score_rows(hidden: torch.Tensor, head_VH: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden.to(head_VH.dtype) @ head_VH.T).float()
    return F.cross_entropy(logits, labels, reduction="none"), logits.detach().argmax(-1) == labels


def decay_weights(valid_NJ: torch.Tensor, gamma: float) -> torch.Tensor:
    """exp(-(k - 1) / gamma) for slot k (arXiv 2602.06036, eq. 4), zero where there is no label; float32 (N, J)."""
    slots = torch.arange(valid_NJ.shape[1], device=valid_NJ.device)
    return torch.exp(-slots / gamma) * valid_NJ


def dpace_weights(nll_NJ: torch.Tensor, valid_NJ: torch.Tensor, smoothing: float) -> torch.Tensor:
    """D-PACE (arXiv 2605.18810): a slot weighs what the expected acceptance owes to it; float32 (N, J), detached.

    With q the probability of the label and q~ = (1 - a) q + a, the weight of slot j is the sum over m >= j of the
    product of q~ up to m: the expected number of accepted drafts that need slot j right.
    """
    smoothed = (1 - smoothing) * torch.exp(-nll_NJ.detach()) + smoothing
    reached = torch.cumprod(smoothed * valid_NJ, dim=1)
    return reached.flip(1).cumsum(1).flip(1) * valid_NJ


def weighted(nll_NJ: torch.Tensor, weights_NJ: torch.Tensor) -> torch.Tensor:
    """The mean of the slots' losses, weighted; a scalar. Zero, with gradient, where no slot has a weight."""
    return (nll_NJ * weights_NJ).sum() / weights_NJ.sum().clamp(min=1e-6)


def acceptance_length(right_NJ: torch.Tensor, valid_NJ: torch.Tensor) -> float:
    """Mean leading run of right slots plus one (the bonus token), over the blocks that have a label at all."""
    runs_N = torch.cumprod((right_NJ & valid_NJ).long(), dim=1).sum(1)
    counted_N = valid_NJ.any(1)
    return float((runs_N[counted_N] + 1).float().mean()) if bool(counted_N.any()) else 0.0
