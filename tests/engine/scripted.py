"""A proposer that knows the answers and makes chosen mistakes, so that every accepted length occurs on purpose.

The script, a JSON file named by $DFLASH_TEST_SCRIPT, maps a request id to "prompt_len", "answer" (tokens) and either
"index", for mistakes where `planted` says, or "seed", for mistakes anywhere. What follows an "@" in a request's id only
tells requests with the same prompt apart. The file is read again whenever it changes.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

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
    return following(path, script)


def following(
    path: Path, script: dict[str, dict[str, Any]], proposer: type[ScriptedProposer] | None = None
) -> dict[str, str]:
    """Write a script; the environment in which an engine follows it."""
    write(path, script)
    name = f"{__name__}:{(proposer or ScriptedProposer).__name__}"
    return {config.CONFIG_VARIABLE: json.dumps({"proposer": name}), SCRIPT_VARIABLE: str(path)}


def write(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Put a script in the place of another, whole: an engine that runs follows it from its next round on."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(entries))
    new.rename(path)


class ScriptedProposer:
    """Drafts the right tokens but for the planted mistakes."""

    draws = False

    def __init__(self, ops: Any, buffers: Buffers, head: Head) -> None:
        self._buffers = buffers
        self._vocab_size = head.weight_VH.shape[0]
        self._path = Path(os.environ[SCRIPT_VARIABLE])
        self._stamp: tuple[int, int] | None = None
        self._script: dict[str, dict[str, Any]] = {}

    def score(self, hidden_NH: torch.Tensor, ids_N: torch.Tensor) -> None:
        """The drafter runs for real; what it says is not used."""

    def propose(self, round_: Round, block: Block) -> Draft:
        self._read()
        rows = []
        for rid, seq_len, anchor in zip(
            round_.rids, round_.seq_lens_B.tolist(), block.ids_BK[:, 0].tolist(), strict=True
        ):
            rows.append(self._row(rid, seq_len, anchor))
        drafted_BK = self._buffers.drafted_BK[: len(rows)]
        drafted_BK.copy_(torch.tensor(rows))
        return Draft(drafted_BK)

    def _read(self) -> None:
        status = self._path.stat()
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp != self._stamp:
            self._stamp, self._script = stamp, json.loads(self._path.read_text())

    def _row(self, rid: str, seq_len: int, anchor: int) -> list[int]:
        block_size = self._buffers.block_size
        entry = self._script.get(rid.partition("@")[0])
        if entry is None or not _follows(entry, seq_len, anchor):
            # SGLang names the n answers of a request itself. None fits the server's warm-up, nor one past its end.
            entry = next((other for other in self._script.values() if _follows(other, seq_len, anchor)), None)
        if entry is None:
            return [anchor] * block_size
        at = seq_len - entry["prompt_len"]
        rest = entry["answer"][at + 1 :][: block_size - 1]
        if "seed" in entry:
            return [anchor, *self._randomly_wrong(rest, random.Random(f"{entry['seed']}-{at}"))]
        num_right = planted(entry["index"], at, block_size)
        drafts = rest[:num_right] + [(token + 1) % self._vocab_size for token in rest[num_right:]]
        return [anchor, *(drafts + [0] * block_size)[: block_size - 1]]

    def _randomly_wrong(self, rest: list[int], rng: random.Random) -> list[int]:
        """One mistake or none, anywhere: what follows it is right, for whoever does not stop there."""
        drafts = rest + [rng.randrange(self._vocab_size) for _ in range(self._buffers.block_size - 1 - len(rest))]
        wrong = rng.randrange(len(drafts) + 1)
        if wrong < len(drafts):
            drafts[wrong] = (drafts[wrong] + rng.randrange(1, self._vocab_size)) % self._vocab_size
        return drafts


class ReplaysLeftToSGLang(ScriptedProposer):
    """In an engine whose graphs are SGLang's to replay, whatever this package could."""

    def __init__(self, ops: Any, buffers: Buffers, head: Head) -> None:
        from sglang_dflash.host import round_graphs

        mock.patch.object(round_graphs, "serve", return_value=False).start()
        super().__init__(ops, buffers, head)


def _follows(entry: dict[str, Any], seq_len: int, anchor: int) -> bool:
    """Whether a request of this length and last token can be this entry's."""
    at = seq_len - entry["prompt_len"]
    return 0 <= at < len(entry["answer"]) and entry["answer"][at] == anchor
