"""Training examples on disk, and the batches made of them."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

Split = Literal["train", "heldout"]

PAD_MULTIPLE = 64  # tokens; few distinct widths, so that compiled code is seldom compiled again
# Batches whose sequences are sorted by length together: enough to pad little, few enough to mix the epoch well.
GROUP_BATCHES = 32


@dataclass(frozen=True)
class Example:
    """One prompt and the target's own answer to it."""

    family: str
    split: Split
    prompt_ids: list[int]
    answer_ids: list[int]  # with the end-of-turn token, where the answer came to it
    looped: bool = False  # the answer repeated itself, and its tail was cut


@dataclass(frozen=True)
class Batch:
    """Sequences padded with zeros to a common width; on the CPU."""

    ids_BS: torch.Tensor  # int64: prompt, answer, padding
    num_prompt_B: torch.Tensor  # int64: tokens of the prompt
    lengths_B: torch.Tensor  # int64: tokens without padding
    starts_B: torch.Tensor  # int64: where each sequence starts in the tokens of all examples laid end to end


def split_of(prompt_text: str, heldout_percent: float = 5) -> Split:
    """The side a prompt is on: a function of its text alone, so that no run trains on what another held out."""
    digest = hashlib.sha256(prompt_text.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8]) % 10_000 < heldout_percent * 100 else "train"


def write(path: Path, examples: Iterable[Example]) -> None:
    """Write JSON lines. The file appears whole or not at all; an older one stays until then."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            for example in examples:
                file.write(json.dumps(vars(example), separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def read(path: Path) -> list[Example]:
    """The examples of a file that `write` made.

    Raises:
        ValueError: there is no such file, it holds no example, or a line is broken; the first such line is named.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"expected training data at {path}, got no such file; make it with: sglang-dflash train data")
    with path.open(encoding="utf-8") as file:
        examples = [_parse(line, f"{path}, line {number}") for number, line in enumerate(file, 1)]
    if not examples:
        raise ValueError(f"expected examples in {path}, got an empty file; make it anew")
    return examples


def _parse(line: str, where: str) -> Example:
    try:
        fields = json.loads(line)
        example = Example(**fields)
    except (json.JSONDecodeError, TypeError) as error:
        got = f"{line[:60].strip()!r} ({error})"
        raise ValueError(f"{where}: expected an example, got {got}; make the file anew") from error
    if example.split not in ("train", "heldout"):
        raise ValueError(f"{where}: expected the split train or heldout, got {example.split!r}; correct it")
    for name in ("prompt_ids", "answer_ids"):
        if not _is_ids(fields[name]):
            raise ValueError(f"{where}: expected {name} to be token ids, one at least; make the file anew")
    return example


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int and item >= 0 for item in value)


class Batches:
    """An endless sequence of batches: `batch(step)` depends on the examples, the seed and the step alone.

    Each epoch is shuffled anew. Sequences of similar length share a batch; the batches of an epoch come in random
    order. Every example comes once an epoch, and the last batch is filled up with examples that come twice.
    """

    def __init__(
        self, examples: Sequence[Example], batch_sequences: int, max_tokens: int, seed: int, *, one_width: bool = False
    ) -> None:
        """Examples of one split; those without two tokens of answer within `max_tokens`, an anchor and what follows it,
        are left out. `one_width`: all batches are `max_tokens` wide.

        Raises:
            ValueError: `max_tokens` is no positive multiple of 64, `batch_sequences` is below 1, or no example is left.
        """
        if max_tokens < 1 or max_tokens % PAD_MULTIPLE:
            raise ValueError(f"expected max_tokens to be a multiple of {PAD_MULTIPLE}, got {max_tokens}; round it")
        if batch_sequences < 1:
            raise ValueError(f"expected batch_sequences of at least 1, got {batch_sequences}; raise it")
        kept = [e for e in examples if min(len(e.answer_ids), max_tokens - len(e.prompt_ids)) >= 2]
        if not kept:
            raise ValueError(
                f"expected examples of the split {examples[0].split} with two tokens of answer or more within "
                f"max_tokens {max_tokens}, got none among {len(examples)}; raise max_tokens or make more data"
            )
        self.batch_sequences, self.seed = batch_sequences, seed
        self._fixed_width = max_tokens if one_width else None
        self.examples = kept
        # One tensor of 4-byte ids: lists of Python integers would take ten times the memory.
        sequences = [(example.prompt_ids + example.answer_ids)[:max_tokens] for example in kept]
        self._lengths = [len(sequence) for sequence in sequences]
        self._num_prompt = [len(example.prompt_ids) for example in kept]
        self._ids = torch.cat([torch.tensor(sequence, dtype=torch.int32) for sequence in sequences])
        self._starts = [0, *torch.tensor(self._lengths).cumsum(0).tolist()]
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    @property
    def num_examples(self) -> int:
        return len(self._lengths)

    @property
    def largest_id(self) -> int:
        return int(self._ids.max())

    @property
    def num_tokens(self) -> int:
        """Of all examples, as far as they are trained on."""
        return len(self._ids)

    def by_length(self) -> list[list[int]]:
        """Every example once, in batches that pad little: indices of `examples`. The last batch may be smaller."""
        rows = sorted(range(self.num_examples), key=self._lengths.__getitem__)
        return [rows[i : i + self.batch_sequences] for i in range(0, len(rows), self.batch_sequences)]

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_examples // self.batch_sequences)

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0 through all epochs."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        return self.batch_of(self._epoch[1][index])

    def batch_of(self, rows: Sequence[int], *, narrow: bool = False) -> Batch:
        """The batch of these examples, indices of `examples`; `narrow`: no wider than they need."""
        lengths_B = torch.tensor([self._lengths[row] for row in rows])
        width = (None if narrow else self._fixed_width) or -(-int(lengths_B.max()) // PAD_MULTIPLE) * PAD_MULTIPLE
        ids_BS = torch.zeros((len(rows), width), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids_BS[i, : self._lengths[row]] = self._ids[self._starts[row] : self._starts[row + 1]]
        num_prompt_B = torch.tensor([self._num_prompt[row] for row in rows])
        return Batch(ids_BS, num_prompt_B, lengths_B, torch.tensor([self._starts[row] for row in rows]))

    def _order(self, epoch: int) -> list[list[int]]:
        """The examples of each batch of an epoch."""
        rng = random.Random(f"{self.seed}:{epoch}")
        rows = list(range(self.num_examples))
        rng.shuffle(rows)
        missing = self.steps_per_epoch * self.batch_sequences - len(rows)
        rows += [rows[i % len(rows)] for i in range(missing)]
        group = GROUP_BATCHES * self.batch_sequences
        batches = []
        for start in range(0, len(rows), group):
            by_length = sorted(rows[start : start + group], key=self._lengths.__getitem__)
            batches += [by_length[i : i + self.batch_sequences] for i in range(0, len(by_length), self.batch_sequences)]
        rng.shuffle(batches)
        return batches
