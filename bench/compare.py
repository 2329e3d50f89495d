"""Plain decoding, SGLang's built-in DFLASH worker and ours on one card: correctness first, then time a step.

Three engines stand side by side and are measured in turn, so that the card's state is the same for all.

    python bench/compare.py --target DIR --drafter DIR --batches 1,8,32 --out bench/results/NAME.json
    python bench/compare.py --shapes bench/shapes/qwen3-8b --batches 1,8,32 --out ...      (random weights)

A step's time is the wall time that more tokens cost, over the decode rounds they took: prefill and start cancel out.

    python bench/compare.py --target DIR --drafter DIR --prompts data.jsonl --new-tokens 384 --batches 1,8,32 --out ...

With --prompts, the held-out prompts of `sglang-dflash train data` are answered to their natural end, and what is told
is tokens/s, acceptance by family and the speed-up: see heldout.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import figures
import heldout
import torch
from rich.console import Console
from rich.table import Table

from sglang_dflash import __version__, checkpoint, drafter_config
from sglang_dflash.offline import Answer, EngineProcess, Kind

KINDS: tuple[Kind, ...] = ("plain", "stock", "ours")
# Random token ids for prompts: plain text tokens of every tokenizer used here, no special ones.
PROMPT_IDS = range(1000, 20000)
FEW_TOKENS = 16
SEED = 0


def main() -> int:
    args = _parse()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        settings = _engine_args(args, Path(scratch))
        logs = Path(args.logs)
        logs.mkdir(parents=True, exist_ok=True)
        engines = {}
        for kind in args.kinds:
            print(f"starting {kind}", file=sys.stderr, flush=True)
            engines[kind] = stack.enter_context(EngineProcess(kind, logs / f"{kind}.log", **settings))
        result = {"setup": _setup(args, settings), "batches": {}}
        if args.examples:
            heldout.warm_up(engines, args.examples, max(args.batches), args.new_tokens)
        for batch in args.batches:
            result["batches"][batch] = _measure(engines, batch, args, settings)
            _write(args.out, result)
    (heldout.print_table if args.examples else _print)(result)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="directory of the target")
    parser.add_argument("--drafter", help="directory of the drafter")
    parser.add_argument("--shapes", help="directory of a target's config.json: random weights, drafter of 5 layers")
    parser.add_argument("--batches", type=_integers, default=[1, 8, 32])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help=",".join(KINDS))
    parser.add_argument("--prompts", type=Path, help="data of `sglang-dflash train data`: answer its held-out prompts")
    parser.add_argument("--num-prompts", type=int, default=64, help="held-out prompts, spread over the families")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=144, help=f"more than {FEW_TOKENS}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", action="append", default=[], metavar="KEY=JSON", help="argument of sglang.Engine")
    parser.add_argument("--logs", default="bench-logs")
    parser.add_argument("--commit", help="of the code, where it is not a git checkout")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if unknown := [kind for kind in args.kinds if kind not in KINDS]:
        parser.error(f"--kinds: expected some of {', '.join(KINDS)}, got {', '.join(unknown)}")
    if not args.prompts and args.new_tokens <= FEW_TOKENS:
        parser.error(f"--new-tokens: expected more than {FEW_TOKENS}, got {args.new_tokens}")
    if bool(args.shapes) == bool(args.target and args.drafter):
        parser.error("expected --target and --drafter, or --shapes")
    if args.prompts and args.shapes:
        parser.error("expected --target and --drafter with --prompts, got --shapes; random weights answer nothing")
    if args.prompts and args.num_prompts < max(args.batches):
        parser.error(f"--num-prompts: expected at least the largest batch, {max(args.batches)}, got {args.num_prompts}")
    try:
        args.examples = heldout.choose(args.prompts, args.num_prompts) if args.prompts else []
    except ValueError as error:
        parser.error(str(error))
    return args


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _engine_args(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "random_seed": SEED,
        "cuda_graph_bs_decode": sorted({*args.batches}),
        "max_running_requests": max(args.batches),
        "max_total_tokens": 2 * max(args.batches) * (args.prompt_tokens + args.new_tokens + 64),
        "mem_fraction_static": 0.8,
        "disable_prefill_cuda_graph": True,
        "skip_tokenizer_init": True,
    }
    if args.examples:
        settings |= heldout.engine_settings(args.examples, args.batches, args.new_tokens)
    if args.shapes:
        target = json.loads((Path(args.shapes) / "config.json").read_text())
        config = drafter_config.config_for_target(target, 5, 16, target["vocab_size"] - 1, None)
        (scratch / "config.json").write_text(json.dumps(drafter_config.config_json(config, "bfloat16")))
        settings.update(model_path=args.shapes, speculative_draft_model_path=str(scratch), load_format="dummy")
    else:
        settings.update(model_path=args.target, speculative_draft_model_path=args.drafter)
    for item in args.engine:
        key, _, value = item.partition("=")
        settings[key] = json.loads(value)
    return settings


def _measure(
    engines: dict[str, EngineProcess], batch: int, args: argparse.Namespace, settings: dict[str, Any]
) -> dict[str, Any]:
    if not args.examples:
        return _measure_steps(engines, batch, args)
    width = settings.get("speculative_num_draft_tokens") or checkpoint.read_config(args.drafter).block_size
    return heldout.measure(engines, args.examples, batch, new_tokens=args.new_tokens, repeats=args.repeats, width=width)


def _measure_steps(engines: dict[str, EngineProcess], batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Repeats of all engines in turn at one batch size."""
    rng = random.Random(SEED + batch)
    prompts = [[rng.choice(PROMPT_IDS) for _ in range(args.prompt_tokens)] for _ in range(batch)]
    answers: dict[str, list[list[Answer]]] = {kind: [] for kind in engines}
    step_ms: dict[str, list[float]] = {kind: [] for kind in engines}
    for engine in engines.values():  # warm-up: graphs, allocator, radix cache
        engine.generate(prompts, max_new_tokens=args.new_tokens, ignore_eos=True)
    for _ in range(args.repeats):
        for kind, engine in engines.items():
            few, few_s = engine.generate(prompts, max_new_tokens=FEW_TOKENS, ignore_eos=True)
            many, many_s = engine.generate(prompts, max_new_tokens=args.new_tokens, ignore_eos=True)
            step_ms[kind].append(1000 * (many_s - few_s) / (_rounds(many) - _rounds(few)))
            answers[kind].append(many)
    medians = {kind: round(statistics.median(values), 3) for kind, values in step_ms.items()}
    print(f"batch {batch}: {medians}", file=sys.stderr, flush=True)
    return {
        "step_ms": {kind: figures.spread(values) for kind, values in step_ms.items()},
        "acceptance_length": {kind: figures.acceptance(runs) for kind, runs in answers.items()},
        "differing_requests": figures.differing(answers),
    }


def _rounds(answers: list[Answer]) -> int:
    """Decode rounds of a batch whose requests started together."""
    return max(answer.num_rounds or len(answer.token_ids) - 1 for answer in answers)


def _setup(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    describe = ["git", "describe", "--always", "--dirty"]
    described = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent)
    commit = args.commit or described.stdout.strip()
    model = json.loads((Path(settings["model_path"]) / "config.json").read_text())
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {name: importlib.metadata.version(name) for name in ("sglang", "torch", "triton")}
        | {"sglang-dflash": __version__, "commit": commit},
        "shapes": {k: model[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size")},
        "weights": "random" if args.shapes else Path(args.target).name,
        **(heldout.setup(args.prompts, args.examples) if args.examples else {"prompt_tokens": args.prompt_tokens}),
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "command": "python " + " ".join(sys.argv),
    }


def _write(path: str, result: dict[str, Any]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def _print(result: dict[str, Any]) -> None:
    setup = result["setup"]
    table = Table(title=f"{setup['card']}, {setup['weights']} weights, {setup['versions']}")
    for heading in ("batch", "plain ms", "stock ms", "ours ms", "ours/stock", "acceptance", "differing requests"):
        table.add_column(heading)
    for batch, row in result["batches"].items():
        steps = {kind: row["step_ms"][kind]["median"] for kind in row["step_ms"]}
        ratio = f"{steps['ours'] / steps['stock']:.3f}" if {"ours", "stock"} <= set(steps) else "-"
        differing = "\n".join(f"{name}: {value:.3f}" for name, value in row["differing_requests"].items())
        acceptance = row["acceptance_length"].get("ours", 1.0)
        cells = [f"{steps[kind]:.3f}" if kind in steps else "-" for kind in KINDS]
        table.add_row(str(batch), *cells, ratio, f"{acceptance:.2f}", differing)
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
