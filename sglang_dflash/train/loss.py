"""The loss of a block drafter: cross entropy of every slot, weighted by what the slot is worth.

A draft counts only if all drafts before it in the block are right, so early slots are worth more. Shape letters: see
`blocks`; J = K - 1 slots that predict, R rows (blocks times slots), V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Rows whose gradient of the logits stands in memory at once: 8192 x 49152 bfloat16 values are 0.8 GB.
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
    """Score N blocks.

    Args:
        hidden_NJH: the drafter's hidden states of slots 1 .. K-1.
        head_VH: the target's head, frozen; the logits have its dtype.
        labels_NJ: int64.
    """
    nll_R, right_R = _HeadScores.apply(hidden_NJH.flatten(0, 1), head_VH, labels_NJ.flatten())
    return SlotScores(nll_R.view(labels_NJ.shape), right_R.view(labels_NJ.shape))


class _HeadScores(torch.autograd.Function):
    """Head and cross entropy in one. The logits are kept as they left the head, never in float32 as a whole."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RH: torch.Tensor, head_VH: torch.Tensor, labels_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_RV = hidden_RH.to(head_VH.dtype) @ head_VH.T
        parts = zip(logits_RV.split(CHUNK_ROWS), labels_R.split(CHUNK_ROWS))
        row_scores = _fused(_row_scores, head_VH.device)
        lse_R, nll_R, right_R = (torch.cat(rows) for rows in zip(*(row_scores(*part) for part in parts)))
        ctx.save_for_backward(logits_RV, head_VH, labels_R, lse_R)
        ctx.hidden_dtype = hidden_RH.dtype
        ctx.mark_non_differentiable(right_R)
        return nll_R, right_R

    @staticmethod
    def backward(ctx: Any, grad_nll_R: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None]:
        logits_RV, head_VH, *rows = ctx.saved_tensors
        parts = zip(logits_RV.split(CHUNK_ROWS), *(row.split(CHUNK_ROWS) for row in (*rows, grad_nll_R)))
        logits_gradient = _fused(_logits_gradient, head_VH.device)
        grads = [logits_gradient(*part) @ head_VH for part in parts]
        return torch.cat(grads).to(ctx.hidden_dtype), None, None


def _row_scores(logits_RV: torch.Tensor, labels_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log of the sum of exponentials, negative log-likelihood, and whether the label is the most probable token."""
    lse_R = logits_RV.float().logsumexp(-1)
    nll_R = lse_R - logits_RV.gather(1, labels_R[:, None])[:, 0].float()
    return lse_R, nll_R, logits_RV.argmax(-1) == labels_R


def _logits_gradient(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, lse_R: torch.Tensor, grad_nll_R: torch.Tensor
) -> torch.Tensor:
    probabilities_RV = (logits_RV.float() - lse_R[:, None]).exp()
    label_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) == labels_R[:, None]
    return ((probabilities_RV - label_RV.float()) * grad_nll_R[:, None]).to(logits_RV.dtype)


def _fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`function`, on a GPU as few kernels: as separate operations it would write the logits in float32 many times."""
    return _compiled(function) if device.type == "cuda" else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)


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
