"""What both measurements make of answers: acceptance, differing requests, spread of repeats."""

from __future__ import annotations

import statistics
from typing import Any

from sglang_dflash.offline import Answer


def acceptance(runs: list[list[Answer]]) -> float:
    """Tokens that a request was handed in a decode round, on average; 1 for plain decoding."""
    tokens = sum(len(answer.token_ids) - 1 for run in runs for answer in run)
    rounds = sum(answer.num_rounds or len(answer.token_ids) - 1 for run in runs for answer in run)
    return tokens / rounds


def spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "repeats": [round(value, 4) for value in values]}


def differing(answers: dict[str, list[list[Answer]]]) -> dict[str, float]:
    """Fraction of requests whose tokens differ, between engines (same repeat) and from one repeat to the next."""

    def rate(pairs: list[tuple[list[Answer], list[Answer]]]) -> float:
        outcomes = [a.token_ids != b.token_ids for left, right in pairs for a, b in zip(left, right, strict=True)]
        return sum(outcomes) / len(outcomes) if outcomes else 0.0

    kinds = list(answers)
    rates = {f"{kind} run to run": rate(list(zip(answers[kind][:-1], answers[kind][1:]))) for kind in kinds}
    for i, left in enumerate(kinds):
        for right in kinds[i + 1 :]:
            rates[f"{left} against {right}"] = rate(list(zip(answers[left], answers[right], strict=True)))
    return rates
