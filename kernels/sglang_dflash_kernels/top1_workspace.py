"""The scratch memory of `top1`: what each split of a row found."""

from __future__ import annotations

from typing import NamedTuple

import torch

# One program reduces this many logits at once, out of registers: 32 a thread in a program of 128 threads.
SPLIT_LOGITS = 4096

# Splits of a row that a workspace has room for, and with it the largest vocabulary: 524,288 tokens.
MAX_SPLITS = 128
MAX_VOCAB = MAX_SPLITS * SPLIT_LOGITS


class Top1Workspace(NamedTuple):
    """Partial results of N rows by S splits, meaningless between calls: all calls of one stream may share it."""

    maximum_NS: torch.Tensor  # float32
    index_NS: torch.Tensor  # int32: first position of the maximum, in the whole row
    total_NS: torch.Tensor  # float32: sum of exp(logit - maximum) over the split


def top1_workspace(max_N: int, device: torch.device) -> Top1Workspace:
    """A workspace for `top1` on up to `max_N` rows, 1536 bytes a row. The reference op ignores it."""
    shape = (max_N, MAX_SPLITS)
    return Top1Workspace(
        maximum_NS=torch.empty(shape, dtype=torch.float32, device=device),
        index_NS=torch.empty(shape, dtype=torch.int32, device=device),
        total_NS=torch.empty(shape, dtype=torch.float32, device=device),
    )
