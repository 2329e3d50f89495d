"""Mixed traffic over a pool too small for it: nothing crashes, nothing leaks, greedy answers are plain decoding's.

Requests of all kinds join and leave, some are given up in the middle, prompts share prefixes, and running requests are
taken out of the batch because the pool is full; the test fails where that did not happen. DFLASH_SOAK_S sets the length
of each soak in seconds, and has SmolLM2 soaked on a CPU too. A new kind of request is an entry of KINDS.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from sglang_dflash import demo
from tests.engine import margins, scripted, tiny
from tests.engine.pairs import ENVIRONMENT, Pair
from tests.engine.serving import REQUEST_TIMEOUT_S, serve
from tests.engine.setup import HAS_CUDA

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3 * 3600)]

BY_HAND = "DFLASH_SOAK_S" in os.environ
SOAK_S = float(os.environ.get("DFLASH_SOAK_S", "15"))
NUM_CLIENTS = 16
PATIENCE_S = 60
MAX_NEW_TOKENS = 200
ABORTED = 0.2  # of the requests are given up in the middle
SEED = 0
GPU_GROWTH_BYTES = 64 << 20  # allocator's blocks; a leak of a row a request would pass it within minutes
# The pool is let run full, again and again: SGLang would hold requests back until the answers of those that run surely
# fit, and more so for the 600 steps after it had to take one out. Requests with `ignore_eos` it takes to get as long as
# they may, whatever it is told here: the traffic has none.
SMALL_POOL = {"schedule_conservativeness": 0.05, "chunked_prefill_size": 64}
BOLD = {"SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "10", "SGLANG_RETRACT_DECODE_STEPS": "1"}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of request.

    Attributes:
        sampling, request: its options.
        greedy: its tokens are plain decoding's, up to where it ends.
    """

    sampling: dict[str, Any]
    request: dict[str, Any] = dataclasses.field(default_factory=dict)
    greedy: bool = False


LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}
KINDS = {
    "greedy": Kind({}, greedy=True),
    "greedy with logprobs": Kind({}, {**LOGPROBS, "logprob_start_len": 0}, greedy=True),
    "stop strings": Kind({"stop": ["the"], "no_stop_trim": True}, greedy=True),
    "stop tokens": Kind({"stop_token_ids": list(range(20, 60))}, greedy=True),
    "two answers": Kind({"n": 2}, greedy=True),
    "sampled": Kind({"temperature": 0.8, "top_p": 0.9}),
    "sampled with logprobs": Kind({"temperature": 1.2}, LOGPROBS),
    "min_p": Kind({"temperature": 1.0, "min_p": 0.1, "top_k": 40}),
    "penalties": Kind({"frequency_penalty": 0.5, "presence_penalty": 0.3}),
    "sampled with penalties": Kind({"temperature": 0.9, "repetition_penalty": 1.2, "min_new_tokens": 4}),
    "bias": Kind({"logit_bias": {"40": 3.0}}),
    "grammar": Kind({"regex": "[a-z]{2,9}( [a-z]{1,9}){0,40}"}),
    "sampled with grammar": Kind(
        {"temperature": 1.0, "json_schema": '{"type": "array", "items": {"type": "integer"}}'}
    ),
}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """A server, its log, and what it may be asked: prompts by id, and plain decoding's answers to them."""

    url: str
    log: Path
    prompts: dict[str, list[int]]
    answers: dict[str, list[int]]
    margins: dict[str, list[float]]  # of the answers' tokens, in bfloat16
    parted: list[float] = dataclasses.field(default_factory=list)  # where greedy answers left plain decoding's


@pytest.fixture
def tiny_traffic(pair: Pair, tiny_models: demo.Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traffic]:
    rng = random.Random(SEED)
    shared = [[rng.randrange(len(tiny.SPECIAL), 290) for _ in range(40)] for _ in range(2)]
    prompts = {
        f"p{i}": shared[i % 2][: rng.choice([0, 10, 20, 40])]
        + [rng.randrange(len(tiny.SPECIAL), 290) for _ in range(rng.randint(1, 30))]
        for i in range(40)
    }
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": MAX_NEW_TOKENS}
    request = {"input_ids": list(prompts.values()), "return_logprob": True, "top_logprobs_num": 2}
    plain = dict(zip(prompts, pair.plain.ask({**request, "sampling_params": sampling}), strict=True))
    # A resumed request is prefilled with its answer and rounds otherwise: answers that turn on that are left out.
    answers = {rid: answer["output_ids"] for rid, answer in plain.items() if narrowest(answer) > 1e-3}
    assert len(answers) > 20
    prompts = {rid: prompts[rid] for rid in answers}
    # Holds one whole answer and a part of another.
    yield from traffic(tiny_models, tmp_path_factory.mktemp("soak"), prompts, answers, 336, ENVIRONMENT, {})


def narrowest(answer: dict[str, Any]) -> float:
    """How much more likely than the second the likeliest token was, where it was least so; in logprobs."""
    return min(first[0] - second[0] for first, second in answer["meta_info"]["output_top_logprobs"])


@pytest.fixture
def smollm2_traffic(
    models: demo.Models,
    prompt_ids: dict[str, list[int]],
    plain: dict[str, list[int]],
    plain_margins: dict[str, list[float]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Traffic]:
    prompts = {rid: ids for rid, ids in prompt_ids.items() if len(ids) < 150}
    answers = {rid: plain[rid] for rid in prompts}
    yield from traffic(
        models, tmp_path_factory.mktemp("soak"), prompts, answers, 384, {}, plain_margins if HAS_CUDA else {}
    )


def traffic(
    models: demo.Models,
    scratch: Path,
    prompts: dict[str, list[int]],
    answers: dict[str, list[int]],
    max_total_tokens: int,
    env: dict[str, str],
    margins: dict[str, list[float]],
) -> Iterator[Traffic]:
    env = {**BOLD, **env, **scripted.environment(scratch / "script.json", prompts, answers)}
    log = scratch / "log"
    with serve(models, log, env, max_total_tokens=max_total_tokens, page_size=1, **SMALL_POOL) as url:
        yield Traffic(url, log, prompts, answers, margins)


@pytest.mark.skipif(HAS_CUDA, reason="attention kernels want larger heads")
def test_soak_tiny(tiny_traffic: Traffic) -> None:
    soak(tiny_traffic)


@pytest.mark.skipif(not HAS_CUDA and not BY_HAND, reason="by hand: a round of many takes a CPU a second")
def test_soak_smollm2(smollm2_traffic: Traffic) -> None:
    soak(smollm2_traffic)


def soak(traffic: Traffic) -> None:
    for kind in KINDS.values():  # every shape of request once: what is allocated once is no leak
        ask(traffic, next(iter(traffic.prompts)), kind, "first")
    used_before = used_gpu_bytes()
    end, lock = time.monotonic() + SOAK_S, threading.Lock()
    counts: Counter[str] = Counter()
    failures: list[str] = []

    def client(number: int) -> None:
        rng = random.Random(SEED + number)
        # A slow machine takes longer until its pool is full.
        while (now := time.monotonic()) < end or (now < end + PATIENCE_S and num_retracted(traffic.log) == 0):
            rid, name = rng.choice(list(traffic.prompts)), rng.choice(list(KINDS))
            unique = f"{number}-{rng.random()}"
            if rng.random() < ABORTED:
                name, wrong = "aborted", abandon(traffic, rid, unique, by_name=rng.random() < 0.5)
            else:
                wrong = ask(traffic, rid, KINDS[name], unique)
            with lock:
                counts[name] += 1
                failures.extend(f"{name}: {told}" for told in wrong)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for future in [pool.submit(client, number) for number in range(NUM_CLIENTS)]:
            future.result()
    wait_until_idle(traffic.url)
    retracted, used_after = num_retracted(traffic.log), used_gpu_bytes()
    print(f"soak of {SOAK_S:.0f} s: {dict(counts)}, {retracted} retractions")
    print(f"GPU memory before and after: {used_before >> 20} and {used_after >> 20} MiB")
    num_greedy = sum(counts[name] for name, kind in KINDS.items() if kind.greedy)
    print(
        f"{len(traffic.parted)} answers of {num_greedy} greedy requests part from plain decoding's, where its margin "
        f"was at most {max(traffic.parted, default=0.0):.3f}"
    )
    assert not failures, f"{len(failures)} failed, among them {failures[:5]}"
    assert counts.total() > NUM_CLIENTS
    assert retracted > 0, "the pool was never full"
    assert used_after - used_before <= GPU_GROWTH_BYTES
    margins.check(traffic.parted, num_greedy)


def ask(traffic: Traffic, rid: str, kind: Kind, unique: str) -> list[str]:
    """One request; what is wrong with its answers. In bfloat16, where close calls fall otherwise, they are noted."""
    expected = traffic.answers[rid]
    length = len(expected) - len(unique) % 7 if kind.greedy else MAX_NEW_TOKENS
    sampling = {"temperature": 0, "max_new_tokens": length, **kind.sampling}
    body = {"input_ids": traffic.prompts[rid], "rid": f"{rid}@{unique}", "sampling_params": sampling, **kind.request}
    response = requests.post(f"{traffic.url}/generate", json=body, timeout=REQUEST_TIMEOUT_S)
    if response.status_code != 200:
        return [response.text]
    answers = response.json()
    wrong = []
    for answer in answers if isinstance(answers, list) else [answers]:
        said, meta = answer["output_ids"], answer["meta_info"]
        if kind.greedy and said != expected[: len(said)]:
            if rid in traffic.margins:
                margin = margins.where_parted(traffic.margins[rid], expected, said)
                assert margin is not None
                traffic.parted.append(margin)
            else:
                wrong.append(f"{rid}: expected {expected}, got {said}")
        ends = meta["finish_reason"]["type"]
        if ends not in ("length", "stop") or (len(said) == length) < (ends == "length") or len(said) > length:
            wrong.append(f"{rid}: {len(said)} tokens of {length}, {meta['finish_reason']}")
        if kind.request and len(meta["output_token_logprobs"]) != len(said):
            wrong.append(f"{rid}: {len(meta['output_token_logprobs'])} logprobs for {len(said)} tokens")
    return wrong


def abandon(traffic: Traffic, rid: str, unique: str, by_name: bool) -> list[str]:
    """Start a request and leave it in the middle: by /abort_request, or by closing the connection."""
    rid_, sampling = f"{rid}@{unique}", {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
    body = {"input_ids": traffic.prompts[rid], "rid": rid_, "stream": True, "sampling_params": sampling}
    with requests.post(f"{traffic.url}/generate", json=body, stream=True, timeout=REQUEST_TIMEOUT_S) as response:
        next(response.iter_lines())
        if by_name:
            requests.post(f"{traffic.url}/abort_request", json={"rid": rid_}, timeout=60)
            for _ in response.iter_lines():
                pass
    return []


def num_retracted(log: Path) -> int:
    """Requests that were taken out of the running batch because the pool was full."""
    return sum(map(int, re.findall(r"pool is full.*#retracted_reqs: (\d+)", log.read_text(errors="replace"))))


def used_gpu_bytes() -> int:
    """GPU memory of the processes that this one started, the servers' schedulers among them.

    A container may hide processes from NVML, or number them otherwise: then all that is in use on the card.
    """
    if not HAS_CUDA:
        return 0
    import pynvml

    pynvml.nvmlInit()
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
    used = [process.usedGpuMemory for process in running if process.pid in ours]
    return sum(used) if used else int(pynvml.nvmlDeviceGetMemoryInfo(card).used)


def wait_until_idle(url: str) -> None:
    """An idle server checks that all of its KV slots are accounted for and ends if not; flushing needs idleness."""
    deadline = time.monotonic() + 120
    while requests.post(f"{url}/flush_cache", timeout=60).status_code != 200:
        assert time.monotonic() < deadline, "the server is still busy"
        time.sleep(1)
    time.sleep(3)
    assert requests.get(f"{url}/health_generate", timeout=120).status_code == 200
