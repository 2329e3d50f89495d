"""From the drafter's hidden states to draft tokens.

A proposer has two halves. `score` runs right after the drafter's layers, inside the drafter's CUDA graph where there is
one, and leaves its results in static buffers. `propose` runs on the host afterwards and hands them out.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Protocol

import torch

from sglang_dflash.buffers import Buffers
from sglang_dflash.draft.head import Head
from sglang_dflash.draws import draw
from sglang_dflash.records import Block, Draft, Round


class Proposer(Protocol):
    """A drafter variant: made once by `make`, called every round."""

    draws: bool  # it reads the round's temperatures

    def __init__(self, ops: Any, buffers: Buffers, head: Head) -> None:
        """`head`: the target's language-model head, shared by the drafter.

        Logit i of `head` is of token i, or of token `head.tokens_S[i]` where that is not None: with
        --speculative-token-map a proposer must hand out ids of tokens, and a `q` over the whole vocabulary, of
        `head.weight_VH.shape[0]` tokens.
        """

    def score(self, hidden_NH: torch.Tensor, ids_N: torch.Tensor) -> None:
        """Score every slot of N / K blocks. Capture-safe: static buffers only, no synchronisation."""

    def propose(self, round_: Round, block: Block) -> Draft:
        """The drafts of this round's blocks, from what `score` left."""


class ArgmaxProposer:
    """The most probable token of every slot, with its probability. One pass: the slots do not see each other's tokens.

    With a token map both are of the mapped tokens alone: the confidence is the probability among them.

    Slot k of a block (k = 1 .. K-1) predicts the token at its own position; slot 0 holds the anchor, and what the
    drafter says there is not used (arXiv 2602.06036, section 3).
    """

    draws = False

    def __init__(self, ops: Any, buffers: Buffers, head: Head) -> None:
        from sglang_dflash_kernels import top1_workspace

        self._top1 = ops.top1
        self._buffers = buffers
        self._head = head
        # Which of the map's tokens a slot drafts; without a map that is its id, written where it belongs at once.
        self._index = None if head.tokens_S is None else torch.zeros_like(buffers.confidence, dtype=torch.int64)
        self._workspace = top1_workspace(buffers.max_requests * (buffers.block_size - 1), head.weight_VH.device)

    def score(self, hidden_NH: torch.Tensor, ids_N: torch.Tensor) -> None:
        block_size = self._buffers.block_size
        num_requests = hidden_NH.shape[0] // block_size
        hidden_NH = hidden_NH.view(num_requests, block_size, -1)[:, 1:].flatten(0, 1)
        logits_NS = self._logits(hidden_NH)
        drafted_BK = self._buffers.drafted_BK[:num_requests]
        drafted_BK[:, 0].copy_(ids_N.view(num_requests, block_size)[:, 0])
        index = drafted_BK[:, 1:] if self._index is None else self._index[:num_requests]
        self._top1(
            logits_NS,
            tokens_N=index,
            confidence_N=self._buffers.confidence[:num_requests],
            workspace=self._workspace,
        )
        if self._head.tokens_S is not None:
            torch.take(self._head.tokens_S, index, out=drafted_BK[:, 1:])

    def _logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return self._head(hidden_NH)

    def propose(self, round_: Round, block: Block) -> Draft:
        num_requests = round_.num_requests
        return Draft(self._buffers.drafted_BK[:num_requests], self._buffers.confidence[:num_requests])


class SampledProposer(ArgmaxProposer):
    """Drafts of sampling requests drawn from the drafter's own distribution at the request's temperature.

    Each slot is drawn on its own. Greedy requests, and all where draws have seeds, get the most probable tokens.
    """

    draws = True

    def __init__(self, ops: Any, buffers: Buffers, head: Head) -> None:
        super().__init__(ops, buffers, head)
        num_rows = buffers.max_requests * (buffers.block_size - 1)
        num_tokens = head.weight_VH.shape[0] if head.tokens_S is None else head.tokens_S.shape[0]
        self._logits_NS = head.weight_VH.new_empty((num_rows, num_tokens))

    def _logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return self._head(hidden_NH, out=self._logits_NS[: hidden_NH.shape[0]])

    def propose(self, round_: Round, block: Block) -> Draft:
        draft, temperature_B = super().propose(round_, block), round_.temperature_B
        if temperature_B is None:
            return draft
        assert draft.confidence is not None
        num_rows = draft.confidence.numel()
        sampling_B1 = temperature_B[:, None] > 0
        scale_B11 = torch.where(sampling_B1, temperature_B[:, None], 1.0)[..., None]
        q = torch.softmax(self._logits_NS[:num_rows].view(*draft.confidence.shape, -1) / scale_B11, dim=-1)
        # A broken drafter says what is no distribution. The first token then, surely: it is verified as any other.
        broken = q[..., :1].isnan()
        q.masked_fill_(broken, 0.0)[..., :1].masked_fill_(broken, 1.0)
        drawn = draw(q)
        if (tokens_S := self._head.tokens_S) is not None:
            drawn = tokens_S[drawn]
            # Over the whole vocabulary, as the target's distribution: a token that cannot be drafted has 0.
            q = q.new_zeros((*q.shape[:-1], self._head.weight_VH.shape[0])).index_copy_(-1, tokens_S, q)
        draft.tokens_BK[:, 1:].copy_(torch.where(sampling_B1, drawn, draft.tokens_BK[:, 1:]))
        return dataclasses.replace(draft, q=q)


_PROPOSERS: dict[str, type[ArgmaxProposer]] = {"argmax": ArgmaxProposer, "sampled": SampledProposer}


def make(name: str, ops: Any, buffers: Buffers, head: Head) -> Proposer:
    """The proposer of a config: `argmax`, `sampled` or `package.module:Class`.

    Raises:
        ValueError: no such class, or one that lacks a part of a Proposer.
    """
    if name in _PROPOSERS:
        return _PROPOSERS[name](ops, buffers, head)
    expected = f"{', '.join(_PROPOSERS)} or package.module:Class"
    module, _, attribute = name.partition(":")
    try:
        proposer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"proposer: expected {expected}, got {name!r} ({error}).") from error
    if not isinstance(proposer, type):
        raise ValueError(f"proposer: expected {expected}, got {name!r} (a {type(proposer).__name__}).")
    made: Proposer = proposer(ops, buffers, head)
    if missing := [part for part in ("draws", "score", "propose") if not hasattr(made, part)]:
        raise ValueError(f"proposer: expected {', '.join(missing)} as a Proposer has them, got none in {name!r}.")
    return made
