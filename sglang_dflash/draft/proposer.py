"""From the drafter's hidden states to draft tokens.

A proposer has two halves. `score` runs right after the drafter's layers, inside the drafter's CUDA graph where there is
one, and leaves its results in static buffers. `propose` runs on the host afterwards and hands them out.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from sglang_dflash.buffers import Buffers
from sglang_dflash.records import Block, Draft, Round


class Proposer(Protocol):
    """A drafter variant: made once by `make`, called every round."""

    def __init__(self, ops: Any, buffers: Buffers, head_VH: torch.Tensor) -> None:
        """`head_VH`: the target's language-model head, shared by the drafter."""

    def score(self, hidden_NH: torch.Tensor, ids_N: torch.Tensor) -> None:
        """Score every slot of N / K blocks. Capture-safe: static buffers only, no synchronisation."""

    def propose(self, round_: Round, block: Block) -> Draft:
        """The drafts of this round's blocks, from what `score` left."""


class ArgmaxProposer:
    """The most probable token of every slot, with its probability. One pass: the slots do not see each other's tokens.

    Slot k of a block (k = 1 .. K-1) predicts the token at its own position; slot 0 holds the anchor, and what the
    drafter says there is not used (arXiv 2602.06036, section 3).
    """

    def __init__(self, ops: Any, buffers: Buffers, head_VH: torch.Tensor) -> None:
        from sglang_dflash_kernels import top1_workspace

        self._top1 = ops.top1
        self._buffers = buffers
        self._head_VH = head_VH
        self._workspace = top1_workspace(buffers.max_requests * (buffers.block_size - 1), head_VH.device)

    def score(self, hidden_NH: torch.Tensor, ids_N: torch.Tensor) -> None:
        block_size = self._buffers.block_size
        num_requests = hidden_NH.shape[0] // block_size
        hidden_NH = hidden_NH.view(num_requests, block_size, -1)[:, 1:].flatten(0, 1).to(self._head_VH.dtype)
        logits_NV = torch.matmul(hidden_NH, self._head_VH.T)
        drafted_BK = self._buffers.drafted_BK[:num_requests]
        drafted_BK[:, 0].copy_(ids_N.view(num_requests, block_size)[:, 0])
        self._top1(
            logits_NV,
            tokens_N=drafted_BK[:, 1:],
            confidence_N=self._buffers.confidence[:num_requests],
            workspace=self._workspace,
        )

    def propose(self, round_: Round, block: Block) -> Draft:
        num_requests = round_.num_requests
        return Draft(self._buffers.drafted_BK[:num_requests], self._buffers.confidence[:num_requests])


def make(name: str, ops: Any, buffers: Buffers, head_VH: torch.Tensor) -> Proposer:
    """The proposer of a config: `argmax` or `package.module:Class`.

    Raises:
        ValueError: no such class.
    """
    if name == "argmax":
        return ArgmaxProposer(ops, buffers, head_VH)
    module, _, attribute = name.partition(":")
    try:
        proposer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"proposer: expected argmax or package.module:Class, got {name!r} ({error}).") from error
    if not isinstance(proposer, type):
        raise ValueError(
            f"proposer: expected argmax or package.module:Class, got {name!r} (a {type(proposer).__name__})."
        )
    return proposer(ops, buffers, head_VH)
