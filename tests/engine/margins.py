"""How close a call plain decoding's choice was where another answer leaves it, in bfloat16.

A verified block and a decoded token may round differently: a logit of 16 to 32 is a multiple of an eighth. So a few
answers part, where two tokens were about as likely; anywhere else an answer that parts is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_PARTED = 1 / 8  # of answers
CLOSE_CALL = 0.5  # in logprobs


def of(top_logprobs: Sequence[Any]) -> list[float]:
    """By how much each token was likelier than the next likely one; of SGLang's top logprobs, two at least."""
    return [first[0] - second[0] for first, second, *_ in top_logprobs]


def where_parted(margins: Sequence[float], expected: Sequence[int], said: Sequence[int]) -> float | None:
    """The margin of the first expected token that was not said; None where an answer says what was expected."""
    return next((m for m, one, other in zip(margins, expected, said, strict=False) if one != other), None)


def check(parted: Sequence[float], num_answers: int) -> None:
    """Few answers part, all of them at a close call."""
    assert len(parted) <= MOST_PARTED * num_answers, parted
    assert max(parted, default=0.0) <= CLOSE_CALL, parted
