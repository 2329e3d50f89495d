"""The check before a time is taken: every engine answers the same prompts greedily, and is held to plain decoding.

float32 owes plain decoding's tokens. bfloat16 rounds a verified block and a decoded token differently, so that a
request may part from plain decoding where two tokens are nearly as probable; there an engine passes whose requests part
no oftener than the built-in worker's do, where it was measured, and a fraction of all requests besides.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.bench import figures
from sglang_dflash.bench.columns import Column
from sglang_dflash.offline import Answer, EngineProcess, generate_in_batches

# Of all requests, in bfloat16. A wrong cache, mask or acceptance changes nearly every answer of some length; rounding
# changed 4 and 5 of 32 answers of SmolLM2-135M, of the built-in worker and of ours (bench/README.md, one H200).
TOLERATED = 0.125


@dataclasses.dataclass(frozen=True)
class Check:
    """What came of it.

    Attributes:
        passed: None where nothing was checked.
        says: one line for a person.
        differing: fraction of requests that part from plain decoding, by size of batches and column.
        first_differences: `request: position` of the first token that differs, by size of batches and column.
    """

    passed: bool | None
    says: str
    differing: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    first_differences: dict[int, dict[str, dict[int, int]]] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def skipped(why: str) -> Check:
    return Check(None, f"not checked against plain decoding: {why}")


def check(
    engines: Mapping[str, EngineProcess],
    columns: Sequence[Column],
    prompts: Mapping[int, Sequence[Sequence[int]]],
    *,
    new_tokens: int,
    ignore_eos: bool,
    dtype: str,
) -> Check:
    """Answer prompts greedily and untimed, by the size of the batches that they are asked in, and judge."""
    answers: dict[int, dict[str, list[Answer]]] = {size: {} for size in prompts}
    for size, asked in prompts.items():
        for name, engine in engines.items():
            print(f"checking {name} in batches of {size}", file=sys.stderr, flush=True)
            options = {"max_new_tokens": new_tokens, "ignore_eos": ignore_eos}
            answers[size][name], _ = generate_in_batches(engine, asked, size, **options)
    return judge(answers, columns, dtype)


def judge(answers: Mapping[int, Mapping[str, Sequence[Answer]]], columns: Sequence[Column], dtype: str) -> Check:
    """Hold every column's answers against plain decoding's.

    Args:
        answers: by size of batches and column; each size is judged by its own rates.
    """
    kinds = {column.name: column.kind for column in columns}
    plain = next((name for name, kind in kinds.items() if kind == "plain"), None)
    if plain is None or set(kinds.values()) == {"plain"}:
        return skipped("plain decoding and another engine are not both among the columns")
    others = [name for name in kinds if name != plain]
    tolerated = 0.0 if dtype == "float32" else TOLERATED
    passed, told, differing, places = True, [], {}, {}
    for size, said in answers.items():
        rates = {name: figures.rate([(said[plain], said[name])]) for name in others}
        limit = tolerated + max((rates[name] for name in others if kinds[name] == "stock"), default=0.0)
        wrong = [name for name in others if rates[name] > limit]
        passed = passed and not wrong
        total = len(said[plain])
        counts = ", ".join(f"{name} {round(rate * total)} of {total}" for name, rate in rates.items())
        told.append(f"{counts} in batches of {size}")
        if wrong:
            told.append(f"expected at most {int(limit * total)} of {', '.join(wrong)}")
        differing[size] = rates
        places[size] = {name: _first_differences(said[plain], said[name]) for name in others}
    says = f"greedy, {dtype}: requests that differ from plain decoding: {'; '.join(told)}"
    return Check(passed, says, differing, places)


def _first_differences(expected: Sequence[Answer], got: Sequence[Answer]) -> dict[int, int]:
    differences = {}
    for number, (left, right) in enumerate(zip(expected, got, strict=True)):
        if left.token_ids != right.token_ids:
            shared = min(len(left.token_ids), len(right.token_ids))
            pairs = zip(left.token_ids[:shared], right.token_ids[:shared])
            differences[number] = next((i for i, (a, b) in enumerate(pairs) if a != b), shared)
    return differences
