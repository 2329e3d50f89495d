"""What every measurement makes of answers: acceptance, differing requests, spread of repeats."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.offline import Answer


def acceptance(runs: Sequence[Sequence[Answer]]) -> float:
    """Tokens that a request was handed in a decode round, on average; 1 for plain decoding."""
    tokens = sum(len(answer.token_ids) - 1 for run in runs for answer in run)
    rounds = sum(answer.num_rounds or len(answer.token_ids) - 1 for run in runs for answer in run)
    return tokens / rounds


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least, most and all of the repeats."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": [round(value, 4) for value in values],
    }


def turn(names: Sequence[str], repeat: int) -> list[str]:
    """The order of repeat number `repeat`: each starts with another engine."""
    first = repeat % len(names)
    return [*names[first:], *names[:first]]


def rate(pairs: Sequence[tuple[Sequence[Answer], Sequence[Answer]]]) -> float:
    """Fraction of requests whose tokens differ between the two answers of a pair of runs; 0 where there is no pair."""
    outcomes = [a.token_ids != b.token_ids for left, right in pairs for a, b in zip(left, right, strict=True)]
    return sum(outcomes) / len(outcomes) if outcomes else 0.0


def differing(answers: Mapping[str, Sequence[Sequence[Answer]]]) -> dict[str, float]:
    """Fraction of requests whose tokens differ, between engines (same repeat) and from one repeat to the next."""
    names = list(answers)
    rates = {f"{name} run to run": rate(list(zip(answers[name][:-1], answers[name][1:]))) for name in names}
    for i, left in enumerate(names):
        for right in names[i + 1 :]:
            rates[f"{left} against {right}"] = rate(list(zip(answers[left], answers[right], strict=True)))
    return rates
