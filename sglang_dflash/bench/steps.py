"""Time of a decode step and of a first token, on prompts of random tokens.

A step's time is the wall time that more tokens cost, over the decode rounds they took: prefill and start cancel out.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.bench import figures
from sglang_dflash.offline import Answer, EngineProcess

# Random token ids for prompts: plain text tokens of the tokenizers that were tried, no special ones.
PROMPT_IDS = range(1000, 20000)
FEW_TOKENS = 16


def random_prompts(seed: int, num_prompts: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Prompts of random text tokens; the same seed gives the same ones."""
    rng = random.Random(seed)
    ids = range(min(PROMPT_IDS.start, vocab_size // 2), min(PROMPT_IDS.stop, vocab_size))
    return [[rng.choice(ids) for _ in range(num_tokens)] for _ in range(num_prompts)]


def measure(
    engines: Mapping[str, EngineProcess],
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    repeats: int,
    sampling: Mapping[str, Any],
) -> dict[str, Any]:
    """Repeats of all engines in turn on one batch of prompts; each repeat starts with another engine.

    Args:
        new_tokens: of the longer answers, more than FEW_TOKENS.
        sampling: parameters besides these; greedy where they name no temperature.
    """
    names = list(engines)
    answers: dict[str, list[list[Answer]]] = {name: [] for name in names}
    step_ms: dict[str, list[float]] = {name: [] for name in names}
    tokens_per_s: dict[str, list[float]] = {name: [] for name in names}
    options: dict[str, Any] = {"ignore_eos": True, **sampling}
    inputs = [list(prompt) for prompt in prompts]
    for engine in engines.values():  # untimed: graphs, allocator, radix cache, and then prefills that find it filled
        for num_tokens in (new_tokens, FEW_TOKENS):
            engine.generate(inputs, max_new_tokens=num_tokens, **options)
    for repeat in range(repeats):
        for name in figures.turn(names, repeat):
            few, few_s = engines[name].generate(inputs, max_new_tokens=FEW_TOKENS, **options)
            many, many_s = engines[name].generate(inputs, max_new_tokens=new_tokens, **options)
            step_ms[name].append(1000 * (many_s - few_s) / (_rounds(many) - _rounds(few)))
            tokens_per_s[name].append((_tokens(many) - _tokens(few)) / (many_s - few_s))
            answers[name].append(many)
    medians = {name: round(statistics.median(values), 3) for name, values in step_ms.items()}
    print(f"batch {len(prompts)}: {medians} ms a step", file=sys.stderr, flush=True)
    result = {
        "step_ms": {name: figures.spread(values) for name, values in step_ms.items()},
        "tokens_per_s": {name: figures.spread(values) for name, values in tokens_per_s.items()},
        "acceptance_length": {name: figures.acceptance(runs) for name, runs in answers.items()},
    }
    return result if sampling else {**result, "differing_requests": figures.differing(answers)}


def first_token(
    engines: Mapping[str, EngineProcess], num_tokens: int, *, repeats: int, vocab_size: int
) -> dict[str, dict[str, Any]]:
    """Milliseconds of an answer of one token to a prompt of `num_tokens` that no radix cache holds, by engine.

    Every repeat has a prompt of its own, the same for all engines; the first one is not counted.
    """
    names = list(engines)
    wall_ms: dict[str, list[float]] = {name: [] for name in names}
    prompts = random_prompts(num_tokens, repeats + 1, num_tokens, vocab_size)
    for engine in engines.values():
        engine.generate(prompts[:1], max_new_tokens=1)
    for repeat in range(repeats):
        for name in figures.turn(names, repeat):
            _, wall_s = engines[name].generate([prompts[repeat + 1]], max_new_tokens=1)
            wall_ms[name].append(1000 * wall_s)
    return {name: figures.spread(values) for name, values in wall_ms.items()}


def _rounds(answers: Sequence[Answer]) -> int:
    """Decode rounds of a batch whose requests started together."""
    return max(answer.num_rounds or len(answer.token_ids) - 1 for answer in answers)


def _tokens(answers: Sequence[Answer]) -> int:
    return sum(len(answer.token_ids) for answer in answers)
