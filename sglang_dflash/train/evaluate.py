"""How much of a drafter's blocks the target accepts: acceptance length and conditional acceptance, with intervals.

Two sources give the same figures: match tables of blocks whose anchors were drawn from held-out answers, and the rounds
of an engine. A table's anchors are spread evenly over the answers, so that an easy stretch counts once for each of its
tokens; an engine's rounds start where the last one ended, so that it counts once. The engine's figure is the lower one,
and what a server does.

Acceptance is decided slot after slot, so everything follows from two counts a slot: blocks that reached it (all slots
before it right) and blocks where it was right too. The mean acceptance length is 1 + sum over k of p_1 ... p_k with p_k
the conditional acceptance of slot k. It equals the mean leading run plus the bonus token where every block is judged
to its end; a block cut short by the end of its answer counts in the slots that it has (Kaplan and Meier, 1958).

Shape letters: N blocks, J = K - 1 slots that draft, S sequences, R resamples.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from sglang_dflash import validation
from sglang_dflash.offline import Answer

CONFIDENCE = 0.95
NUM_RESAMPLES = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance over some sequences.

    Attributes:
        num_sequences: sequences with at least one block.
        num_blocks: blocks, or an engine's rounds.
        length: mean tokens that a block commits, the bonus token included. Slots that no block reached count as wrong.
        interval: of `length`, from resampled sequences; None for a single sequence.
        slots: entry k - 1 is P(slot k right | slots 1 .. k-1 right); None where no block reached the slot.
        reached: entry k - 1 is the number of blocks behind that figure.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    num_sequences: int
    num_blocks: int
    length: float
    interval: tuple[float, float] | None
    slots: tuple[float | None, ...]
    reached: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Acceptance of all sequences together, and by family.

    Attributes:
        block_size: tokens of a block, anchor included.
        overall: blocks of all families together.
        families: by name, sorted.
        confidence, num_resamples, seed: of the intervals.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    block_size: int
    overall: Acceptance
    families: dict[str, Acceptance]
    confidence: float
    num_resamples: int
    seed: int

    def to_json(self) -> str:
        """The record as JSON; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError with every key that is wrong."""
        try:
            return TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            found = "; ".join(validation.problems(error))
            raise ValueError(f"expected an {cls.__name__} as JSON, got: {found}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineEvaluation(Evaluation):
    """Acceptance of an engine's rounds, and what came of it.

    Attributes:
        num_rounds: decode rounds.
        num_tokens: tokens that those rounds handed out. Fewer than were accepted: a request's last round may accept
            more than fits before its end, and the acceptance length counts them.
    """

    num_rounds: int
    num_tokens: int


def evaluate_matches(
    match_NJ: torch.Tensor,
    valid_NJ: torch.Tensor,
    sequence_N: torch.Tensor,
    families: Sequence[str],
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> Evaluation:
    """Acceptance from match tables.

    Args:
        match_NJ: bool, whether slot k's draft is the target's own greedy token after the true tokens before it.
        valid_NJ: bool, whether slot k has such a token. A slot counts only where all slots before it have one.
        sequence_N: int64, each block's sequence, an index of `families`.
        families: the family of every sequence.
        seed, num_resamples: of the intervals' resampling.

    Raises ValueError where the shapes or types differ from these, or where no block has a valid first slot.
    """
    _check_tables(match_NJ, valid_NJ, sequence_N, len(families))
    counts = torch.zeros(2, len(families), match_NJ.shape[1], dtype=torch.float64, device=match_NJ.device)
    for total_SJ, table_NJ in zip(counts, _counts(match_NJ, valid_NJ)):
        total_SJ.index_add_(0, sequence_N, table_NJ.double())
    reached_SJ, right_SJ = counts.cpu()
    return Evaluation(**_summaries(reached_SJ, right_SJ, families, seed, num_resamples))


def acceptance_length(match_NJ: torch.Tensor, valid_NJ: torch.Tensor) -> float:
    """Mean acceptance length of match tables as `evaluate_matches` takes them; 1 where no block has a valid slot."""
    return float(_length(*(table_NJ.sum(0) for table_NJ in _counts(match_NJ, valid_NJ))))


def _counts(match_NJ: torch.Tensor, valid_NJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots that were reached, and those that were right too, int64 (N, J)."""
    right_NJ = (match_NJ & valid_NJ).long().cumprod(1)
    return valid_NJ * torch.nn.functional.pad(right_NJ[:, :-1], (1, 0), value=1), right_NJ


def evaluate_answers(
    answers: Sequence[Answer],
    families: Sequence[str],
    width: int,
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> EngineEvaluation:
    """Acceptance from an engine's answers.

    Args:
        answers: of an engine that verified blocks of one width throughout: where the width varied, late slots would
            look worse than they are.
        families: the family of every answer.
        width: verified tokens of a round, anchor included.

    Raises ValueError where the counts do not fit `width` or each other, or where no answer has a decode round.
    """
    if len(families) != len(answers):
        raise ValueError(f"expected a family for each of {len(answers)} answers, got {len(families)}; pass one each")
    if width < 2:
        raise ValueError(f"width: expected at least 2 (anchor and one draft), got {width}; pass the verified width")
    accepted_SK = torch.zeros(len(answers), width, dtype=torch.float64)
    for number, answer in enumerate(answers):
        histogram = answer.accepted_histogram
        if len(histogram) > width or sum(histogram) != answer.num_rounds:
            raise ValueError(
                f"answer {number}: expected counts of 0 to {width - 1} accepted drafts in {answer.num_rounds} rounds, "
                f"got {histogram}; pass the width that the engine verified"
            )
        accepted_SK[number, : len(histogram)] = torch.tensor(histogram, dtype=torch.float64)
    # at_least_SK[:, k]: rounds with k or more accepted drafts.
    at_least_SK = accepted_SK.flip(1).cumsum(1).flip(1)
    with_rounds = [answer for answer in answers if answer.num_rounds]
    return EngineEvaluation(
        **_summaries(at_least_SK[:, :-1], at_least_SK[:, 1:], families, seed, num_resamples),
        num_rounds=sum(answer.num_rounds for answer in with_rounds),
        # An answer's first token comes from the prefill.
        num_tokens=sum(len(answer.token_ids) - 1 for answer in with_rounds),
    )


def _check_tables(match_NJ: torch.Tensor, valid_NJ: torch.Tensor, sequence_N: torch.Tensor, num_sequences: int) -> None:
    for name, table in (("match", match_NJ), ("valid", valid_NJ)):
        if table.dtype != torch.bool or table.ndim != 2 or table.shape != match_NJ.shape or table.shape[1] < 1:
            got = f"{table.dtype} {tuple(table.shape)}"
            raise ValueError(f"{name}: expected bool (num_blocks, K - 1), as match, got {got}; pass such a table")
    if sequence_N.dtype != torch.int64 or sequence_N.shape != match_NJ.shape[:1]:
        got = f"{sequence_N.dtype} {tuple(sequence_N.shape)}"
        raise ValueError(f"sequence: expected int64 ({len(match_NJ)},), got {got}; pass each block's sequence")
    if len(sequence_N) and (int(sequence_N.min()) < 0 or int(sequence_N.max()) >= num_sequences):
        got = f"{int(sequence_N.min())} to {int(sequence_N.max())}"
        raise ValueError(f"sequence: expected 0 to {num_sequences - 1}, got {got}; pass a family for every sequence")


def _summaries(
    reached_SJ: torch.Tensor, right_SJ: torch.Tensor, families: Sequence[str], seed: int, num_resamples: int
) -> dict[str, Any]:
    """The fields of Evaluation."""
    present = reached_SJ[:, 0] > 0
    if not bool(present.any()):
        raise ValueError("expected at least one block with a judged draft, got none; evaluate longer answers")
    rows_of = {name: torch.tensor([family == name for family in families]) & present for name in sorted(set(families))}

    def summary(rows_S: torch.Tensor) -> Acceptance:
        return _acceptance(reached_SJ[rows_S], right_SJ[rows_S], seed, num_resamples)

    return {
        "block_size": reached_SJ.shape[1] + 1,
        "overall": summary(present),
        "families": {name: summary(rows_S) for name, rows_S in rows_of.items() if bool(rows_S.any())},
        "confidence": CONFIDENCE,
        "num_resamples": num_resamples,
        "seed": seed,
    }


def _acceptance(reached_SJ: torch.Tensor, right_SJ: torch.Tensor, seed: int, num_resamples: int) -> Acceptance:
    reached_J, right_J = reached_SJ.sum(0), right_SJ.sum(0)
    rates = (right_J / reached_J).tolist()
    num_sequences, interval = len(reached_SJ), None
    if num_sequences > 1:
        generator = torch.Generator().manual_seed(seed)
        drawn_RS = torch.randint(num_sequences, (num_resamples, num_sequences), generator=generator)
        times_RS = torch.zeros(num_resamples, num_sequences, dtype=torch.float64)
        times_RS.scatter_add_(1, drawn_RS, times_RS.new_ones(()).expand_as(times_RS))
        lengths_R = _length(times_RS @ reached_SJ, times_RS @ right_SJ)
        ends = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=torch.float64)
        low, high = torch.quantile(lengths_R, ends).tolist()
        interval = (low, high)
    return Acceptance(
        num_sequences=num_sequences,
        num_blocks=int(reached_J[0]),
        length=float(_length(reached_J, right_J)),
        interval=interval,
        slots=tuple(rate if count else None for rate, count in zip(rates, reached_J.tolist())),
        reached=tuple(int(count) for count in reached_J.tolist()),
    )


def _length(reached: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Mean acceptance length from counts float64 (..., J)."""
    return 1 + (right / reached.clamp(min=1)).cumprod(-1).sum(-1)
