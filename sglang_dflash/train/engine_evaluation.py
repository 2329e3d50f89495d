"""`sglang-dflash train evaluate`: a drafter's acceptance on held-out prompts, as an engine that serves it sees it."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_dflash import checkpoint
from sglang_dflash.offline import Answer, EngineProcess, Kind, precision
from sglang_dflash.train import dataset, evaluate, report

SEED = 0
SPARE_TOKENS = 64  # of a request's KV slots, over its prompt and answer: a verified block may pass its end
RECORD = "acceptance.json"
PLOT = "acceptance.png"
LOG = "engine.log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, required=True, help="directory of the target")
    parser.add_argument("--drafter", type=Path, required=True, help="directory of the drafter")
    parser.add_argument(
        "--data", type=Path, required=True, help="what `train data` wrote: its held-out prompts are answered"
    )
    parser.add_argument("--output", type=Path, required=True, help=f"folder of {RECORD}, {PLOT} and {LOG}")
    parser.add_argument("--per-family", type=int, metavar="N", help="prompts of each family; all where it is left out")
    parser.add_argument("--max-new-tokens", type=int, default=384, metavar="N")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="requests that run at once")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, else float32")
    parser.add_argument(
        "--kind", choices=("ours", "stock"), default="ours", help="this worker or SGLang's built-in one"
    )


def main(args: argparse.Namespace) -> int:
    """Answer, print the tables, write record and plot; 1 where the engine failed.

    Raises ValueError for a mistake of the user's, one that the engine found among them.
    """
    for name, least in (("per_family", 1), ("max_new_tokens", 2), ("concurrency", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least {least}, got {value}; raise it")
    families = heldout_by_family(args.data)
    width = checkpoint.read_config(args.drafter).block_size
    console, errors = Console(), Console(stderr=True)
    for name, examples in families.items():
        if args.per_family is not None and args.per_family > len(examples):
            errors.print(f"{name}: expected {args.per_family} held-out prompts, got {len(examples)}; using these")
    chosen = [example for examples in families.values() for example in examples[: args.per_family]]
    try:
        with errors.status(f"Answering {len(chosen)} prompts (starts an engine)"):
            answers = _answers(chosen, args)
    except RuntimeError as error:
        # The engine's failure with its log's path and end.
        errors.print(str(error), style="red", markup=False, highlight=False)
        return 1
    evaluation = evaluate.evaluate_answers(answers, [example.family for example in chosen], width)
    for table in (_by_family(evaluation), _by_slot(evaluation)):
        console.print(table)
    (args.output / RECORD).write_text(evaluation.to_json() + "\n", encoding="utf-8")
    title = f"{args.drafter.name}, {len(chosen)} held-out prompts, served"
    console.print(f"{args.output / RECORD}", soft_wrap=True, highlight=False)
    console.print(f"{report.plot_acceptance(evaluation, args.output / PLOT, title)}", soft_wrap=True, highlight=False)
    return 0


def heldout_by_family(file: Path) -> dict[str, list[dataset.Example]]:
    """The held-out examples of a data file by family, sorted by name; a family's are in a random order of one seed.

    Raises ValueError where the file is missing or broken, or where it holds none out.
    """
    families: dict[str, list[dataset.Example]] = {}
    examples = dataset.read(file)
    for example in examples:
        if example.split == "heldout":
            families.setdefault(example.family, []).append(example)
    if not families:
        raise ValueError(
            f"{file}: expected held-out examples, got {len(examples)} to train on and none held out; make more data or "
            "add the family code, which is held out: sglang-dflash train data --code"
        )
    for examples in families.values():
        random.Random(SEED).shuffle(examples)
    return dict(sorted(families.items()))


def _answers(examples: Sequence[dataset.Example], args: argparse.Namespace) -> list[Answer]:
    """Greedy answers to their natural end, or to --max-new-tokens."""
    args.output.mkdir(parents=True, exist_ok=True)
    kind: Kind = args.kind
    with EngineProcess(kind, args.output / LOG, **_server_args(examples, args)) as engine:
        answers, _ = engine.generate([e.prompt_ids for e in examples], max_new_tokens=args.max_new_tokens)
    return answers


def _server_args(examples: Sequence[dataset.Example], args: argparse.Namespace) -> dict[str, Any]:
    longest = max(len(example.prompt_ids) for example in examples) + args.max_new_tokens + SPARE_TOKENS
    return {
        "model_path": str(args.target),
        "speculative_draft_model_path": str(args.drafter),
        "max_running_requests": args.concurrency,
        "max_total_tokens": args.concurrency * longest,
        "skip_tokenizer_init": True,
        "random_seed": SEED,
        **precision(args.dtype),
    }


def _by_family(evaluation: evaluate.EngineEvaluation) -> Table:
    table = Table("family", "sequences", "rounds", "acceptance length", "slot 1")
    for name, family in {**evaluation.families, "all families": evaluation.overall}.items():
        low_high = "" if family.interval is None else f" ({family.interval[0]:.2f} to {family.interval[1]:.2f})"
        slot1 = f"{family.slots[0]:.3f}"
        table.add_row(name, str(family.num_sequences), str(family.num_blocks), f"{family.length:.2f}{low_high}", slot1)
    return table


def _by_slot(evaluation: evaluate.EngineEvaluation) -> Table:
    table = Table("slot", "right where all before it are", "rounds that reached it")
    for slot, (rate, reached) in enumerate(zip(evaluation.overall.slots, evaluation.overall.reached), start=1):
        table.add_row(str(slot), "-" if rate is None else f"{rate:.3f}", str(reached))
    return table
