"""`sglang-dflash bench profile`: one decode round by stage, ours beside SGLang's built-in worker.

The time of a step is taken first, without a profiler. Then each engine answers once more under PyTorch's profiler, with
the stages of its worker marked. Kernels take as long there as ever; the host does not, so what the device idles in a
step is the step's time less the time the device was busy.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_dflash import config
from sglang_dflash.bench import columns as bench_columns
from sglang_dflash.bench import floor, setup, steps, tables, trace
from sglang_dflash.bench.columns import Column
from sglang_dflash.cpu import bootstrap
from sglang_dflash.offline import EngineProcess


def add_arguments(parser: argparse.ArgumentParser) -> None:
    setup.add_model_arguments(parser)
    parser.set_defaults(batches=[1])
    parser.add_argument("--kinds", help="stock,ours; on a CPU ours alone")
    parser.add_argument("--config", metavar="JSON", help="the plugin's settings for ours")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=JSON", help="another column of ours")
    parser.add_argument("--repeats", type=int, default=5, help="of the step's time without a profiler")
    parser.add_argument("--new-tokens", type=int, default=144, metavar="N", help="of an answer under the profiler too")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="keep the profiler's files here")


def main(args: argparse.Namespace) -> int:
    """Measure, print and write; 1 where an engine failed.

    Raises ValueError for a mistake of the user's, one that an engine found among them.
    """
    columns = bench_columns.of(args.kinds or ("ours" if bootstrap.wanted() else "stock,ours"), args.config, args.ours)
    if any(column.kind == "plain" for column in columns):
        raise ValueError("--kinds: expected stock and ours, got plain, which has no such stages; leave it out")
    if args.new_tokens <= steps.FEW_TOKENS or args.repeats < 1:
        least = f"--new-tokens of more than {steps.FEW_TOKENS} and --repeats of at least 1"
        raise ValueError(f"expected {least}, got {args.new_tokens} and {args.repeats}; raise them")
    setup.check_model_arguments(args)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arguments = setup.engine_arguments(args, scratch, args.prompt_tokens + args.new_tokens)
        arguments |= setup.user_arguments(args.engine)
        described = {"new_tokens": args.new_tokens, "repeats": args.repeats, "prompt_tokens": args.prompt_tokens}
        result = {"setup": setup.describe(args, columns, arguments) | described}
        result["floor"] = floor.measure(args, Path(arguments["speculative_draft_model_path"]), arguments["dtype"])
        try:
            _run(args, columns, arguments, args.traces or scratch, result)
        except RuntimeError as error:
            # The engine's failure with its log's path and end.
            Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)
            return 1
    tables.show(tables.rounds(result))
    return 0


def _run(
    args: argparse.Namespace, columns: Sequence[Column], arguments: dict[str, Any], traces: Path, result: dict[str, Any]
) -> None:
    """Fill in every batch size; written after each."""
    vocab_size = setup.model_config(args)["vocab_size"]
    variables = {column.name: _variables(column) for column in columns}
    forced = args.forced_acceptance
    result["batches"] = {}
    with bench_columns.engines(columns, args.logs, arguments, forced_acceptance=forced, variables=variables) as engines:
        for batch in args.batches:
            prompts = steps.random_prompts(setup.SEED + batch, batch, args.prompt_tokens, vocab_size)
            row = steps.measure(engines, prompts, new_tokens=args.new_tokens, repeats=args.repeats, sampling={})
            row["rounds"] = {}
            for name, engine in engines.items():
                folder = (traces / f"{name}-batch{batch}").absolute()
                row["rounds"][name] = dataclasses.asdict(_profiled(engine, prompts, args.new_tokens, folder))
            result["batches"][batch] = row
            if args.out:
                setup.write(args.out, result)


def _variables(column: Column) -> dict[str, str]:
    """Mark the stages; for the built-in worker the plugin is loaded to do that, and for nothing else."""
    variables = {config.RANGES_VARIABLE: column.kind}
    return variables | (
        {"SGLANG_PLUGINS": "sglang_dflash", config.STRICT_VARIABLE: "1"} if column.kind == "stock" else {}
    )


def _profiled(
    engine: EngineProcess, prompts: Sequence[Sequence[int]], new_tokens: int, folder: Path
) -> trace.Breakdown:
    """One call under the profiler; its trace stays in `folder`."""
    print(f"profiling into {folder}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.glob("*.trace.json.gz"))
    activities = ["CPU"] if bootstrap.wanted() else ["CPU", "GPU"]
    engine.call("start_profile", output_dir=str(folder), activities=activities, with_stack=False, record_shapes=False)
    engine.generate([list(prompt) for prompt in prompts], max_new_tokens=new_tokens, ignore_eos=True)
    engine.call("stop_profile")
    [file] = [path for path in set(folder.glob("*.trace.json.gz")) - before if "TP-0" in path.name]
    return trace.read(file)
