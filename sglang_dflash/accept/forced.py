"""Forced acceptance lengths, for benchmarks with random weights: the output is meaningless."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_dflash.records import Accepted, Draft, Round, Verified

# The token written where no real one is asked for; SGLang's built-in worker writes the same.
FIXED_TOKEN_ID = 100


class ForcedAcceptor:
    """Accepts for real, at real cost, then overwrites the outcome with a length from `next_length(width)`."""

    def __init__(self, acceptor: object, next_length: Callable[[int], int], keep_drafts: bool) -> None:
        self._acceptor = acceptor
        self._next_length = next_length
        self._keep_drafts = keep_drafts

    def accept(self, round_: Round, draft: Draft, verified: Verified) -> Accepted:
        accepted = self._acceptor.accept(round_, draft, verified)  # type: ignore[attr-defined]
        length = self._next_length(verified.width)
        accepted.commit_B.fill_(length)
        torch.add(round_.seq_lens_B, length, out=accepted.new_lens_B)
        if not self._keep_drafts:
            accepted.bonus_B.fill_(FIXED_TOKEN_ID)
            accepted.tokens_BW.fill_(FIXED_TOKEN_ID)
            return accepted
        if verified.choices_BW is not None:
            accepted.bonus_B.copy_(verified.choices_BW[:, length - 1])
        accepted.tokens_BW.zero_()
        accepted.tokens_BW[:, : length - 1].copy_(draft.tokens_BK[:, 1:length])
        accepted.tokens_BW[:, length - 1].copy_(accepted.bonus_B)
        return accepted
