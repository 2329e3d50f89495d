"""Acceptance by match: the longest run of drafts equal to the target's own choices, then the target's next choice.

Exact for greedy and for sampled decoding: every committed token is the target's choice after tokens that are all
committed themselves. A draft only decides how many choices one pass of the target is good for.
"""

from __future__ import annotations

from typing import Any

from sglang_dflash.buffers import Buffers
from sglang_dflash.records import Accepted, Draft, Round, Verified


class MatchAcceptor:
    """Commits exactly the tokens that plain decoding would have chosen one by one."""

    def __init__(self, ops: Any, buffers: Buffers) -> None:
        self._accept_greedy = ops.accept_greedy
        self._buffers = buffers

    def accept(self, round_: Round, draft: Draft, verified: Verified) -> Accepted:
        accepted = self.unfilled(round_.num_requests, verified.width)
        self._accept_greedy(
            draft.tokens_BK,
            verified.choices_BW,
            round_.seq_lens_B,
            None,
            commit_B=accepted.commit_B,
            bonus_B=accepted.bonus_B,
            tokens_BW=accepted.tokens_BW,
            new_lens_B=accepted.new_lens_B,
        )
        return accepted

    def unfilled(self, num_requests: int, width: int) -> Accepted:
        """This round's record, not filled yet."""
        buffers = self._buffers.next_accepted()
        return Accepted(
            commit_B=buffers.commit_B[:num_requests],
            bonus_B=buffers.bonus_B[:num_requests],
            tokens_BW=buffers.tokens_BK[:num_requests, :width],
            new_lens_B=buffers.new_lens_B[:num_requests],
        )
