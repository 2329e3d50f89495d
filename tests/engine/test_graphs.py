"""Request options where a round's passes are CUDA graphs: answers are plain decoding's, and so are their logprobs.

A graph chooses the argmax of 16-bit logits itself; a round in which any request wants more of them makes float32 of
the same numbers. In bfloat16 a verified block and a decoded token round differently, so a close call may fall
otherwise: the tests tell how many answers part.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_dflash import demo
from sglang_dflash.offline import Answer, EngineProcess
from tests.engine import margins, scripted
from tests.engine.serving import generate, serve
from tests.engine.setup import NUM_NEW_TOKENS, engine

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"repetition_penalty": 1.3, "min_new_tokens": 30},
    {"logit_bias": {"284": 4.0, "30": -6.0}},
    {"regex": "[a-z]{3,9}( [a-z]{1,9}){12,40}", "ignore_eos": False},
)
REPLAYED = "A round's passes are replayed by sglang-dflash"
ROUNDING = 0.15  # of a logprob
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3}


@dataclasses.dataclass(frozen=True)
class Engines:
    """Plain decoding and ours beside each other; ours follows the script."""

    plain: EngineProcess
    ours: EngineProcess
    script: Path


@pytest.fixture(
    scope="module",
    params=[{}, {"page_size": 16, "disable_overlap_schedule": True}],
    ids=["overlap", "page16-sync"],
)
def engines(
    request: pytest.FixtureRequest, models: demo.Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    scratch = tmp_path_factory.mktemp("graphs")
    env = scripted.following(scratch / "script.json", {})
    with (
        engine("plain", models, scratch / "plain", **request.param) as plain,
        engine("ours", models, scratch / "ours", env, log_level="info", **request.param) as ours,
    ):
        assert REPLAYED in (scratch / "ours").read_text()
        yield Engines(plain, ours, scratch / "script.json")


@pytest.mark.parametrize(
    ("options", "request_options"),
    [(OPTIONS[:1], {}), (OPTIONS, {}), (OPTIONS, LOGPROBS)],
    ids=["plain", "mixed", "mixed with logprobs"],
)
def test_options_in_captured_rounds(
    engines: Engines,
    prompt_ids: dict[str, list[int]],
    options: tuple[dict[str, Any], ...],
    request_options: dict[str, Any],
) -> None:
    """One batch, padded to a captured size, with drafts of every accepted length."""
    short = {rid: ids for rid, ids in prompt_ids.items() if len(ids) < 150}
    named = itertools.product(short, enumerate(options))
    # Of 24 that a graph holds.
    each = {f"{rid}-{i}": (short[rid], own) for rid, (i, own) in itertools.islice(named, 23)}
    prompts = {rid: ids for rid, (ids, _) in each.items()}
    call: dict[str, Any] = {
        "each": [own for _, own in each.values()],
        "max_new_tokens": NUM_NEW_TOKENS,
        "ignore_eos": True,
        "request": request_options,
    }
    expected, _ = engines.plain.generate(list(prompts.values()), **call | {"request": LOGPROBS})
    answers = dict(zip(prompts, (answer.token_ids for answer in expected), strict=True))
    scripted.environment(engines.script, prompts, answers)
    got, _ = engines.ours.generate(list(prompts.values()), rids=list(prompts), **call)
    rids = list(prompts)
    assert sum(answer.num_rounds for answer in got) < 0.5 * sum(len(answer.token_ids) for answer in got)
    parted = {
        rid: margins.where_parted(margins.of(one.meta["output_top_logprobs"]), one.token_ids, other.token_ids)
        for rid, one, other in zip(rids, expected, got, strict=True)
        if one.token_ids != other.token_ids
    }
    print(f"bfloat16: {len(parted)} of {len(rids)} requests part from plain decoding, with its margin there: {parted}")
    margins.check([margin for margin in parted.values() if margin is not None], len(rids))
    assert None not in parted.values(), "an answer ends early"
    if request_options:
        for rid, one, other in zip(rids, expected, got, strict=True):
            assert farthest(one, other) < ROUNDING, rid


def farthest(one: Answer, other: Answer) -> float:
    """The largest difference between the logprobs of two answers, of the tokens that they share and before."""
    pairs = zip(one.meta["output_token_logprobs"], other.meta["output_token_logprobs"], strict=False)
    shared = itertools.takewhile(lambda pair: pair[0][1] == pair[1][1], pairs)
    return max((abs(left[0] - right[0]) for left, right in shared), default=0.0)


def test_a_server_that_slept_or_captured_anew_says_the_same(
    models: demo.Models,
    prompt_ids: dict[str, list[int]],
    plain: dict[str, list[int]],
    plain_margins: dict[str, list[float]],
    tmp_path: Path,
) -> None:
    """Asleep it gives its memory back; and weights that arrive may have the target's graphs captured once more.

    What is asked last goes on from near an answer's end, and all before is cached: a pass before a capture that wrote
    where the last rounds did would have written there.
    """
    short = {rid: ids for rid, ids in prompt_ids.items() if len(ids) < 150}
    late = NUM_NEW_TOKENS - 2
    env = scripted.environment(tmp_path / "script.json", short, {rid: plain[rid] for rid in short})
    memory = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    with serve(models, tmp_path / "log", env, page_size=1, log_level="info", **memory) as url:
        assert REPLAYED in (tmp_path / "log").read_text()

        def tell(path: str, **body: Any) -> None:
            answer = requests.post(f"{url}/{path}", json=body, timeout=300)
            assert answer.status_code == 200, answer.text

        def ask(when: str, at: int) -> None:
            with ThreadPoolExecutor(len(short)) as pool:
                waiting = {
                    rid: pool.submit(generate, url, ids + plain[rid][:at], f"{rid}@{when}", NUM_NEW_TOKENS - at)
                    for rid, ids in short.items()
                }
            said = {rid: future.result()["output_ids"] for rid, future in waiting.items()}
            found = [margins.where_parted(plain_margins[rid][at:], plain[rid][at:], said[rid]) for rid in short]
            parted = [margin for margin in found if margin is not None]
            print(f"{when}: {len(parted)} of {len(short)} answers part, where plain decoding's margin was {parted}")
            margins.check(parted, len(short))

        ask("at first", 0)
        ask("at first, from near the end", late)
        tell("release_memory_occupation")
        tell("resume_memory_occupation")
        ask("after sleep", 0)
        weights = {"model_path": str(models.target), "recapture_cuda_graph": True, "flush_cache": False}
        tell("update_weights_from_disk", **weights)
        ask("after a new capture, from near the end", late)
