"""The drafter that ships, in FP8 with head and injected projections: accepted as often, with the same answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import config, demo
from sglang_dflash.offline import Answer
from tests.engine import margins
from tests.engine.setup import engine

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

NUM_NEW_TOKENS = 96
KEPT = 0.9  # of the tokens that a round commits


def tokens_a_round(answers: list[Answer]) -> float:
    """An answer's first token comes from the prefill."""
    return sum(len(one.token_ids) - 1 for one in answers) / sum(one.num_rounds for one in answers)


def test_a_drafter_in_fp8_is_accepted_as_often(prompt_ids: dict[str, list[int]], tmp_path: Path) -> None:
    models = demo.prepare()
    prompts = [ids for ids in prompt_ids.values() if len(ids) < 150]
    request = {"return_logprob": True, "top_logprobs_num": 2}

    def ask(kind: str, name: str, env: dict[str, str] | None = None, **args: Any) -> list[Answer]:
        with engine(kind, models, tmp_path / name, env, **args) as started:
            answers, _ = started.generate(
                prompts, max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True, request=request if kind == "plain" else {}
            )
        return answers

    plain, dense = ask("plain", "plain"), ask("ours", "dense")
    env = {config.CONFIG_VARIABLE: json.dumps({"draft_head": "fp8"})}
    fp8 = ask("ours", "fp8", env, speculative_draft_model_quantization="fp8")
    rates = {"dense": tokens_a_round(dense), "fp8": tokens_a_round(fp8)}
    print(f"tokens a round: {rates}")
    assert rates["dense"] > 1.5, "nothing to lose"
    assert rates["fp8"] > KEPT * rates["dense"]
    for answers in (dense, fp8):
        found = [
            margins.where_parted(margins.of(one.meta["output_top_logprobs"]), one.token_ids, ours.token_ids)
            for one, ours in zip(plain, answers, strict=True)
        ]
        margins.check([margin for margin in found if margin is not None], len(plain))
