"""The engine's drafter against the reference on Transformers, and a cached prefix against a computed one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from sglang_dflash import config, demo
from sglang_dflash.offline import Answer
from tests.engine import recording
from tests.engine.setup import HAS_CUDA, engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(HAS_CUDA, reason="compares float32 numbers of the CPU engine"),
]

NUM_NEW_TOKENS = 6
SHARED = " ".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(1, 110))  # over 1,000 tokens
# Relative error of float32 sums in different orders, over 35 layers.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def run(models: demo.Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`first` fills the cache, `cached` shares its first 1,000 tokens, `fresh` repeats `cached` without the cache."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.target)
    scratch = tmp_path_factory.mktemp("oracle")
    env = {
        config.CONFIG_VARIABLE: json.dumps({"proposer": "tests.engine.recording:RecordingProposer"}),
        recording.RECORD_VARIABLE: str(scratch / "record"),
    }
    prompts = {
        "first": tokenizer(f"{SHARED} What are 3 and 4?").input_ids,
        "cached": tokenizer(f"{SHARED} Name a number over 100.").input_ids,
    }
    prompts["fresh"] = prompts["cached"]
    answers: dict[str, Answer] = {}
    with engine("ours", models, scratch / "log", env, chunked_prefill_size=128) as started:
        for rid, ids in prompts.items():
            if rid == "fresh":
                started.call("flush_cache")
            outcome, _ = started.generate([ids], rids=[rid], max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
            answers[rid] = outcome[0]
    return {"models": models, "prompts": prompts, "answers": answers, "records": recording.read(scratch / "record")}


def test_radix_cache_is_the_drafters_too(run: dict[str, Any]) -> None:
    prompt_len = len(run["prompts"]["cached"])
    assert run["answers"]["fresh"].meta["cached_tokens"] == 0
    assert 1000 <= run["answers"]["cached"].meta["cached_tokens"] < prompt_len, "only the tail was computed"
    assert run["answers"]["cached"].token_ids == run["answers"]["fresh"].token_ids
    rounds = [seq_len for rid, seq_len in run["records"] if rid == "cached"]
    assert rounds
    for seq_len in rounds:
        cached_KH, cached_tokens = run["records"]["cached", seq_len]
        fresh_KH, fresh_tokens = run["records"]["fresh", seq_len]
        assert cached_tokens == fresh_tokens, "the same drafts: what the cache holds of the drafter is the same"
        assert relative_error(cached_KH, fresh_KH) < TOLERANCE


@pytest.mark.parametrize("rid", ["first", "cached"])
def test_engine_drafts_what_the_reference_drafts(run: dict[str, Any], rid: str) -> None:
    from transformers import AutoModelForCausalLM

    from sglang_dflash.reference import drafter as reference

    target = AutoModelForCausalLM.from_pretrained(run["models"].target, dtype=torch.float32).eval()
    drafter = reference.load_drafter(run["models"].drafter, torch.float32, "cpu")
    prompt, answer = run["prompts"][rid], run["answers"][rid].token_ids
    tokens = torch.tensor([[*prompt, *answer]])
    with torch.inference_mode():
        hidden_states = target.model(tokens, output_hidden_states=True).hidden_states
        features_ND = torch.cat([hidden_states[tap + 1][0] for tap in drafter.config.target_layer_ids], dim=-1)
        for seq_len in (seq_len for key, seq_len in run["records"] if key == rid):
            hidden_KH, drafted = run["records"][rid, seq_len]
            anchor = int(tokens[0, seq_len])
            context = drafter.new_context()
            drafter.inject(features_ND[:seq_len], context)
            expected_KH, logits_KV = drafter.draft_logits(target, anchor, context, len(drafted))
            assert drafted[0] == anchor
            assert relative_error(hidden_KH, expected_KH.numpy()) < TOLERANCE
            assert drafted[1:] == logits_KV[1:].argmax(-1).tolist()


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
