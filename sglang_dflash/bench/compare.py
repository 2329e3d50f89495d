"""`sglang-dflash bench compare`: plain decoding, SGLang's built-in DFLASH worker and ours on one card.

All engines stand side by side and are measured in turn, so that the card's state is the same for all. Correctness comes
first: where ours does not say what plain decoding says, no time is taken.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_dflash import checkpoint
from sglang_dflash.bench import columns as bench_columns
from sglang_dflash.bench import correctness, heldout, setup, steps, tables
from sglang_dflash.bench.columns import Column
from sglang_dflash.bench.correctness import Check
from sglang_dflash.offline import EngineProcess, precision

# Requests of each size, and tokens of an answer, of the check on random prompts.
MIN_CHECKED = 8
MAX_CHECKED_TOKENS = 256
_SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    setup.add_model_arguments(parser)
    parser.add_argument("--kinds", help=f"{','.join(bench_columns.KINDS)}; on a CPU without stock")
    parser.add_argument("--config", metavar="JSON", help="the plugin's settings for ours")
    parser.add_argument(
        "--ours",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='another column of ours with these settings; {"engine": {...}} in it: arguments of sglang.Engine',
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=144, metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="of the random prompts")
    parser.add_argument(
        "--prompts",
        metavar="FILE|demo",
        help="answer the held-out prompts of `sglang-dflash train data`, or the demo's",
    )
    parser.add_argument("--num-prompts", type=int, metavar="N", help="held-out prompts, spread over the families")
    parser.add_argument("--ttft", type=setup.integers, default=[], metavar="N,N", help="prompt lengths: first token")
    parser.add_argument(
        "--unforced-check", action="store_true", help="with --forced-acceptance: check with unforced engines first"
    )
    for name, kind in _SAMPLING.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help="sample the timed answers")


def main(args: argparse.Namespace) -> int:
    """Check, measure, print and write; 1 where the check or an engine failed.

    Raises ValueError for a mistake of the user's, one that an engine found among them.
    """
    columns = _columns(args)
    setup.check_model_arguments(args)
    examples = heldout.choose(args.prompts, args.num_prompts, args.target) if args.prompts else []
    if examples and len(examples) < max(args.batches):
        raise ValueError(f"--num-prompts: expected at least the largest batch, got {len(examples)}; raise it")
    with tempfile.TemporaryDirectory() as scratch:
        arguments = _engine_arguments(args, Path(scratch), examples)
        result = {"setup": setup.describe(args, columns, arguments) | _describe(args, examples)}
        try:
            check = _Comparison(args, columns, arguments, examples, result).run()
        except RuntimeError as error:
            # The engine's failure with its log's path and end.
            Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)
            return 1
    if check.passed is False:
        print(f"the check failed, no time was taken: {check.says}", file=sys.stderr)
        if args.out:
            failed = args.out.with_suffix(".failed.json")
            setup.write(failed, result)
            print(f"{failed} says where answers part", file=sys.stderr)
        return 1
    tables.show(tables.comparison(result))
    return 0


def _columns(args: argparse.Namespace) -> list[Column]:
    columns = bench_columns.of(args.kinds, args.config, args.ours)
    least = {"repeats": 1, "new_tokens": 1 if args.prompts else steps.FEW_TOKENS + 1, "prompt_tokens": 1}
    for name, minimum in least.items():
        if getattr(args, name) < minimum:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}: expected at least {minimum}, got {getattr(args, name)}; raise it")
    if args.prompts and (args.shapes or args.forced_acceptance):
        reason = "random weights" if args.shapes else "forced acceptance"
        raise ValueError(f"--prompts: expected real answers, got {reason}, which answers nothing; leave one out")
    if _sampling(args) and not args.temperature:
        raise ValueError("--top-p, --top-k, --min-p: expected --temperature with them, got none; add it")
    if args.unforced_check and not args.forced_acceptance:
        raise ValueError("--unforced-check: expected --forced-acceptance with it, got none; leave it out")
    return columns


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Parameters of the timed requests; empty for greedy ones."""
    given = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
    return {} if given == {"temperature": 0} else given


def _engine_arguments(args: argparse.Namespace, scratch: Path, examples: Sequence[Any]) -> dict[str, Any]:
    arguments = setup.engine_arguments(args, scratch, args.prompt_tokens + args.new_tokens, max(args.ttft, default=0))
    if examples:
        own = heldout.engine_arguments(examples, args.batches, args.new_tokens)
        own["max_total_tokens"] = max(own["max_total_tokens"], arguments["max_total_tokens"])
        arguments |= {key: value for key, value in own.items() if key in arguments}
    return arguments | setup.user_arguments(args.engine)


def _describe(args: argparse.Namespace, examples: Sequence[Any]) -> dict[str, Any]:
    prompts = heldout.describe(args.prompts, examples) if examples else {"prompt_tokens": args.prompt_tokens}
    return {**prompts, "sampling": _sampling(args), "new_tokens": args.new_tokens, "repeats": args.repeats}


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """One run of the command.

    Attributes:
        arguments: of `sglang.Engine`, for all columns.
        examples: prompts to answer; none for random ones.
        result: filled as it goes; nothing but the check where that failed.
    """

    args: argparse.Namespace
    columns: Sequence[Column]
    arguments: dict[str, Any]
    examples: Sequence[Any]
    result: dict[str, Any]

    def run(self) -> Check:
        """Check, then measure."""
        forced, check = self.args.forced_acceptance, None
        if forced is not None and not self.args.unforced_check:
            check = correctness.skipped(
                "forced acceptance makes the output meaningless (--unforced-check checks first)"
            )
        elif forced is not None:
            with bench_columns.engines(self.columns, self.args.logs / "check", self.arguments) as engines:
                check = self._check(engines)
        if check is not None:
            self.result["check"] = check.to_json()
            if check.passed is False:
                return check
        with bench_columns.engines(self.columns, self.args.logs, self.arguments, forced_acceptance=forced) as engines:
            check = check or self._check(engines)
            self.result["check"] = check.to_json()
            if check.passed is not False:
                print(check.says, file=sys.stderr)
                self._measure(engines)
        return check

    @property
    def _vocab_size(self) -> int:
        return int(setup.model_config(self.args)["vocab_size"])

    def _check(self, engines: dict[str, EngineProcess]) -> Check:
        args, dtype = self.args, self.arguments.get("dtype", precision()["dtype"])
        # Passes of each size: theirs are other graphs, and of few rows other kernels.
        sizes = sorted({*args.batches})
        if self.examples:
            new_tokens, prompts = args.new_tokens, {n: [one.prompt_ids for one in self.examples] for n in sizes}
        else:
            new_tokens = min(args.new_tokens, MAX_CHECKED_TOKENS)
            prompts = {
                n: steps.random_prompts(setup.SEED + n, max(MIN_CHECKED, n), args.prompt_tokens, self._vocab_size)
                for n in sizes
            }
        return correctness.check(
            engines, self.columns, prompts, new_tokens=new_tokens, ignore_eos=not self.examples, dtype=dtype
        )

    def _measure(self, engines: dict[str, EngineProcess]) -> None:
        """Every batch size, then first tokens; the result is written after each, for a run that is cut short."""
        args, result = self.args, self.result
        options: dict[str, Any] = {"new_tokens": args.new_tokens, "repeats": args.repeats, "sampling": _sampling(args)}
        result["batches"], result["ttft_ms"] = {}, {}
        for batch in args.batches:
            if self.examples:
                widths = {c.name: self._width(c) for c in self.columns if c.kind != "plain"}
                row = heldout.measure(engines, self.columns, self.examples, batch, widths=widths, **options)
            else:
                prompts = steps.random_prompts(setup.SEED + batch, batch, args.prompt_tokens, self._vocab_size)
                row = steps.measure(engines, prompts, **options)
            result["batches"][batch] = row
            self._write()
        for num_tokens in args.ttft:
            row = steps.first_token(engines, num_tokens, repeats=args.repeats, vocab_size=self._vocab_size)
            result["ttft_ms"][num_tokens] = row
            self._write()

    def _write(self) -> None:
        if self.args.out:
            setup.write(self.args.out, self.result)

    def _width(self, column: Column) -> int:
        """Tokens that a speculative column's engine verifies a round, anchor included."""
        asked = {**self.arguments, **column.engine}.get("speculative_num_draft_tokens")
        return int(asked or checkpoint.read_config(self.args.drafter).block_size)
