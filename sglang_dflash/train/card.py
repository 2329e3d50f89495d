"""The model card of a trained drafter: every figure is a fact that the caller hands over, and none may be missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationError,
    model_validator,
)

from sglang_dflash import checkpoint
from sglang_dflash.drafter_config import DrafterConfig
from sglang_dflash.train.evaluate import Acceptance, EngineEvaluation, Evaluation

_Text = Annotated[str, Field(min_length=1)]
_ENGINE, _TABLE = "engine's", "table's"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True)


def _source(result: Any) -> str:
    """Which of the two records a measurement's result is."""
    engine = "num_rounds" in result if isinstance(result, Mapping) else isinstance(result, EngineEvaluation)
    return _ENGINE if engine else _TABLE


class Target(_Record):
    """The model that the drafter drafts for."""

    name: _Text  # hub id or package
    weights: _Text  # which weights exactly, such as a quantised file's name and how it was dequantised
    licence: _Text


class Data(_Record):
    """A family of examples, of one split."""

    family: _Text
    split: Literal["train", "heldout"]
    examples: PositiveInt
    tokens: PositiveInt  # of the answers
    source: _Text  # where the prompts come from and who answered
    licence: _Text  # of the prompts


class Training(_Record):
    """How the drafter was trained."""

    steps: PositiveInt
    sequences_per_step: PositiveInt
    blocks_per_sequence: PositiveInt
    optimizer: _Text
    learning_rate: PositiveFloat  # its peak
    schedule: _Text
    loss: _Text
    seeds: Annotated[dict[_Text, int], Field(min_length=1)]
    hardware: _Text
    minutes: PositiveFloat
    versions: Annotated[dict[_Text, _Text], Field(min_length=1)]
    command: _Text


class Measurement(_Record):
    """Acceptance measured on held-out examples."""

    title: _Text
    command: _Text
    result: Annotated[
        Annotated[EngineEvaluation, Tag(_ENGINE)] | Annotated[Evaluation, Tag(_TABLE)], Discriminator(_source)
    ]


class Facts(_Record):
    """Everything a card says beside the drafter's own config."""

    name: _Text
    licence: _Text  # of the drafter
    target: Target
    data: Annotated[list[Data], Field(min_length=1)]
    training: Training
    measurements: Annotated[list[Measurement], Field(min_length=1)]
    serve_command: _Text

    @model_validator(mode="after")
    def _measured_on_data_that_it_names(self) -> Self:
        if not any(row.split == "train" for row in self.data):
            raise ValueError("data: expected the families trained on, got none of split train; add them")
        heldout = {row.family for row in self.data if row.split == "heldout"}
        measured = {name for measurement in self.measurements for name in measurement.result.families}
        if unnamed := sorted(measured - heldout):
            raise ValueError(f"data: expected the held-out {', '.join(unnamed)} that was measured, got none; add it")
        return self


def model_card(facts: Mapping[str, Any], drafter: DrafterConfig) -> str:
    """The card in Markdown, with the front matter that model hubs read.

    Args:
        facts: the fields of `Facts`; a measurement's `result` is an `Evaluation` or what its JSON holds.

    Raises:
        ValueError: a fact is missing, unknown or contradicts another; every one is named.
    """
    try:
        checked = Facts.model_validate(facts)
    except ValidationError as error:
        raise ValueError("no model card:\n  - " + "\n  - ".join(map(_explain, error.errors()))) from None
    for measurement in checked.measurements:
        if (size := measurement.result.block_size) > drafter.block_size:
            raise ValueError(
                f"no model card:\n  - {measurement.title}: expected blocks of at most {drafter.block_size} tokens, the "
                f"drafter's, got {size}; measure this drafter"
            )
    sections = [
        _front_matter(checked),
        f"# {checked.name}\n\n{_summary(checked, drafter)}",
        f"## Serving\n\n{_code(checked.serve_command)}",
        *(_measurement(measurement) for measurement in checked.measurements),
        _data(checked.data),
        _training(checked.training),
        _licences(checked),
    ]
    return "\n\n".join(sections) + "\n"


def _explain(detail: Any) -> str:
    # Pydantic puts the name of the record that it chose among the keys.
    key = ".".join(str(part) for part in detail["loc"] if part not in (_ENGINE, _TABLE))
    match detail["type"]:
        case "missing":
            return f"{key}: expected a value, got none; add it"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{key}: expected a known key, got an unknown one; remove it or correct its spelling"
        case "value_error":
            return str(detail["ctx"]["error"])
        case _:
            expected = detail["msg"].removeprefix("Input should be ").removeprefix("Value should have ")
            return f"{key}: expected {expected}, got {detail['input']!r}; correct it"


def _front_matter(facts: Facts) -> str:
    fields = {
        "license": facts.licence,
        "base_model": facts.target.name,
        "tags": ["dflash", "speculative-decoding", "sglang"],
    }
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _summary(facts: Facts, drafter: DrafterConfig) -> str:
    num_parameters = sum(math.prod(shape) for shape in checkpoint.expected_tensors(drafter).values())
    taps = ", ".join(map(str, drafter.target_layer_ids))
    rows = [
        ("target", facts.target.name),
        ("target's weights", facts.target.weights),
        ("parameters", f"{num_parameters:,} (embedding and head are the target's)"),
        ("layers", str(drafter.num_hidden_layers)),
        ("hidden / intermediate size", f"{drafter.hidden_size} / {drafter.intermediate_size}"),
        ("block", f"{drafter.block_size} tokens: the anchor and {drafter.block_size - 1} drafts"),
        ("tapped target layers", taps),
        ("mask token id", str(drafter.mask_token_id)),
    ]
    return (
        f"A DFlash drafter (block diffusion, arXiv 2602.06036) for {facts.target.name}: it drafts a block of tokens in "
        "one pass, and the target keeps those that it would have said itself.\n\n" + _table(("", ""), rows)
    )


def _measurement(measurement: Measurement) -> str:
    result = measurement.result
    lines = {**result.families, "**all**": result.overall}
    percent = f"{result.confidence * 100:g} %"
    lengths = _table(
        ("family", "acceptance length", f"{percent} interval", "blocks", "sequences"),
        [
            (name, f"{a.length:.2f}", _interval(a), f"{a.num_blocks:,}", f"{a.num_sequences:,}")
            for name, a in lines.items()
        ],
    )
    slots = _table(
        ("slot", *lines),
        [(str(k + 1), *(_percent(a.slots[k]) for a in lines.values())) for k in range(result.block_size - 1)],
    )
    text = (
        f"## Acceptance: {measurement.title}\n\n"
        f"On held-out examples, with blocks of {result.block_size} tokens. Acceptance length: mean tokens that a block "
        f"commits, the bonus token included. Intervals: {result.num_resamples} resamples of the sequences.\n\n"
        f"{lengths}\n\n"
    )
    if isinstance(result, EngineEvaluation):
        text += (
            f"The engine took {result.num_rounds:,} rounds for {result.num_tokens:,} tokens; the rounds' acceptance "
            "counts what the last round of a request accepted past its end.\n\n"
        )
    return (
        f"{text}Conditional acceptance, P(slot right | slots before it right), in per cent:\n\n{slots}\n\n"
        f"Measured by:\n\n{_code(measurement.command)}"
    )


def _data(data: list[Data]) -> str:
    rows = [(row.family, row.split, f"{row.examples:,}", f"{row.tokens:,}", row.source) for row in data]
    for split in ("train", "heldout"):
        of_split = [row for row in data if row.split == split]
        examples, tokens = sum(row.examples for row in of_split), sum(row.tokens for row in of_split)
        if of_split:
            rows.append(("**all**", split, f"{examples:,}", f"{tokens:,}", ""))
    return "## Data\n\n" + _table(("family", "split", "examples", "answer tokens", "source"), rows)


def _training(training: Training) -> str:
    blocks = training.sequences_per_step * training.blocks_per_sequence
    rows = [
        ("steps", f"{training.steps:,}"),
        ("batch", f"{training.sequences_per_step} sequences, {training.blocks_per_sequence} blocks each ({blocks:,})"),
        ("loss", training.loss),
        ("optimizer", training.optimizer),
        ("peak learning rate", f"{training.learning_rate:g}"),
        ("schedule", training.schedule),
        ("seeds", ", ".join(f"{name} {seed}" for name, seed in training.seeds.items())),
        ("hardware", training.hardware),
        ("duration", f"{training.minutes:g} minutes"),
        ("versions", ", ".join(f"{name} {version}" for name, version in training.versions.items())),
    ]
    return f"## Training\n\n{_table(('', ''), rows)}\n\nTrained by:\n\n{_code(training.command)}"


def _licences(facts: Facts) -> str:
    rows = [("this drafter", facts.licence), (f"target {facts.target.name}", facts.target.licence)]
    rows += dict.fromkeys((f"prompts of {row.family}: {row.source}", row.licence) for row in facts.data)
    return "## Licences\n\n" + _table(("what", "licence"), rows)


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    # A bar or a line's end inside a cell would end the cell.
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _code(command: str) -> str:
    return f"```bash\n{command}\n```"


def _interval(acceptance: Acceptance) -> str:
    if acceptance.interval is None:
        return "none (one sequence)"
    low, high = acceptance.interval
    return f"{low:.2f} to {high:.2f}"


def _percent(rate: float | None) -> str:
    return "not reached" if rate is None else f"{rate * 100:.1f}"
