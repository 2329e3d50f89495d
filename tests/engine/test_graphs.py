"""Request options where a round's passes are CUDA graphs: answers are plain decoding's, and so are their logprobs.

A graph chooses the argmax of 16-bit logits itself; a round in which any request wants more of them makes float32 of
the same numbers. In bfloat16 a verified block and a decoded token may round differently, so that a close call falls
otherwise: the tests tell how many answers part. With SGLang replaying the same passes nothing may.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Iterable, Iterator
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
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1},
    {},
    {"temperature": 0.6, "repetition_penalty": 1.2, "sampling_seed": 2},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.1},
)
REPLAYED = "A round's passes are replayed by sglang-dflash"
PREFILL_REPLAYED = re.compile(r"Prefill batch.* graph: True")
ROUNDING = 0.15  # of a logprob, from plain decoding's
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3}


@dataclasses.dataclass(frozen=True)
class Engines:
    """Plain decoding, ours, and ours whose graphs SGLang replays; the last two follow the script.

    Attributes:
        deterministic: nothing that a request says depends on what its batch holds or a pass is made of.
    """

    plain: EngineProcess
    ours: EngineProcess
    sglang: EngineProcess
    script: Path
    deterministic: bool


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"page_size": 16, "disable_overlap_schedule": True},
        {"enable_deterministic_inference": True, "attention_backend": "fa3"},
        {
            "disable_prefill_cuda_graph": False,
            "cuda_graph_bs_prefill": [16, 64, 512, 1024],
            "chunked_prefill_size": 1024,
        },
    ],
    ids=["overlap", "page16-sync", "deterministic", "prefill-graphs"],
)
def engines(
    request: pytest.FixtureRequest, models: demo.Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    scratch, args = tmp_path_factory.mktemp("graphs"), {"log_level": "info", **request.param}
    script = scratch / "script.json"
    follow = scripted.following(script, {})
    follow_sglang = scripted.following(script, {}, scripted.ReplaysLeftToSGLang)
    with (
        # With overlapped scheduling its penalties come late.
        engine("plain", models, scratch / "plain", **{**args, "disable_overlap_schedule": True}) as plain,
        engine("ours", models, scratch / "ours", follow, **args) as ours,
        engine("ours", models, scratch / "sglang", follow_sglang, **args) as sglang,
    ):
        assert REPLAYED in (scratch / "ours").read_text()
        assert REPLAYED not in (scratch / "sglang").read_text()
        yield Engines(plain, ours, sglang, script, "enable_deterministic_inference" in args)
        if "cuda_graph_bs_prefill" in args:
            assert PREFILL_REPLAYED.search((scratch / "ours").read_text())


@pytest.mark.parametrize(
    ("options", "request_options", "size"),
    [
        (OPTIONS[:1], {}, 23),
        (OPTIONS, {}, 23),
        (OPTIONS, LOGPROBS, 23),
        (SAMPLED, {}, 23),
        (SAMPLED, LOGPROBS, 23),
        (OPTIONS[:1], LOGPROBS, 1),
        (OPTIONS[:3], {}, 3),
        (OPTIONS[1:4], LOGPROBS, 3),
    ],
    ids=["plain", "mixed", "mixed with logprobs", "sampled", "sampled with logprobs", "one", "three", "three logprobs"],
)
def test_options_in_captured_rounds(
    engines: Engines,
    prompt_ids: dict[str, list[int]],
    options: tuple[dict[str, Any], ...],
    request_options: dict[str, Any],
    size: int,
) -> None:
    """One batch of at most `size` requests, padded to a captured size, with drafts of every accepted length.

    Whoever replays the graphs, they say the same, bit for bit. Plain decoding says the same tokens with deterministic
    kernels, the same samples too; without them a sampled answer leaves the script where its draws are others.
    """
    if engines.deterministic:
        options = tuple(own for own in options if "min_p" not in own)  # refused
    short = {rid: ids for rid, ids in prompt_ids.items() if len(ids) < 150}
    named = itertools.product(short, enumerate(options))
    each = {f"{rid}-{i}": (short[rid], own) for rid, (i, own) in itertools.islice(named, size)}

    def ask(asked: EngineProcess, request: dict[str, Any], rids: Iterable[str] = tuple(each)) -> dict[str, Answer]:
        call: dict[str, Any] = {"max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True, "request": request}
        for grammar in (own for own in options if "regex" in own):
            # One that is known does not hold its request back.
            asked.generate([[1, 2, 3]], each=[grammar], **call)
        rids = list(rids)
        answers, _ = asked.generate(
            [each[rid][0] for rid in rids], each=[each[rid][1] for rid in rids], rids=rids, **call
        )
        while not asked.call("flush_cache").success:
            time.sleep(0.1)
        return dict(zip(rids, answers, strict=True))

    greedy = [rid for rid, (_, own) in each.items() if "temperature" not in own]
    expected = ask(engines.plain, LOGPROBS)
    if not engines.deterministic and len(greedy) < len(each):
        # Beside samples plain decoding draws between equal logits, for its greedy requests too.
        expected |= ask(engines.plain, LOGPROBS, greedy)
    answers = {rid: answer.token_ids for rid, answer in expected.items()}
    scripted.environment(engines.script, {rid: ids for rid, (ids, _) in each.items()}, answers)
    got = ask(engines.ours, request_options)
    for rid, other in ask(engines.sglang, request_options).items():
        assert got[rid].token_ids == other.token_ids, rid
        for field in ("output_token_logprobs", "output_top_logprobs"):
            assert got[rid].meta.get(field) == other.meta.get(field), (rid, field)
    # Without deterministic kernels plain decoding draws other samples.
    same = {rid: (expected[rid], got[rid]) for rid in (each if engines.deterministic else greedy)}
    assert sum(ours.num_rounds for _, ours in same.values()) < 0.5 * sum(len(one.token_ids) for one, _ in same.values())
    parted = {
        rid: margins.where_parted(margins.of(one.meta["output_top_logprobs"]), one.token_ids, ours.token_ids)
        for rid, (one, ours) in same.items()
        if one.token_ids != ours.token_ids
    }
    print(f"bfloat16: {len(parted)} of {len(same)} requests part from plain decoding, with its margin there: {parted}")
    if engines.deterministic:
        assert not parted
    margins.check([margin for margin in parted.values() if margin is not None], len(same))
    assert None not in parted.values(), "an answer ends early"
    if request_options:
        distances = {rid: farthest(one, ours) for rid, (one, ours) in same.items()}
        print(f"logprobs are at most {max(distances.values()):.1e} from plain decoding's")
        assert max(distances.values()) < ROUNDING, distances


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
