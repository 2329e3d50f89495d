"""Acceptance of drafts that were drawn: speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1).

A draft x drawn from q is kept with probability min(1, p(x) / q(x)), p the target's distribution there. At the first
draft that is not kept the token is drawn from the residual, max(0, p - q) normalised; after a whole block kept, from p.
Either way a committed token is distributed as p. A greedy request has p all on one token: its draft is kept where it
is that token, whatever q is.
"""

from __future__ import annotations

import torch

from sglang_dflash.accept.match import MatchAcceptor
from sglang_dflash.draws import draw
from sglang_dflash.records import Accepted, Draft, Round, Verified


class RejectionAcceptor:
    """Commits tokens distributed as plain decoding's; drafts that were not drawn are accepted by match."""

    def __init__(self, match: MatchAcceptor) -> None:
        self._match = match

    def accept(self, round_: Round, draft: Draft, verified: Verified) -> Accepted:
        if draft.q is None:
            return self._match.accept(round_, draft, verified)
        assert verified.p_BWV is not None, "the target's distribution goes with drafts that were drawn"
        p_BWV, width = verified.p_BWV, verified.width
        drafts = draft.tokens_BK[:, 1:width]
        kept = _keep(p_BWV[:, :-1], draft.q[:, : width - 1], drafts)
        num_kept_B1 = kept.cumprod(dim=1).sum(dim=1, keepdim=True)
        accepted = self._match.unfilled(round_.num_requests, width)
        residual_BV = _residual(p_BWV, draft.q, num_kept_B1)
        accepted.bonus_B.copy_(draw(residual_BV))
        accepted.commit_B.copy_(num_kept_B1[:, 0] + 1)
        torch.add(round_.seq_lens_B, num_kept_B1[:, 0] + 1, out=accepted.new_lens_B)
        slots_W = torch.arange(width, device=drafts.device)
        accepted.tokens_BW.zero_()
        accepted.tokens_BW[:, :-1].copy_(drafts.where(slots_W[:-1] < num_kept_B1, 0))
        accepted.tokens_BW.scatter_(1, num_kept_B1, accepted.bonus_B[:, None])
        return accepted


def _keep(p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """int64 (B, W-1), 1 where a draft is kept: with probability min(1, p(x) / q(x)), and never where p(x) is 0."""
    p_drafts, q_drafts = (probs.gather(2, drafts[..., None])[..., 0] for probs in (p, q))
    return (torch.rand_like(q_drafts) * q_drafts < p_drafts).long()


def _residual(p_BWV: torch.Tensor, q: torch.Tensor, num_kept_B1: torch.Tensor) -> torch.Tensor:
    """What the token after the kept drafts is drawn from, (B, V), not normalised."""
    rows_B = torch.arange(p_BWV.shape[0], device=p_BWV.device)
    num_kept_B = num_kept_B1[:, 0]
    p_BV = p_BWV[rows_B, num_kept_B]
    # After a whole block no draft was refused.
    q_BV = q[rows_B, num_kept_B.clamp(max=q.shape[1] - 1)].where(num_kept_B1 < p_BWV.shape[1] - 1, 0.0)
    residual_BV = (p_BV - q_BV).clamp(min=0)
    # Only rounding refuses a draft where p and q are the same everywhere.
    return residual_BV.where(residual_BV.sum(dim=1, keepdim=True) > 0, p_BV)
