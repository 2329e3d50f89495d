"""A drafter over a token map: it drafts the map's most probable tokens, also after updates of the target's head, and
the answers are plain decoding's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_dflash import config, demo
from sglang_dflash.offline import Answer, EngineProcess
from tests.engine import recording, tiny
from tests.engine.setup import HAS_CUDA, engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(HAS_CUDA, reason="compares float32 numbers of the CPU engine"),
]

STAGES = ("start", "updated", "back")
BLOCK_SIZE = 8
NUM_NEW_TOKENS = 32
MAP_SIZE = 5
TEXTS = ("the first", "true and the 12 others", '{"abc": 1200}', "in the end, it is an answer. Or is it?")
# Of two logits nearer than this a sum in another order may make the other one the larger.
CLOSE = 1e-4


def answer(started: EngineProcess, stage: str) -> list[Answer]:
    prompts = [tiny.byte_tokenizer()(text).input_ids for text in TEXTS]
    rids = [f"{stage}-{i}" for i in range(len(prompts))]
    answers, _ = started.generate(prompts, rids=rids, max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    return answers


def answer_of_stages(started: EngineProcess, first: demo.Models, updated: demo.Models) -> dict[str, list[Answer]]:
    """At the start, after an update from disk, and after the first target's tensors were sent back."""
    answers = {"start": answer(started, "start")}
    success, message, *_ = started.call("update_weights_from_disk", str(updated.target))
    assert success, message
    answers["updated"] = answer(started, "updated")
    tensors = list(load_file(first.target / "model.safetensors").items())
    for call, args in (
        ("begin_weight_update", ()),
        ("update_weights_from_tensor", (tensors,)),
        ("end_weight_update", ()),
    ):
        success, message, *_ = started.call(call, *args)
        assert success, message
    return {**answers, "back": answer(started, "back")}


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [one.token_ids for one in answers]


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> demo.Models:
    """Other weights of the same shapes."""
    return tiny.make(tmp_path_factory.mktemp("updated"), seed=1)


@pytest.fixture(scope="module")
def run(tiny_models: demo.Models, updated: demo.Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers and records of a server with a map before and after updates of its target; plain decoding's of all."""
    scratch = tmp_path_factory.mktemp("map")
    args: dict[str, Any] = {"max_total_tokens": 4096}
    with engine("plain", tiny_models, scratch / "plain-log", **args) as started:
        plain = answer_of_stages(started, tiny_models, updated)
    said = Counter(token for stage in plain.values() for one in stage for token in one.token_ids)
    tokens = [token for token, _ in said.most_common(MAP_SIZE)]
    torch.save(tokens, scratch / "map.pt")
    env = {
        config.CONFIG_VARIABLE: json.dumps({"proposer": "tests.engine.recording:RecordingProposer"}),
        recording.RECORD_VARIABLE: str(scratch / "record"),
    }
    args |= {"speculative_num_draft_tokens": BLOCK_SIZE, "speculative_token_map": str(scratch / "map.pt")}
    with engine("ours", tiny_models, scratch / "log", env, **args) as started:
        ours = answer_of_stages(started, tiny_models, updated)
    return {"plain": plain, "ours": ours, "tokens": tokens, "records": recording.read(scratch / "record")}


@pytest.mark.parametrize("stage", STAGES)
def test_answers_are_plain_decodings(run: dict[str, Any], stage: str) -> None:
    assert tokens_of(run["ours"][stage]) == tokens_of(run["plain"][stage])
    assert tokens_of(run["ours"]["start"]) != tokens_of(run["ours"]["updated"])
    said = {token for tokens in tokens_of(run["ours"][stage]) for token in tokens}
    assert said - set(run["tokens"]), "tokens that are never drafted are said"
    assert any(sum(one.accepted_histogram[1:]) for one in run["ours"][stage]), "some of the map's drafts are right"


@pytest.mark.parametrize("stage", STAGES)
def test_drafts_are_the_maps_most_probable_tokens(
    run: dict[str, Any], tiny_models: demo.Models, updated: demo.Models, stage: str
) -> None:
    models = updated if stage == "updated" else tiny_models
    head_VH = load_file(Path(models.target) / "model.safetensors")["lm_head.weight"]
    tokens_S = torch.tensor(run["tokens"])
    num_compared = num_likelier = 0
    for (rid, _), (hidden_KH, block) in run["records"].items():
        if not rid.startswith(stage):
            continue
        drafts = torch.tensor(block[1:])
        assert torch.isin(drafts, tokens_S).all()
        logits_JV = torch.from_numpy(hidden_KH)[1:] @ head_VH.T
        top = logits_JV[:, tokens_S].topk(2)
        clear = top.values[:, 0] - top.values[:, 1] > CLOSE
        assert (drafts == tokens_S[top.indices[:, 0]])[clear].all()
        num_compared += int(clear.sum())
        num_likelier += int((logits_JV.argmax(-1) != drafts).sum())
    assert num_compared > 100
    assert num_likelier, "over the whole vocabulary others are likelier"


def test_a_map_that_is_none_is_told_before_the_start(tiny_models: demo.Models, tmp_path: Path) -> None:
    vocab_size = len(tiny.byte_tokenizer())
    torch.save([1, vocab_size], tmp_path / "map.pt")
    with pytest.raises(ValueError, match=f"vocabulary of {vocab_size}, got {vocab_size}; make this target's map"):
        engine("ours", tiny_models, tmp_path / "log", speculative_token_map=str(tmp_path / "map.pt"))
