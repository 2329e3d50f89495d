"""The shipped drafter in the engine, in the reference on Transformers and in the trainer: the same numbers and rounds.

Its weights are trained, so drafts are accepted, and a wrong feature, position or cache entry would cost rounds.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from sglang_dflash import config, demo
from sglang_dflash.offline import Answer
from sglang_dflash.reference import drafter as reference
from sglang_dflash.reference.generate import spec_generate
from sglang_dflash.train.blocks import Blocks
from sglang_dflash.train.model import BlockDrafter
from tests.engine import recording
from tests.engine.setup import HAS_CUDA, engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(HAS_CUDA, reason="compares float32 numbers of the CPU engine"),
]

NUM_NEW_TOKENS = 12
NUM_WHOLE_TOKENS = 48  # of the demo's prompts
SHARED = " ".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(1, 110))  # over 1,000 tokens
# Relative error of float32 sums in different orders, over 35 layers.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def models() -> demo.Models:
    return demo.prepare()


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
    chats = [[{"role": "user", "content": prompt}] for prompt in demo.PROMPTS]
    whole = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    answers: dict[str, Answer] = {}
    with engine("ours", models, scratch / "log", env, chunked_prefill_size=128) as started:
        for rid, ids in prompts.items():
            if rid == "fresh":
                started.call("flush_cache")
            outcome, _ = started.generate([ids], rids=[rid], max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
            answers[rid] = outcome[0]
        prompts |= {f"whole-{i}": ids for i, ids in enumerate(whole)}
        outcome, _ = started.generate(whole, rids=list(prompts)[3:], max_new_tokens=NUM_WHOLE_TOKENS)
        answers |= dict(zip(list(prompts)[3:], outcome, strict=True))
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


@pytest.fixture(scope="module")
def target(models: demo.Models) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32).eval()


@pytest.mark.parametrize("rid", ["first", "cached", "whole-1"])
@torch.inference_mode()
def test_engine_drafts_what_reference_and_trainer_draft(run: dict[str, Any], target: Any, rid: str) -> None:
    drafter = reference.load_drafter(run["models"].drafter, torch.float32, "cpu")
    trained = BlockDrafter(drafter.config)
    trained.load_state_dict(drafter.state_dict())
    tokens_1N = torch.tensor([[*run["prompts"][rid], *run["answers"][rid].token_ids]])
    hidden_states = target.model(tokens_1N, output_hidden_states=True).hidden_states
    features_1ND = torch.cat([hidden_states[tap + 1] for tap in drafter.config.target_layer_ids], dim=-1)
    # Overlapped scheduling drafts once more after a request's end.
    rounds = [seq_len for key, seq_len in run["records"] if key == rid and seq_len < tokens_1N.shape[1]]
    assert rounds
    for seq_len in rounds:
        hidden_KH, drafted = run["records"][rid, seq_len]
        anchor = int(tokens_1N[0, seq_len])
        context = drafter.new_context()
        drafter.inject(features_1ND[0, :seq_len], context)
        expected_KH, logits_KV = drafter.draft_logits(target, anchor, context, len(drafted))
        assert drafted[0] == anchor
        assert relative_error(hidden_KH, expected_KH.numpy()) < TOLERANCE
        assert drafted[1:] == logits_KV[1:].argmax(-1).tolist()
        labels_11K = torch.full((1, 1, len(drafted)), anchor)
        block = Blocks(torch.tensor([[seq_len]]), labels_11K, torch.ones_like(labels_11K, dtype=torch.bool))
        embedding = target.get_input_embeddings()
        trainer_11KH = trained.forward_blocks(features_1ND, block, embedding, drafter.config.mask_token_id)
        assert relative_error(trainer_11KH[0, 0].numpy(), expected_KH.numpy()) < TOLERANCE


def test_engine_takes_the_rounds_of_the_reference(run: dict[str, Any], target: Any) -> None:
    """Of a batch, each request as alone: the same tokens, in as many rounds."""
    drafter = reference.load_drafter(run["models"].drafter, torch.float32, "cpu")
    whole = {rid: ids for rid, ids in run["prompts"].items() if rid.startswith("whole")}
    stop = {target.generation_config.eos_token_id}
    for rid, ids in whole.items():
        expected = spec_generate(
            target, drafter, torch.tensor([ids]), max_new_tokens=NUM_WHOLE_TOKENS, stop_token_ids=stop
        )
        answer = run["answers"][rid]
        assert answer.token_ids == expected.output_ids[0, len(ids) :].tolist(), rid
        assert answer.num_rounds == expected.num_rounds, rid
    num_rounds = sum(run["answers"][rid].num_rounds for rid in whole)
    num_tokens = sum(len(run["answers"][rid].token_ids) - 1 for rid in whole)
    assert num_tokens / num_rounds > 1.8, "a trained drafter's blocks are accepted"


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
