"""A proposer that writes down what the drafter computed: hidden states and drafts of every block.

It appends to the file named by $DFLASH_TEST_RECORD one pickled record a request and round.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.buffers import Buffers
from sglang_dflash.draft.head import Head
from sglang_dflash.draft.proposer import ArgmaxProposer
from sglang_dflash.records import Block, Draft, Round

RECORD_VARIABLE = "DFLASH_TEST_RECORD"


class RecordingProposer(ArgmaxProposer):
    """Drafts as ever."""

    def __init__(self, ops: Any, buffers: Buffers, head: Head) -> None:
        super().__init__(ops, buffers, head)
        self._file = Path(os.environ[RECORD_VARIABLE])
        num_tokens, weight_VH = buffers.max_requests * buffers.block_size, head.weight_VH
        self._hidden_NH = torch.zeros((num_tokens, weight_VH.shape[1]), dtype=weight_VH.dtype, device=weight_VH.device)

    def score(self, hidden_NH: torch.Tensor, ids_N: torch.Tensor) -> None:
        self._hidden_NH[: len(hidden_NH)] = hidden_NH
        super().score(hidden_NH, ids_N)

    def propose(self, round_: Round, block: Block) -> Draft:
        draft = super().propose(round_, block)
        hidden_BKH = self._hidden_NH[: block.ids_BK.numel()].view(*block.ids_BK.shape, -1).float()
        with self._file.open("ab") as file:
            for i, rid in enumerate(round_.rids):
                record = (rid, int(round_.seq_lens_B[i]), hidden_BKH[i].cpu().numpy(), draft.tokens_BK[i].tolist())
                pickle.dump(record, file)
        return draft


def read(path: Path) -> dict[tuple[str, int], tuple[Any, list[int]]]:
    """(request id, cached tokens) to (hidden (K, H), anchor and drafts)."""
    records = {}
    with path.open("rb") as file:
        while file.peek(1):
            rid, seq_len, hidden_KH, tokens = pickle.load(file)
            records[rid, seq_len] = (hidden_KH, tokens)
    return records
