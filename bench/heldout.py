"""Real generation: every engine in turn answers held-out prompts of `sglang-dflash train data` to their natural end.

A repeat of one engine answers all prompts in chunks of the batch size, each chunk one generate call that waits for its
longest answer. Before the first timed call every engine answers all prompts once, so that each finds the same prompts
in its radix cache: what is timed is decoding, with a prefill of one token a request.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

import figures
from rich.console import Console
from rich.table import Table

from sglang_dflash.offline import Answer, EngineProcess
from sglang_dflash.train import dataset, engine_evaluation, evaluate


def choose(file: Path, num_prompts: int) -> list[dataset.Example]:
    """`num_prompts` held-out examples, spread as evenly over the families as their sizes allow; families take turns.

    Raises ValueError where the file is broken or holds too few.
    """
    queues = list(engine_evaluation.heldout_by_family(file).values())
    num_heldout = sum(map(len, queues))
    if num_heldout < num_prompts:
        raise ValueError(f"{file}: expected {num_prompts} held-out prompts, got {num_heldout}; lower --num-prompts")
    turns = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    return turns[:num_prompts]


def engine_settings(examples: list[dataset.Example], batches: list[int], new_tokens: int) -> dict[str, Any]:
    """A KV pool that keeps every prompt cached, and decode graphs for a batch whose requests end one by one."""
    longest = max(len(example.prompt_ids) for example in examples) + new_tokens + engine_evaluation.SPARE_TOKENS
    powers = {2**i for i in range(max(batches).bit_length())}
    return {
        "max_total_tokens": (len(examples) + max(batches)) * longest,
        "cuda_graph_bs_decode": sorted({*batches, *(power for power in powers if power < max(batches))}),
    }


def setup(file: Path, examples: list[dataset.Example]) -> dict[str, Any]:
    """What the prompts were."""
    families = [example.family for example in examples]
    return {
        "prompts": file.name,
        "num_prompts": len(examples),
        "families": {name: families.count(name) for name in sorted(set(families))},
        "mean_prompt_tokens": statistics.mean(len(example.prompt_ids) for example in examples),
    }


def warm_up(engines: dict[str, EngineProcess], examples: list[dataset.Example], batch: int, new_tokens: int) -> None:
    """One untimed pass: graphs, allocator, radix cache."""
    for kind, engine in engines.items():
        print(f"warming up {kind}", file=sys.stderr, flush=True)
        _answer_all(engine, examples, batch, new_tokens)


def measure(
    engines: dict[str, EngineProcess],
    examples: list[dataset.Example],
    batch: int,
    *,
    new_tokens: int,
    repeats: int,
    width: int,
) -> dict[str, Any]:
    """Repeats of all engines in turn at one batch size; each repeat starts with another engine.

    Args:
        width: tokens that a DFlash engine verifies a round, anchor included.
    """
    kinds = list(engines)
    answers: dict[str, list[list[Answer]]] = {kind: [] for kind in kinds}
    tokens_per_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    for engine in engines.values():  # this batch size, untimed
        _answer_all(engine, examples[:batch], batch, new_tokens)
    for repeat in range(repeats):
        first = repeat % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            answered, wall_s = _answer_all(engines[kind], examples, batch, new_tokens)
            answers[kind].append(answered)
            tokens_per_s[kind].append(sum(len(answer.token_ids) for answer in answered) / wall_s)
            print(f"batch {batch}, {kind}: {tokens_per_s[kind][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
    medians = {kind: statistics.median(values) for kind, values in tokens_per_s.items()}
    result: dict[str, Any] = {
        "tokens_per_s": {kind: figures.spread(values) for kind, values in tokens_per_s.items()},
        "speedup": {},
        "acceptance_length": {kind: figures.acceptance(runs) for kind, runs in answers.items()},
        "differing_requests": figures.differing(answers),
        "mean_answer_tokens": {
            kind: statistics.mean(len(answer.token_ids) for run in runs for answer in run)
            for kind, runs in answers.items()
        },
        "cut_short": {kind: _cut_short(runs) for kind, runs in answers.items()},
    }
    if "ours" in kinds:
        others = [kind for kind in kinds if kind != "ours"]
        result["speedup"] = {f"ours/{kind}": medians["ours"] / medians[kind] for kind in others}
        families = [example.family for example in examples]
        # The repeats answer the same prompts: one of them is what an interval can be drawn from.
        evaluation = evaluate.evaluate_answers(answers["ours"][0], families, width)
        result["acceptance_ours"] = dataclasses.asdict(evaluation)
    return result


def _answer_all(
    engine: EngineProcess, examples: list[dataset.Example], batch: int, new_tokens: int
) -> tuple[list[Answer], float]:
    """Answers to all prompts and the seconds of the calls; the last chunk may be smaller."""
    answers, seconds = [], 0.0
    for start in range(0, len(examples), batch):
        prompts = [example.prompt_ids for example in examples[start : start + batch]]
        chunk, wall_s = engine.generate(prompts, max_new_tokens=new_tokens)
        answers += chunk
        seconds += wall_s
    return answers, seconds


def _cut_short(runs: list[list[Answer]]) -> float:
    """Fraction of answers that --new-tokens ended."""
    reasons = [answer.meta["finish_reason"]["type"] for run in runs for answer in run]
    return reasons.count("length") / len(reasons)


def print_table(result: dict[str, Any]) -> None:
    setup = result["setup"]
    title = f"{setup['card']}, {setup['weights']}, {setup['num_prompts']} prompts of {setup['prompts']}"
    table = Table(title=f"{title}, {setup['versions']}")
    kinds = list(next(iter(result["batches"].values()))["tokens_per_s"])
    headings = ["batch", *(f"{kind} tokens/s" for kind in kinds), "speed-up", "acceptance", "differing requests"]
    for heading in headings:
        table.add_column(heading)
    for batch, row in result["batches"].items():
        cells = [f"{row['tokens_per_s'][kind]['median']:.1f}" for kind in kinds]
        speedups = "\n".join(f"{name}: {value:.2f}x" for name, value in row["speedup"].items())
        lengths = {kind: row["acceptance_length"][kind] for kind in kinds if kind != "plain"}
        if "acceptance_ours" in row:
            lengths |= {name: family["length"] for name, family in row["acceptance_ours"]["families"].items()}
        acceptance = "\n".join(f"{name}: {length:.2f}" for name, length in lengths.items())
        differing = "\n".join(f"{name}: {value:.3f}" for name, value in row["differing_requests"].items())
        table.add_row(str(batch), *cells, speedups, acceptance, differing)
    Console(width=150).print(table)
