"""Request options where a round's passes are CUDA graphs: answers are plain decoding's, and so are their logprobs.

A graph chooses the argmax of 16-bit logits itself; a round in which any request wants more of them makes float32 of
the same numbers. In bfloat16 a verified block and a decoded token round differently, so a close call may fall
otherwise: the tests tell how many answers part.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import demo
from sglang_dflash.offline import Answer
from tests.engine import scripted
from tests.engine.setup import NUM_NEW_TOKENS, engine

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"repetition_penalty": 1.3, "min_new_tokens": 30},
    {"logit_bias": {"284": 4.0, "30": -6.0}},
    {"regex": "[a-z]{3,9}( [a-z]{1,9}){12,40}", "ignore_eos": False},
)
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3}
CLOSE_CALLS = 1 / 8  # of answers may part in bfloat16
ROUNDING = 0.15  # of a logprob


@pytest.mark.parametrize("request_options", [{}, LOGPROBS])
@pytest.mark.parametrize("engine_args", [{}, {"page_size": 16, "disable_overlap_schedule": True}])
def test_options_in_captured_rounds(
    models: demo.Models,
    prompt_ids: dict[str, list[int]],
    tmp_path: Path,
    engine_args: dict[str, Any],
    request_options: dict[str, Any],
) -> None:
    """One mixed batch, padded to a captured size, with drafts of every accepted length."""
    short = {rid: ids for rid, ids in prompt_ids.items() if len(ids) < 150}
    each = {f"{rid}@{i}": options for (rid, _), (i, options) in itertools.product(short.items(), enumerate(OPTIONS))}
    each = dict(list(each.items())[:23])  # of 24 that a graph holds
    prompts = {name: short[name.partition("@")[0]] for name in each}
    call: dict[str, Any] = {
        "each": list(each.values()),
        "max_new_tokens": NUM_NEW_TOKENS,
        "ignore_eos": True,
        "request": request_options,
    }
    with engine("plain", models, tmp_path / "plain", **engine_args) as plain:
        expected, _ = plain.generate(list(prompts.values()), **call)
    # The script knows a request by what stands before an "@".
    rids = [name.replace("@", "-option-") for name in prompts]
    answers = dict(zip(rids, (answer.token_ids for answer in expected), strict=True))
    env = scripted.environment(tmp_path / "script.json", dict(zip(rids, prompts.values(), strict=True)), answers)
    with engine("ours", models, tmp_path / "ours", env, log_level="info", **engine_args) as ours:
        got, _ = ours.generate(list(prompts.values()), rids=rids, **call)
    assert "passes are replayed by sglang-dflash" in (tmp_path / "ours").read_text()
    assert sum(answer.num_rounds for answer in got) < 0.5 * sum(len(answer.token_ids) for answer in got)
    parted = [rid for rid, one, other in zip(rids, expected, got, strict=True) if one.token_ids != other.token_ids]
    print(f"bfloat16: {len(parted)} of {len(rids)} requests part from plain decoding: {parted}")
    assert len(parted) <= CLOSE_CALLS * len(rids)
    if request_options:
        for rid, one, other in zip(rids, expected, got, strict=True):
            assert farthest(one, other) < ROUNDING, rid


def farthest(one: Answer, other: Answer) -> float:
    """The largest difference between the logprobs of two answers, of the tokens that they share and before."""
    pairs = zip(one.meta["output_token_logprobs"], other.meta["output_token_logprobs"], strict=True)
    shared = itertools.takewhile(lambda pair: pair[0][1] == pair[1][1], pairs)
    return max((abs(left[0] - right[0]) for left, right in shared), default=0.0)
