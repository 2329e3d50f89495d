"""What of a weight update reaches the drafter, which updates are refused, and a mask embedding of the drafter's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash import checkpoint, demo, hooks
from sglang_dflash.cpu import bootstrap
from sglang_dflash.drafter_variants import MASK_EMBEDDING_FILE

if bootstrap.wanted():
    bootstrap.install()

from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

from sglang_dflash import worker
from sglang_dflash.host import draft_model, weights
from sglang_dflash.host.target_model import TargetModel

Tensors = list[tuple[str, torch.Tensor]]
MASK_TOKEN_ID = 16


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target_config = json.loads((demo.prepare_target() / "config.json").read_text())
    path = tmp_path_factory.mktemp("models") / "drafter"
    return checkpoint.random_drafter(
        path, target_config, num_layers=1, block_size=4, mask_token_id=MASK_TOKEN_ID, seed=0
    )


class Updater:
    """SGLang's updater of a runner, as far as it loads."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.begin_weight_update = self.end_weight_update = lambda **options: None

    def update_weights_from_tensor(self, named_tensors: Tensors, load_format: str | None) -> tuple[bool, str]:
        self.model.load_weights(iter(named_tensors))
        return True, "loaded"

    def load_weights_from_distributed(self, named_tensors: Tensors) -> tuple[bool, str]:
        self.model.load_weights(named_tensors)
        return True, "loaded"


@pytest.fixture
def loaded() -> list[str]:
    """Names that reached SGLang's loader of the drafter."""
    return []


def weights_of(drafter: Path, loaded: list[str], quantized: bool) -> weights.DrafterWeights:
    model = SimpleNamespace(load_weights=lambda tensors: loaded.extend(name for name, _ in tensors))
    runner = SimpleNamespace(model=model, weight_updater=Updater(model), check_weights=lambda **options: None)
    return weights.DrafterWeights(runner, checkpoint.read_config(drafter), quantized)


@pytest.fixture
def drafter_weights(drafter: Path, loaded: list[str]) -> weights.DrafterWeights:
    return weights_of(drafter, loaded, quantized=False)


Send = Callable[[weights.DrafterWeights, Tensors], tuple[bool, str]]
SENT: dict[str, Send] = {
    "tensor": lambda to, tensors: to.update_weights_from_tensor(tensors, None),
    "bucket": lambda to, tensors: to.update_weights_from_tensor(tensors, "flattened_bucket"),
    "distributed": lambda to, tensors: to.load_weights_from_distributed(tensors),
}


@pytest.mark.parametrize("send", SENT.values(), ids=SENT)
def test_a_quantized_drafter_takes_no_update(drafter: Path, loaded: list[str], send: Send) -> None:
    success, message = send(weights_of(drafter, loaded, quantized=True), [("norm.weight", torch.ones(576))])
    assert not success
    assert "expected a server whose drafter is not quantized" in message
    assert not loaded


@pytest.mark.parametrize("send", SENT.values(), ids=SENT)
def test_the_drafters_own_tensors_are_loaded(
    drafter_weights: weights.DrafterWeights, loaded: list[str], send: Send
) -> None:
    tensors = [("model.norm.weight", torch.zeros(576)), ("encoder.fc.weight", torch.zeros(576, 576))]
    assert send(drafter_weights, tensors) == (True, "loaded")
    assert loaded == ["model.norm.weight", "encoder.fc.weight"]


@pytest.mark.parametrize("send", SENT.values(), ids=SENT)
@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("model.embed_tokens.weight", (4, 4), "got model.embed_tokens.weight, which it has not. Nothing was changed"),
        ("model.layers.1.input_layernorm.weight", (576,), "got model.layers.1.input_layernorm.weight, which it has no"),
        ("norm.weight", (3,), r"got norm.weight \[3\] where it has \[576\]. Nothing was changed"),
    ],
)
def test_others_are_refused_whole(
    drafter_weights: weights.DrafterWeights,
    loaded: list[str],
    send: Send,
    name: str,
    shape: tuple[int, ...],
    complaint: str,
) -> None:
    success, message = send(drafter_weights, [("hidden_norm.weight", torch.zeros(576)), (name, torch.zeros(shape))])
    assert not success
    with pytest.raises(ValueError, match=complaint):
        raise ValueError(message)
    assert not loaded


def test_a_format_that_goes_past_the_names_is_refused(
    drafter_weights: weights.DrafterWeights, loaded: list[str]
) -> None:
    success, message = drafter_weights.update_weights_from_tensor([("norm.weight", torch.zeros(576))], "direct")
    assert not success
    assert "expected none or flattened_bucket, got direct" in message
    assert not loaded


def test_a_folder_or_the_checkpoint_engine_is_the_targets(drafter_weights: weights.DrafterWeights) -> None:
    kept = "Succeeded to update the target's weights; the drafter keeps its own."
    assert drafter_weights.update_weights_from_disk("target", "auto", recapture_cuda_graph=False) == (True, kept)
    assert drafter_weights.update_weights_from_ipc(None) == (True, kept)


class Manager:
    """SGLang's, with a worker that counts what it is told."""

    def __init__(self) -> None:
        self.draft_worker, self.told = self, 0

    def weights_updated(self) -> None:
        self.told += 1


def test_a_drafters_folder_is_no_update_from_disk(drafter: Path) -> None:
    outcome = hooks._update_from_disk(None, None, SimpleNamespace(model_path=str(drafter)))
    assert not outcome.success
    assert f"expected a checkpoint of the target, got the DFlash drafter {drafter}" in outcome.message
    for path in (str(demo.prepare_target()), "some/hub-name"):
        asked, manager = SimpleNamespace(model_path=path), Manager()
        outcome = hooks._update_from_disk(lambda manager, recv_req: (manager, recv_req, manager.told), manager, asked)
        assert outcome == (manager, asked, 0), "the worker is told afterwards"
        assert manager.told == 1


@pytest.mark.parametrize(("selector", "runners"), [("all", "target"), ("target", "target"), ("draft", "draft")])
def test_tensors_for_no_model_in_particular_are_the_targets(selector: str, runners: str) -> None:
    asked, manager = SimpleNamespace(selector=selector), Manager()
    assert hooks._update_one_model(lambda manager, recv_req: recv_req.selector, manager, asked) == runners
    assert manager.told == 0, "the worker is told once, by the call that ends the update"


def test_the_worker_copies_the_head_anew_after_an_update() -> None:
    refreshed = []
    holder = SimpleNamespace(head=SimpleNamespace(refresh=lambda: refreshed.append(1)))
    worker.DFlashWorker.weights_updated(holder)  # type: ignore[arg-type]
    assert refreshed == [1]


def attention(bias: bool) -> SimpleNamespace:
    """A layer of SGLang's drafter with 2 heads of queries and 1 of keys and values, 2 wide, of 3 hidden channels."""
    return SimpleNamespace(
        use_gemma_norm=False,
        rotary_emb=SimpleNamespace(is_neox_style=True, cos_sin_cache=torch.zeros(2, 2)),
        qkv_proj=SimpleNamespace(
            weight=torch.nn.Parameter(torch.zeros(8, 3)), bias=torch.nn.Parameter(torch.zeros(8)) if bias else None
        ),
        k_norm=SimpleNamespace(weight=torch.nn.Parameter(torch.ones(2)), variance_epsilon=1e-6),
        attn=SimpleNamespace(k_scale=None, v_scale=None),
        q_size=4,
        num_kv_heads=1,
        v_scale=None,
    )


@pytest.mark.parametrize("bias", [False, True])
def test_injection_reads_the_parameters_as_they_are_now(
    monkeypatch: pytest.MonkeyPatch, drafter: Path, bias: bool
) -> None:
    layers = [attention(bias) for _ in range(3)]
    model = SimpleNamespace(
        layers=[SimpleNamespace(self_attn=layer) for layer in layers],
        load_weights=None,
        project_target_hidden=None,
        set_block_size=lambda size: None,
    )
    pool = SimpleNamespace(head_num=1, k_buffer=[torch.zeros(4, 1, 2)] * 3, v_buffer=[torch.zeros(4, 1, 2)] * 3)
    runner = SimpleNamespace(dtype=torch.float32, device="cpu", model=model, token_to_kv_pool=pool, check_weights=None)
    runner.weight_updater = Updater(model)
    bundle = SimpleNamespace(draft_worker=None, draft_model_runner=runner, draft_model=model)
    monkeypatch.setattr(draft_model, "build_draft_tp_worker", lambda **options: bundle)
    monkeypatch.setattr(draft_model, "make_draft_block_spec_info", lambda **options: None)
    monkeypatch.setattr(draft_model, "_require_token_major", lambda pool: None)
    monkeypatch.setattr(draft_model.arguments, "drafter", lambda args: checkpoint.read_config(drafter))
    target = SimpleNamespace(embed=None, runner=SimpleNamespace(dtype=torch.float32, model_config=None))
    read = draft_model.DraftModel(None, 0, 0, target, 4, None).layers()
    for i, layer in enumerate(layers, 1):
        for parameter in (layer.qkv_proj.weight, layer.qkv_proj.bias, layer.k_norm.weight):
            if parameter is not None:
                parameter.data.copy_(torch.full_like(parameter, i))
    kv_NLE = read.project(torch.tensor([[1.0, 10.0, 100.0], [0.0, 0.0, 0.0]]))
    assert kv_NLE.shape == (2, 3, 4)
    assert kv_NLE[0, :, 0].tolist() == [111 * i + (i if bias else 0) for i in (1, 2, 3)]
    assert kv_NLE[1, :, 0].tolist() == [i if bias else 0 for i in (1, 2, 3)]
    assert read.k_norm_LD[:, 0].tolist() == [1, 2, 3]


def embedding(scale: float | None = None) -> TargetModel:
    table = torch.nn.Embedding.from_pretrained(torch.arange(12.0).view(4, 3))
    model = SimpleNamespace(get_input_embeddings=lambda: table)
    if scale is not None:
        model.get_dflash_noise_embedding_scale = lambda: scale
    config = SimpleNamespace(vocab_size=4)
    runner = SimpleNamespace(model=model, model_config=config, sampler=torch.nn.Identity())
    return TargetModel(SimpleNamespace(model_runner=runner, device="cpu"))


@pytest.mark.parametrize("scale", [None, 2.0])
def test_a_mask_embedding_is_seen_by_the_block_alone(scale: float | None) -> None:
    target = embedding(scale)
    ids_N = torch.tensor([1, 2, 2, 3])
    expected_NH = target.embed(ids_N).clone()
    target.set_mask_embedding(2, torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64))
    expected_NH[1:3] = torch.tensor([-1.0, -2.0, -3.0]) * (scale or 1.0)
    assert torch.equal(target.embed(ids_N), expected_NH)
    assert torch.equal(target._embedding.weight, torch.arange(12.0).view(4, 3))


def test_a_mask_embedding_is_read(drafter: Path, tmp_path: Path) -> None:
    config = checkpoint.read_config(drafter)
    assert checkpoint.load_mask_embedding(tmp_path, config, MASK_TOKEN_ID) is None
    embedding_H = torch.arange(576.0)
    torch.save({"embedding": embedding_H, "mask_token_id": MASK_TOKEN_ID}, tmp_path / MASK_EMBEDDING_FILE)
    got = checkpoint.load_mask_embedding(tmp_path, config, MASK_TOKEN_ID)
    assert got is not None
    assert torch.equal(got, embedding_H)


@pytest.mark.parametrize(
    ("saved", "complaint"),
    [
        ({"embedding": torch.zeros(576), "mask_token_id": 17}, "expected mask_token_id 16, got 17; correct"),
        ({"embedding": torch.zeros(575), "mask_token_id": 16}, r"expected an embedding \[576\], got \[575\]; train"),
        (
            {"embedding": torch.zeros(15, 576), "mask_token_id": 16, "per_position": True},
            r"expected an embedding \[576\], got one for each position; train",
        ),
        ({"mask_token_id": 16}, r"expected embedding and mask_token_id, got KeyError\('embedding'\); save the two"),
        (torch.zeros(576), "expected embedding and mask_token_id, got "),
    ],
)
def test_a_mask_embedding_that_does_not_fit_is_refused(
    drafter: Path, tmp_path: Path, saved: Any, complaint: str
) -> None:
    torch.save(saved, tmp_path / MASK_EMBEDDING_FILE)
    with pytest.raises(ValueError, match=complaint):
        checkpoint.load_mask_embedding(tmp_path, checkpoint.read_config(drafter), MASK_TOKEN_ID)


def test_a_file_that_is_no_mask_embedding_is_refused(drafter: Path, tmp_path: Path) -> None:
    (tmp_path / MASK_EMBEDDING_FILE).write_bytes(b"no pickle")
    with pytest.raises(ValueError, match="expected embedding and mask_token_id, got "):
        checkpoint.load_mask_embedding(tmp_path, checkpoint.read_config(drafter), MASK_TOKEN_ID)


class Table:
    """Of a GPU, or not."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda, self.rows = is_cuda, torch.randn(4, 3)

    def __getitem__(self, ids_N: torch.Tensor) -> torch.Tensor:
        return self.rows[ids_N]


@pytest.mark.parametrize("kind", [UnquantizedEmbeddingMethod, type("Quantized", (UnquantizedEmbeddingMethod,), {})])
@pytest.mark.parametrize("is_cuda", [True, False])
def test_a_plain_table_on_a_gpu_is_indexed(is_cuda: bool, kind: type) -> None:
    """The rows that `embedding` takes, whose kernel for a few ids is slow."""
    table = SimpleNamespace(quant_method=kind(), weight=Table(is_cuda))
    config = SimpleNamespace(vocab_size=4)
    model = SimpleNamespace(get_input_embeddings=lambda: table)
    TargetModel(
        SimpleNamespace(
            model_runner=SimpleNamespace(model=model, model_config=config, sampler=torch.nn.Identity()), device="cpu"
        )
    )
    indexed = "embedding" in vars(table.quant_method)
    assert indexed == (is_cuda and kind is UnquantizedEmbeddingMethod)
    if indexed:
        ids_N = torch.tensor([3, 0, 3, 1])
        assert torch.equal(table.quant_method.embedding(table, ids_N), table.weight.rows[[3, 0, 3, 1]])
