"""A proposer that knows the answers and makes chosen mistakes, so that every accepted length occurs on purpose.

The script, a JSON file named by $DFLASH_TEST_SCRIPT, maps a request id to "index", "prompt_len" and "answer" (tokens).
What follows an "@" in a request's id only tells requests with the same prompt apart.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from sglang_dflash import config
from sglang_dflash.buffers import Buffers
from sglang_dflash.draft.head import Head
from sglang_dflash.records import Block, Draft, Round

SCRIPT_VARIABLE = "DFLASH_TEST_SCRIPT"


def planted(index: int, at: int, block_size: int) -> int:
    """How many drafts are right in the block that starts `at` tokens into the answer of the request of this index.

    The first rounds of the first 12 requests are right for 0 to 11 drafts, their second rounds for 12, 13, 14, 15, 0, 1
    and so on: all lengths of a block of 16 occur, each in another request of the batch.
    """
    return (index if at == 0 else 11 + at) % block_size


def environment(path: Path, prompts: dict[str, list[int]], answers: dict[str, list[int]]) -> dict[str, str]:
    """Write the script of these prompts and answers; the environment in which an engine follows it."""
    script = {
        rid: {"index": index, "prompt_len": len(ids), "answer": answers[rid]}
        for index, (rid, ids) in enumerate(prompts.items())
    }
    path.write_text(json.dumps(script))
    proposer = {"proposer": f"{__name__}:{ScriptedProposer.__name__}"}
    return {config.CONFIG_VARIABLE: json.dumps(proposer), SCRIPT_VARIABLE: str(path)}


class ScriptedProposer:
    """Drafts the right tokens up to the planted mistake, wrong ones from there on."""

    def __init__(self, ops: Any, buffers: Buffers, head: Head) -> None:
        self._buffers = buffers
        self._vocab_size = head.weight_VH.shape[0]
        self._script = json.loads(Path(os.environ[SCRIPT_VARIABLE]).read_text())

    def score(self, hidden_NH: torch.Tensor, ids_N: torch.Tensor) -> None:
        """The drafter runs for real; what it says is not used."""

    def propose(self, round_: Round, block: Block) -> Draft:
        rows = []
        for rid, seq_len, anchor in zip(
            round_.rids, round_.seq_lens_B.tolist(), block.ids_BK[:, 0].tolist(), strict=True
        ):
            rows.append(self._row(rid, seq_len, anchor))
        drafted_BK = self._buffers.drafted_BK[: len(rows)]
        drafted_BK.copy_(torch.tensor(rows))
        return Draft(drafted_BK)

    def _row(self, rid: str, seq_len: int, anchor: int) -> list[int]:
        block_size = self._buffers.block_size
        entry = self._script.get(rid.partition("@")[0], {"prompt_len": 0, "answer": []})
        answer, at = entry["answer"], seq_len - entry["prompt_len"]
        if at >= len(answer) or answer[at] != anchor:
            # A request without a script (the server's warm-up), past its end, or one that left it.
            return [anchor] * block_size
        right = answer[at + 1 : at + 1 + planted(entry["index"], at, block_size)]
        drafts = right + [(token + 1) % self._vocab_size for token in answer[at + 1 + len(right) :]]
        return [anchor, *(drafts + [0] * block_size)[: block_size - 1]]
