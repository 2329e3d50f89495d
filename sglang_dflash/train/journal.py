"""The journal of a data run: what has been generated so far, so that a killed run goes on with nothing lost.

JSON lines, only ever appended to: the run's identity, then a line for each batch of user turns and for each answer.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def key_of(prompt_ids: list[int]) -> str:
    """The name of a prompt in the journal."""
    return hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest()[:24]


class Journal:
    """Use it as a context manager: it holds the file, and a lock on it, open.

    `turns` are batches of user turns in the order of sampling, `answers` maps a prompt's key to the answer's ids and
    whether its looping tail was cut.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Read what is there; a last line that a kill has torn is dropped.

        Raises:
            ValueError: another run writes the file, it is of another run (the difference is named), or it is broken.
        """
        self.path = path
        self.turns: list[list[str]] = []
        self.answers: dict[str, tuple[list[int], bool]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._lock()
            self._load(json.loads(json.dumps(dict(identity))))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add_turns(self, batch: list[str]) -> None:
        """Record a batch of user turns; an empty one counts as a batch too."""
        self._append([{"turns": batch}])
        self.turns.append(batch)

    def add_answers(self, answers: Iterable[tuple[str, list[int], bool]]) -> None:
        """Record answers: key of the prompt, ids, whether a loop was cut."""
        found = list(answers)
        self._append([{"key": key, "ids": ids, "looped": looped} for key, ids, looped in found])
        self.answers.update({key: (ids, looped) for key, ids, looped in found})

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"expected to be alone with {self.path}, got another run that writes it; wait for it or end it"
            ) from error

    def _load(self, identity: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        # What stands after the last line end was torn by a kill: it is cut off, and made again.
        self._file.truncate(sum(len(line) + 1 for line in lines[:-1]))
        records = [self._parse(line, number) for number, line in enumerate(lines[:-1], 1)]
        if len(records) <= 1:
            # Nothing generated yet: a run with other settings may begin.
            self._file.truncate(0)
            self._append([{"identity": identity}])
            return
        before = records[0].get("identity", {})
        different = [name for name in sorted({*identity, *before}) if identity.get(name) != before.get(name)]
        if different:
            was = ", ".join(f"{name} {before.get(name)!r}, not {identity.get(name)!r}" for name in different)
            raise ValueError(
                f"expected {self.path} to be of this run, got one of {was}; take the settings back, write to another "
                "file, or delete that one"
            )
        for record in records[1:]:
            if "turns" in record:
                self.turns.append(record["turns"])
            else:
                self.answers[record["key"]] = (record["ids"], record["looped"])

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{self.path}, line {number}: expected JSON, got {line[:40]!r}; delete the line to lose no other"
            ) from error
        if not isinstance(record, dict) or not (
            {"identity", "turns"} & set(record) or {"key", "ids", "looped"} <= set(record)
        ):
            raise ValueError(f"{self.path}, line {number}: expected a record, got {line[:40]!r}; delete the line")
        return record

    def _append(self, records: list[dict[str, Any]]) -> None:
        lines = (json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
