"""The records of one decode round, in the order they are filled.

Shape letters, used as name suffixes everywhere:

    B  requests of the batch          K  tokens of a block: the anchor and K-1 drafts
    W  verified width, W <= K         N  flat tokens, N = B * K or B * W
    V  vocabulary                     H  hidden size
    D  concatenated target features   L  draft layers

The anchor is the last committed token (the bonus token of the round before): it is in the output already, but its
key and value are not in any cache yet. A request's `seq_len` counts the tokens whose keys and values are cached, so the
anchor stands at position `seq_len`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Round:
    """What the scheduler hands over. Filled by `host.rounds.read`."""

    seq_lens_B: torch.Tensor  # int64: tokens with cached keys and values
    rows_B: torch.Tensor  # int64: the requests' rows of the request-to-token table
    anchor_B: torch.Tensor  # int64: last committed token
    # An upper bound of seq_lens_B + K on the host, for attention backends that plan on the CPU; the exact lengths lag.
    seq_lens_bound_cpu_B: torch.Tensor
    seq_lens_bound_sum: int  # its sum
    rids: tuple[str, ...]  # request ids
    # float32, 0 where a request is greedy; None where all are, where draws have seeds, or where no draft is drawn.
    temperature_B: torch.Tensor | None = None

    @property
    def num_requests(self) -> int:
        return self.seq_lens_B.shape[0]


@dataclass(frozen=True)
class Block:
    """The block to draft and the cache slots it may write. Filled by `host.draft_model.DraftModel.forward`."""

    ids_BK: torch.Tensor  # int64: anchor, then mask tokens
    positions_BK: torch.Tensor  # int64: seq_len, seq_len + 1, ...
    slots_BK: torch.Tensor  # int64: cache slots of these positions, shared by target and drafter
    plan: Any  # SGLang's plan of these slots, read by `host` alone


@dataclass(frozen=True)
class Draft:
    """What the drafter proposes. Filled by a proposer."""

    tokens_BK: torch.Tensor  # int64: anchor, then the K-1 drafted tokens
    # float32, shape (B, K-1): the drafter's own probability of each drafted token, None where it gives none.
    confidence: torch.Tensor | None = None
    # float32, shape (B, K-1, V): the distribution that a draft was drawn from, where its request samples. None where no
    # draft was drawn.
    q: torch.Tensor | None = None


@dataclass(frozen=True)
class Verified:
    """What the target says of the block. Filled by `host.target_model.TargetModel.verify`."""

    # int64: the target's own token after token j of request i's block, as plain decoding would choose it there. None
    # where drafts were drawn:
    choices_BW: torch.Tensor | None
    # float32: then the distribution of that token, as plain decoding would draw it there.
    p_BWV: torch.Tensor | None
    width: int  # W
    host_result: Any  # SGLang's own result of the forward, read by `host` alone


@dataclass(frozen=True)
class Accepted:
    """What is committed: between 1 and W tokens a request. Filled by `accept`."""

    commit_B: torch.Tensor  # int32: committed tokens, the bonus token included
    bonus_B: torch.Tensor  # int64: the target's own token after the accepted drafts; the next round's anchor
    tokens_BW: torch.Tensor  # int64: accepted drafts, then the bonus token, then zeros
    new_lens_B: torch.Tensor  # int64: seq_lens_B + commit_B
