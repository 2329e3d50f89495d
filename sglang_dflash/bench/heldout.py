"""Real generation: every engine in turn answers the same prompts to their natural end.

A repeat of one engine answers all prompts in chunks of the batch size, each chunk one generate call that waits for its
longest answer. Before the first timed call every engine answers all prompts, so that each finds the same prompts in its
radix cache: what is timed is decoding, with a prefill of one token a request.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dflash.bench import figures
from sglang_dflash.bench.columns import Column
from sglang_dflash.bench.setup import SPARE_TOKENS
from sglang_dflash.offline import Answer, EngineProcess, generate_in_batches
from sglang_dflash.train import dataset, engine_evaluation, evaluate

DEMO = "demo"  # in the place of a file: the demo's prompts


def choose(prompts: str, num_prompts: int | None, target: str) -> list[dataset.Example]:
    """`num_prompts` examples of a data file's held-out ones, or of the demo's prompts.

    A file's are spread as evenly over the families as their sizes allow; families take turns. None means 64 of a file,
    all of the demo's. Raises ValueError where the file is broken or holds too few.
    """
    if prompts == DEMO:
        turns = _demo_examples(target)
        default = len(turns)
    else:
        queues = list(engine_evaluation.heldout_by_family(Path(prompts)).values())
        turns = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
        default = 64
    wanted = default if num_prompts is None else num_prompts
    if len(turns) < wanted:
        raise ValueError(f"{prompts}: expected {wanted} held-out prompts, got {len(turns)}; lower --num-prompts")
    return turns[:wanted]


def _demo_examples(target: str) -> list[dataset.Example]:
    from sglang_dflash import demo

    return [dataset.Example(DEMO, "heldout", ids, []) for ids in demo.prompt_ids(target)]


def engine_arguments(examples: Sequence[dataset.Example], batches: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """A KV pool that keeps every prompt cached, and decode graphs for a batch whose requests end one by one."""
    longest = max(len(example.prompt_ids) for example in examples) + new_tokens + SPARE_TOKENS
    powers = {2**i for i in range(max(batches).bit_length())}
    return {
        "max_total_tokens": (len(examples) + max(batches)) * longest,
        "cuda_graph_bs_decode": sorted({*batches, *(power for power in powers if power < max(batches))}),
    }


def describe(prompts: str, examples: Sequence[dataset.Example]) -> dict[str, Any]:
    """What the prompts were."""
    families = [example.family for example in examples]
    return {
        "prompts": Path(prompts).name,
        "num_prompts": len(examples),
        "families": {name: families.count(name) for name in sorted(set(families))},
        "mean_prompt_tokens": statistics.mean(len(example.prompt_ids) for example in examples),
    }


def measure(
    engines: Mapping[str, EngineProcess],
    columns: Sequence[Column],
    examples: Sequence[dataset.Example],
    batch: int,
    *,
    new_tokens: int,
    repeats: int,
    widths: Mapping[str, int],
    sampling: Mapping[str, Any],
) -> dict[str, Any]:
    """Repeats of all engines in turn at one batch size; each repeat starts with another engine.

    Args:
        widths: tokens that each speculative column's engine verifies a round, anchor included.
        sampling: parameters of the requests; greedy where they name no temperature.
    """
    names = list(engines)
    answers: dict[str, list[list[Answer]]] = {name: [] for name in names}
    tokens_per_s: dict[str, list[float]] = {name: [] for name in names}
    prompts = [example.prompt_ids for example in examples]
    options = {"max_new_tokens": new_tokens, **sampling}
    for engine in engines.values():  # this batch size, untimed
        generate_in_batches(engine, prompts[:batch], batch, **options)
    for repeat in range(repeats):
        for name in figures.turn(names, repeat):
            answered, wall_s = generate_in_batches(engines[name], prompts, batch, **options)
            answers[name].append(answered)
            tokens_per_s[name].append(sum(len(answer.token_ids) for answer in answered) / wall_s)
            print(f"batch {batch}, {name}: {tokens_per_s[name][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in tokens_per_s.items()}
    ours = [column.name for column in columns if column.kind == "ours"]
    others = [column.name for column in columns if column.kind != "ours"]
    families = [example.family for example in examples]
    result: dict[str, Any] = {
        "tokens_per_s": {name: figures.spread(values) for name, values in tokens_per_s.items()},
        "speedup": {f"{name}/{other}": medians[name] / medians[other] for name in ours for other in others},
        "acceptance_length": {name: figures.acceptance(runs) for name, runs in answers.items()},
        # The repeats answer the same prompts: one of them is what an interval can be drawn from.
        "acceptance": {
            name: dataclasses.asdict(evaluate.evaluate_answers(answers[name][0], families, width))
            for name, width in widths.items()
        },
        "mean_answer_tokens": {
            name: statistics.mean(len(answer.token_ids) for run in runs for answer in run)
            for name, runs in answers.items()
        },
        "cut_short": {name: _cut_short(runs) for name, runs in answers.items()},
    }
    return result if sampling else {**result, "differing_requests": figures.differing(answers)}


def _cut_short(runs: Sequence[Sequence[Answer]]) -> float:
    """Fraction of answers that --new-tokens ended."""
    reasons = [answer.meta["finish_reason"]["type"] for run in runs for answer in run]
    return reasons.count("length") / len(reasons)
