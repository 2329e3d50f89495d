"""DFlash commits, token for token, what plain greedy decoding of the same engine would have said.

With scripted drafts every accepted length from 0 to K-1 occurs, differently in each request of a batch; with a
drafter of random weights almost nothing is accepted. On a CPU everything runs in float32. On a GPU it runs
in bfloat16, where a verified block and a decoded token may round differently: there the tests are run by hand and tell
the rate.

DFLASH_LOSSLESS=full runs all prompts and engines (hours on two cores).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import demo
from sglang_dflash.offline import Answer, EngineProcess
from tests.engine import scripted
from tests.engine.setup import FULL, HAS_CUDA, NUM_NEW_TOKENS, engine

pytestmark = pytest.mark.engine

BLOCK_SIZE = 16
ENGINES: dict[str, dict[str, Any]] = {
    "page1-radix-overlap": {"page_size": 1, "chunked_prefill_size": 128},
    "page16-no_radix-sync": {
        "page_size": 16,
        "chunked_prefill_size": 128,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
    },
}
if FULL:
    ENGINES |= {
        "page1-no_radix-overlap": {"page_size": 1, "chunked_prefill_size": 128, "disable_radix_cache": True},
        "page16-radix-overlap": {"page_size": 16, "chunked_prefill_size": 128},
        "page1-radix-unchunked": {"page_size": 1},
    }


@pytest.fixture(params=list(ENGINES))
def scripted_engine(
    request: pytest.FixtureRequest,
    models: demo.Models,
    prompt_ids: dict[str, list[int]],
    plain: dict[str, list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    scratch = tmp_path_factory.mktemp(request.param)
    env = scripted.environment(scratch / "script.json", prompt_ids, plain)
    with engine("ours", models, scratch / "log", env, **ENGINES[request.param]) as started:
        yield started


def assert_same(answers: list[Answer], plain: dict[str, list[int]]) -> None:
    differing = [
        rid for (rid, tokens), answer in zip(plain.items(), answers, strict=True) if answer.token_ids != tokens
    ]
    if HAS_CUDA:
        print(f"bfloat16: {len(differing)} of {len(plain)} requests differ from plain decoding: {differing}")
        assert not [rid for rid in differing if not rid.startswith("long")], "rounding shows in long prompts alone"
    else:
        assert not differing, f"answers differ from plain decoding: {differing}"


def test_scripted_drafts_of_every_length(
    scripted_engine: EngineProcess, prompt_ids: dict[str, list[int]], plain: dict[str, list[int]]
) -> None:
    answers, _ = scripted_engine.generate(
        list(prompt_ids.values()), rids=list(prompt_ids), max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True
    )
    assert_same(answers, plain)
    histogram = [0] * BLOCK_SIZE
    for answer in answers:
        for length, count in enumerate(answer.accepted_histogram):
            histogram[length] += count
    if not HAS_CUDA:
        assert all(histogram), f"every accepted length occurs: {histogram}"
        for index, (rid, answer) in enumerate(zip(plain, answers, strict=True)):
            assert answer.num_rounds == expected_rounds(index, plain[rid]), rid


def expected_rounds(index: int, answer: list[int]) -> int:
    """Rounds that the planted mistakes allow: prefill gives one token, each round its right drafts and one more."""
    at = num_rounds = 0
    while at < len(answer) - 1:
        at += min(scripted.planted(index, at, BLOCK_SIZE), len(answer) - 1 - at) + 1
        num_rounds += 1
    return num_rounds


@pytest.mark.skipif(not (FULL or HAS_CUDA), reason="on a CPU test_drafter_oracle.py has a trained drafter")
def test_real_drafter(
    models: demo.Models, prompt_ids: dict[str, list[int]], plain: dict[str, list[int]], tmp_path: Path
) -> None:
    num_tokens = NUM_NEW_TOKENS if FULL else 12
    chosen = prompt_ids if FULL else dict(list(prompt_ids.items())[:5])
    with engine("ours", models, tmp_path / "log", page_size=1, chunked_prefill_size=128) as started:
        answers, _ = started.generate(list(chosen.values()), max_new_tokens=num_tokens, ignore_eos=True)
        info = started.call("get_server_info")
    assert_same(answers, {rid: plain[rid][:num_tokens] for rid in chosen})
    assert all(answer.num_rounds > 0 for answer in answers)
    assert info["internal_states"][0]["speculative_worker"].startswith("sglang_dflash.worker.DFlashWorker")


def test_requests_that_fill_the_context(
    models: demo.Models, prompt_ids: dict[str, list[int]], plain: dict[str, list[int]], tmp_path: Path
) -> None:
    """Two side by side, page size 1: neither writes into the other's row, and an idle server misses no slot."""
    rid, num_tokens = "short-0", 24
    prompt = prompt_ids[rid]
    env = scripted.environment(tmp_path / "script.json", prompt_ids, plain)
    context_length = len(prompt) + num_tokens
    with engine("ours", models, tmp_path / "log", env, page_size=1, context_length=context_length) as started:
        answers, _ = started.generate(
            [prompt, prompt], rids=[rid, f"{rid}@2"], max_new_tokens=num_tokens, ignore_eos=True
        )
        # SGLang keeps two positions of the context for itself.
        assert_same(answers, {key: plain[rid][: num_tokens - 2] for key in (rid, f"{rid}@2")})
        time.sleep(3)  # an idle server accounts for every slot, and ends where one is missing
        again, _ = started.generate([prompt], rids=[f"{rid}@3"], max_new_tokens=4, ignore_eos=True)
        assert_same(again, {rid: plain[rid][:4]})
