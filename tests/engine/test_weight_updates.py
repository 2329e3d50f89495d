"""A running server takes new weights: each update reaches the model it names, and the server then is a fresh one.

Of the demo's models the drafter's tensors have the names and shapes of the target's first layers, so whatever goes to
the wrong model fits there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash import checkpoint, config, demo
from sglang_dflash.drafter_variants import MASK_EMBEDDING_FILE
from sglang_dflash.reference import drafter as reference
from tests.engine import recording
from tests.engine.serving import generate, serve
from tests.engine.setup import HAS_CUDA

pytestmark = [pytest.mark.engine]
float32_alone = pytest.mark.skipif(HAS_CUDA, reason="compares float32 numbers of the CPU engine")
# In bfloat16 too a server then says what another says, whatever each has cached.
SERVER = {"enable_deterministic_inference": True, "attention_backend": "fa3"} if HAS_CUDA else {}

NUM_NEW_TOKENS = 20
BLOCK_SIZE = 8
PROMPTS = demo.PROMPTS[:2]
# Of the target only these layers differ, by noise relative to each tensor's own deviation.
CHANGED_LAYERS = tuple(f"model.layers.{i}." for i in range(3))
TARGET_NOISE = 0.2
DRAFTER_NOISE = 0.1
MASK_NOISE = 0.5
GROUP = "weight_update_group"
TIMEOUT_S = 120
# Relative error of float32 sums, which other shapes of a batch order otherwise.
TOLERANCE = 1e-5
# The same between the engine and Transformers, over 35 layers.
REFERENCE_TOLERANCE = 2e-4

Tensors = dict[str, torch.Tensor]


class Client:
    """A server's weights from outside, and what it answers with them. `stages` keeps every `measure`."""

    def __init__(self, url: str, prompts: list[list[int]], record: Path) -> None:
        self.url, self.prompts, self.record = url, prompts, record
        self.stages: dict[str, dict[str, Any]] = {}

    def measure(self, stage: str) -> None:
        answers = [
            generate(self.url, ids, f"{stage}-{i}", NUM_NEW_TOKENS, ignore_eos=True)
            for i, ids in enumerate(self.prompts)
        ]
        response = requests.post(f"{self.url}/weights_checker", json={"action": "checksum"}, timeout=TIMEOUT_S).json()
        checksums = response["ranks"][0]["checksums"]
        self.stages[stage] = {
            "tokens": [answer["output_ids"] for answer in answers],
            "num_rounds": [answer["meta_info"]["spec_verify_ct"] for answer in answers],
            "target": {name: value for name, value in checksums.items() if not name.startswith("draft.")},
            "drafter": {name: value for name, value in checksums.items() if name.startswith("draft.")},
        }

    def post(self, path: str, **body: Any) -> tuple[bool, str]:
        answer = requests.post(f"{self.url}/{path}", json=body, timeout=TIMEOUT_S).json()
        return answer["success"], answer["message"]

    def expect(self, path: str, **body: Any) -> str:
        success, message = self.post(path, **body)
        assert success, f"{path}: {message}"
        return message

    def send(self, tensors: Tensors, *, bucket: bool = False, **body: Any) -> tuple[bool, str]:
        """Update from tensors, in SGLang's own session."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        payload: Any = list(tensors.items())
        if bucket:
            packed = FlattenedTensorBucket(named_tensors=payload)
            payload = {"flattened_tensor": packed.get_flattened_tensor(), "metadata": packed.get_metadata()}
            body["load_format"] = "flattened_bucket"
        serialized = [MultiprocessingSerializer.serialize(payload, output_str=True)]
        self.expect("begin_weight_update")
        outcome = self.post("update_weights_from_tensor", serialized_named_tensors=serialized, **body)
        self.expect("end_weight_update")
        return outcome

    def broadcast(self, group: Any, tensors: Tensors, **body: Any) -> tuple[bool, str]:
        """Update from a process group, of which this process is rank 0."""
        names, values = list(tensors), list(tensors.values())
        sent = {
            "names": names,
            "dtypes": [str(value.dtype).removeprefix("torch.") for value in values],
            "shapes": [list(value.shape) for value in values],
        }
        outcome: list[tuple[bool, str]] = []
        self.expect("begin_weight_update")
        post = threading.Thread(
            target=lambda: outcome.append(
                self.post("update_weights_from_distributed", group_name=GROUP, **sent, **body)
            )
        )
        post.start()
        for value in values:
            torch.distributed.broadcast(value, src=0, group=group)
        post.join()
        self.expect("end_weight_update")
        return outcome[0]

    def join(self) -> Any:
        """A process group with the server."""
        from sglang.srt.utils import init_custom_process_group

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        place = {"master_address": "127.0.0.1", "master_port": port, "group_name": GROUP, "backend": "gloo"}
        server = threading.Thread(
            target=self.expect, args=("init_weights_update_group",), kwargs={"rank_offset": 1, "world_size": 2, **place}
        )
        server.start()
        group = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=GROUP
        )
        server.join()
        return group


def noisy(tensors: Tensors, scale: float, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (t.float() + scale * t.float().std() * torch.randn(t.shape, generator=generator)).to(t.dtype)
        for name, t in tensors.items()
    }


@pytest.fixture(scope="module")
def shipped() -> demo.Models:
    return demo.prepare()


@pytest.fixture(scope="module")
def mask_H(shipped: demo.Models) -> torch.Tensor:
    """An embedding of the mask token unlike the target's, whose head is its embedding."""
    table = load_file(shipped.target / "model.safetensors")["model.embed_tokens.weight"]
    return noisy({"": table[mask_token_id(shipped)]}, MASK_NOISE, seed=3)[""]


def mask_token_id(models: demo.Models) -> int:
    chosen = checkpoint.read_config(models.drafter).mask_token_id
    assert chosen is not None
    return chosen


def write_mask(models: demo.Models, mask_H: torch.Tensor) -> None:
    torch.save({"embedding": mask_H, "mask_token_id": mask_token_id(models)}, models.drafter / MASK_EMBEDDING_FILE)


@pytest.fixture(scope="module")
def old(shipped: demo.Models, mask_H: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> demo.Models:
    folder = tmp_path_factory.mktemp("old") / "drafter"
    models = demo.Models(shipped.target, Path(shutil.copytree(shipped.drafter, folder)))
    write_mask(models, mask_H)
    return models


@pytest.fixture(scope="module")
def new(old: demo.Models, mask_H: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> demo.Models:
    scratch = tmp_path_factory.mktemp("new")
    target = Path(shutil.copytree(old.target, scratch / "target"))
    tensors = load_file(target / "model.safetensors")
    tensors |= noisy({name: t for name, t in tensors.items() if name.startswith(CHANGED_LAYERS)}, TARGET_NOISE, seed=1)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    drafter = noisy(drafter_tensors(old), DRAFTER_NOISE, seed=2)
    checkpoint.write_checkpoint(scratch / "drafter", checkpoint.read_config(old.drafter), drafter)
    models = demo.Models(target, scratch / "drafter")
    write_mask(models, mask_H)
    return models


def target_tensors(models: demo.Models) -> Tensors:
    """Those of the layers that differ."""
    tensors = load_file(models.target / "model.safetensors")
    return {name: t for name, t in tensors.items() if name.startswith(CHANGED_LAYERS)}


def drafter_tensors(models: demo.Models) -> Tensors:
    return checkpoint.load_tensors(models.drafter, checkpoint.read_config(models.drafter))


@pytest.fixture(scope="module")
def prompts(old: demo.Models) -> list[list[int]]:
    from transformers import AutoTokenizer

    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    tokenizer = AutoTokenizer.from_pretrained(old.target)
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.fixture(scope="module")
def stages(
    old: demo.Models, new: demo.Models, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """One server through every kind of update, and a fresh one of the new models."""
    # By name: the server is no child of this process that could inherit a descriptor.
    torch.multiprocessing.set_sharing_strategy("file_system")
    scratch = tmp_path_factory.mktemp("updates")
    env = {
        config.CONFIG_VARIABLE: json.dumps({"proposer": "tests.engine.recording:RecordingProposer"}),
        recording.RECORD_VARIABLE: str(scratch / "record"),
    }
    stages: dict[str, dict[str, Any]] = {}
    with serve(old, scratch / "log", env, speculative_num_draft_tokens=BLOCK_SIZE, **SERVER) as url:
        client = Client(url, prompts, scratch / "record")
        client.stages = stages
        update(client, old, new)
    with serve(new, scratch / "fresh-log", env, speculative_num_draft_tokens=BLOCK_SIZE, **SERVER) as url:
        client = Client(url, prompts, scratch / "record")
        client.stages = stages
        client.measure("fresh")
    records = recording.read(scratch / "record")
    for stage, measured in stages.items():
        measured["hidden"] = {
            (rid.removeprefix(f"{stage}-"), seq_len): hidden_KH
            for (rid, seq_len), (hidden_KH, _) in records.items()
            if rid.startswith(f"{stage}-")
        }
    return stages


def update(client: Client, old: demo.Models, new: demo.Models) -> None:
    """The target's updates name no model, as a user of plain decoding sends them."""
    client.measure("start")
    client.expect("update_weights_from_disk", model_path=str(new.target))
    client.measure("disk")
    assert client.send(target_tensors(old))[0]
    client.measure("tensors")
    assert client.send(target_tensors(new), bucket=True)[0]
    client.measure("bucket")
    assert client.send(drafter_tensors(new), selector="draft")[0]
    client.measure("drafter_tensors")
    refuse(client, old)
    client.measure("refused")
    assert client.send(drafter_tensors(old), selector="draft", bucket=True)[0]
    client.measure("drafter_bucket")
    group = client.join()
    assert client.broadcast(group, target_tensors(old))[0]
    client.measure("distributed")
    assert client.broadcast(group, drafter_tensors(new), selector="draft")[0]
    client.measure("drafter_distributed")
    torch.distributed.destroy_process_group(group)


def refuse(client: Client, old: demo.Models) -> None:
    """What is no update of the model that it is sent to is told in a sentence, and changes nothing."""
    own = drafter_tensors(old)
    wrong = {
        "model.embed_tokens.weight, which it has not": {**own, "model.embed_tokens.weight": torch.zeros(2, 2)},
        "norm.weight [2] where it has [576]": {**own, "norm.weight": torch.zeros(2)},
    }
    for complaint, tensors in wrong.items():
        for bucket in (False, True):
            success, message = client.send(tensors, selector="draft", bucket=bucket)
            assert not success
            assert complaint in message
            assert "Nothing was changed" in message
    success, message = client.send(own, selector="draft", load_format="direct")
    assert not success
    assert "expected none or flattened_bucket, got direct" in message
    success, message = client.post("update_weights_from_disk", model_path=str(old.drafter))
    assert not success
    assert f"got the DFlash drafter {old.drafter}" in message


def same(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Two servers that nothing tells apart: weights, tokens, rounds and what the drafter computed."""
    for key in ("target", "drafter", "tokens", "num_rounds"):
        assert left[key] == right[key], key
    assert left["hidden"].keys() == right["hidden"].keys()
    assert left["hidden"]
    for key, hidden_KH in left["hidden"].items():
        assert relative_error(hidden_KH, right["hidden"][key]) < TOLERANCE, key


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def test_models_differ_where_they_should(stages: dict[str, Any]) -> None:
    """Else the tests below could not fail."""
    for key in ("target", "tokens"):
        assert stages["start"][key] != stages["fresh"][key]
    assert stages["start"]["drafter"].keys() == stages["fresh"]["drafter"].keys()
    assert stages["drafter_bucket"]["num_rounds"] != stages["fresh"]["num_rounds"]
    changed = [name for name, value in stages["start"]["drafter"].items() if value != stages["fresh"]["drafter"][name]]
    assert len(changed) == len(stages["fresh"]["drafter"])


@pytest.mark.parametrize("stage", ["disk", "tensors", "bucket", "distributed"])
def test_an_update_of_the_target_leaves_the_drafter_alone(stages: dict[str, Any], stage: str) -> None:
    assert stages[stage]["drafter"] == stages["start"]["drafter"]
    new_target = stage in ("disk", "bucket")
    expected = stages["fresh" if new_target else "start"]
    assert stages[stage]["target"] == expected["target"]
    assert stages[stage]["tokens"] == expected["tokens"]


@pytest.fixture(scope="module")
def new_target(new: demo.Models) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(new.target, dtype=torch.float32).eval()


@float32_alone
def test_answers_are_those_of_the_new_target(stages: dict[str, Any], new_target: Any, prompts: list[list[int]]) -> None:
    for ids, tokens in zip(prompts, stages["disk"]["tokens"], strict=True):
        with torch.inference_mode():
            logits_NV = new_target(torch.tensor([ids + tokens])).logits[0]
        assert tokens == logits_NV[len(ids) - 1 : -1].argmax(-1).tolist()


@float32_alone
@torch.inference_mode()
def test_the_mask_slots_embedding_is_the_drafters_alone(
    stages: dict[str, Any], shipped: demo.Models, new_target: Any, prompts: list[list[int]], mask_H: torch.Tensor
) -> None:
    """It outlives an update of the target, and the target's table, here its head too, is as its checkpoint has it."""
    table = new_target.get_input_embeddings().weight
    assert torch.equal(table, new_target.get_output_embeddings().weight)
    digest = hashlib.sha256(memoryview(table.numpy()).cast("B")).hexdigest()[:16]
    for stage in ("start", "disk"):
        assert stages[stage]["target"]["model.embed_tokens.weight"] == digest
    changed = table.clone()
    changed[mask_token_id(shipped)] = mask_H.float()
    borrowed = SimpleNamespace(
        get_input_embeddings=lambda: lambda ids: torch.nn.functional.embedding(ids, changed),
        get_output_embeddings=new_target.get_output_embeddings,
    )
    drafter = reference.load_drafter(shipped.drafter, torch.float32, "cpu")
    ids = [*prompts[0], *stages["disk"]["tokens"][0]]
    hidden_states = new_target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    features_ND = torch.cat([hidden_states[tap + 1] for tap in drafter.config.target_layer_ids], dim=-1)[0]
    rounds = {seq_len: hidden for (rid, seq_len), hidden in stages["disk"]["hidden"].items() if rid == "0"}
    # Overlapped scheduling drafts once more after a request's end.
    rounds = {seq_len: hidden_KH for seq_len, hidden_KH in rounds.items() if seq_len < len(ids)}
    assert len(rounds) > 2
    for seq_len, hidden_KH in rounds.items():
        context = drafter.new_context()
        drafter.inject(features_ND[:seq_len], context)
        expected_KH, _ = drafter.draft_logits(borrowed, ids[seq_len], context, BLOCK_SIZE)
        assert relative_error(hidden_KH, expected_KH.numpy()) < REFERENCE_TOLERANCE


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("tensors", "start"),
        ("bucket", "disk"),
        ("drafter_tensors", "fresh"),
        ("refused", "fresh"),
        ("drafter_bucket", "disk"),
        ("distributed", "start"),
    ],
)
def test_an_updated_server_is_as_a_fresh_one(stages: dict[str, Any], stage: str, expected: str) -> None:
    same(stages[stage], stages[expected])


def test_the_drafter_from_a_process_group(stages: dict[str, Any]) -> None:
    assert stages["drafter_distributed"]["drafter"] == stages["fresh"]["drafter"]
    assert stages["drafter_distributed"]["target"] == stages["start"]["target"]
    assert stages["drafter_distributed"]["tokens"] == stages["start"]["tokens"]
