"""The target's pass over blocks ends in injection: once, in its graph where one ran, on the host where none did."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.cpu import bootstrap

if bootstrap.wanted():
    bootstrap.install()

from sglang.srt.model_executor.cuda_graph_config import Backend

import sglang_dflash_kernels as kernels
from sglang_dflash.host import target_model
from sglang_dflash.host.head_logits import GreedyChoices
from sglang_dflash.host.target_model import TargetModel
from sglang_dflash.records import Block, Draft, Round

OPS = kernels.select(torch.device("cpu"))
B, K, W, V, FEATURES = 2, 4, 3, 7, 5


class Injected:
    """What was injected, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, *tensors: torch.Tensor) -> None:
        self.calls.append(tensors)


@pytest.fixture
def injected() -> Injected:
    return Injected()


@pytest.fixture
def target(injected: Injected, monkeypatch: pytest.MonkeyPatch) -> TargetModel:
    return a_target(injected, Backend.FULL, monkeypatch)


def a_target(injected: Injected, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> TargetModel:
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=backend)))
    monkeypatch.setattr(target_model, "get_exec", lambda: SimpleNamespace(graph=graph))
    model = SimpleNamespace(get_input_embeddings=lambda: None)
    config = SimpleNamespace(vocab_size=V)
    runner = SimpleNamespace(model=model, model_config=config, capture_tail_hooks=[], sampler=torch.nn.Identity())
    made = TargetModel(SimpleNamespace(model_runner=runner, device="cpu"))
    made.init_graphs(injected, GreedyChoices(OPS, B, K, torch.device("cpu")), None)
    return made


def test_sglangs_sampler_is_told_of_greedy_requests(target: TargetModel) -> None:
    assert "forward" in vars(target.runner.sampler)


def a_batch(**fields: Any) -> Any:
    """SGLang's batch of greedy requests without an option; some of its fields, or of its sampling info, given."""
    info = {"is_all_greedy": True, "logit_bias": None, "has_custom_logit_processor": False}
    info |= {name: fields.pop(name) for name in info if name in fields}
    rest = {"reqs": [], "has_grammar": False, "return_logprob": False, **fields}
    return SimpleNamespace(sampling_info=SimpleNamespace(**info), **rest)


def verify(
    target: TargetModel, in_graph: bool, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> tuple[Any, Any, Block]:
    """A round verified by a forward pass that is played; its record, the pass's output and the block."""
    ids_BK = torch.arange(B * K).view(B, K)
    block = Block(ids_BK, ids_BK + 100, ids_BK + 200, None)
    logits_NV = torch.randn(B * W, V).to(torch.bfloat16 if in_graph else torch.float32)
    output = SimpleNamespace(hidden_states=torch.randn(B * W, FEATURES), next_token_logits=logits_NV)
    output.features = output.hidden_states
    result = SimpleNamespace(logits_output=output, can_run_cuda_graph=in_graph)
    monkeypatch.setattr(target, "_forward", lambda *args: result)
    if in_graph:
        target._choices.score(logits_NV)  # type: ignore[union-attr]
    lens = torch.tensor([4, 9])
    round_ = Round(lens, lens, lens, lens, 13, ("a", "b"))
    return target.verify(a_batch(**fields), round_, block, Draft(ids_BK), W, None), output, block


def test_without_a_graph_the_verified_tokens_are_injected(
    target: TargetModel, injected: Injected, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified, output, block = verify(target, in_graph=False, monkeypatch=monkeypatch)
    [(features_ND, positions_N, slots_N)] = injected.calls
    assert features_ND is output.features
    assert positions_N.tolist() == block.positions_BK[:, :W].flatten().tolist()
    assert slots_N.tolist() == block.slots_BK[:, :W].flatten().tolist()
    assert output.hidden_states is None, "SGLang would copy it to the host"
    assert verified.choices_BW.tolist() == output.next_token_logits.argmax(dim=1).view(B, W).tolist()


def test_where_a_graph_ran_it_has_injected(
    target: TargetModel, injected: Injected, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified, output, _ = verify(target, in_graph=True, monkeypatch=monkeypatch)
    assert not injected.calls
    assert output.hidden_states is None
    assert verified.choices_BW.tolist() == output.next_token_logits.argmax(dim=1).view(B, W).tolist()
    assert output.next_token_logits.dtype == torch.bfloat16, "nobody asked for float32"


def test_what_wants_more_of_the_logits_than_their_argmax_gets_float32(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias_BV = torch.zeros(B, V)
    bias_BV[:, 2] = 100.0
    verified, output, _ = verify(target, in_graph=True, monkeypatch=monkeypatch, logit_bias=bias_BV)
    assert verified.choices_BW.tolist() == [[2] * W] * B
    assert output.next_token_logits.dtype == torch.float32


@pytest.mark.parametrize(
    "fields",
    [
        {"is_all_greedy": False},
        {"return_logprob": True},
        {"has_grammar": True},
        {"logit_bias": torch.zeros(B, V)},
        {"has_custom_logit_processor": True},
    ],
)
def test_options_that_want_more_than_the_argmax(target: TargetModel, fields: dict[str, Any]) -> None:
    draft = Draft(torch.zeros(B, K, dtype=torch.int64))
    assert target._all_argmax(a_batch(), draft)
    assert not target._all_argmax(a_batch(**fields), draft)


def test_drawn_drafts_and_penalties_want_more_than_the_argmax(target: TargetModel) -> None:
    draft = Draft(torch.zeros(B, K, dtype=torch.int64))
    assert not target._all_argmax(a_batch(), dataclasses.replace(draft, q=torch.zeros(B, K - 1, V)))
    params = SimpleNamespace(frequency_penalty=0.5, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0)
    batch = a_batch(reqs=[SimpleNamespace(sampling_params=params)])
    assert target._all_argmax(batch, draft), "no request that runs is known to ask"
    target._penalties._outputs = {"known": object()}  # type: ignore[assignment]
    assert not target._all_argmax(batch, draft)


def test_a_captured_pass_chooses_and_injects_for_all_of_its_tokens(target: TargetModel, injected: Injected) -> None:
    [hook] = target.runner.capture_tail_hooks
    features_ND, positions_N, slots_N = torch.randn(B * K, FEATURES), torch.arange(B * K), torch.arange(B * K) + 9
    forward_batch = SimpleNamespace(positions=positions_N, out_cache_loc=slots_N)
    logits_NV = torch.randn(B * K, V)
    hook(object(), SimpleNamespace(hidden_states=features_ND, next_token_logits=logits_NV), forward_batch, B * K)
    assert target._choices is not None
    assert target._choices.tokens(B, K).tolist() == logits_NV.argmax(dim=1).view(B, K).tolist()
    [call] = injected.calls
    assert all(got is given for got, given in zip(call, (features_ND, positions_N, slots_N), strict=True))


def test_without_graphs_there_is_no_hook(injected: Injected, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not a_target(injected, Backend.DISABLED, monkeypatch).runner.capture_tail_hooks


class Graphs:
    """Captured passes for at most `max_requests`, which note what they verify."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.verified: list[torch.Tensor] = []

    def hold(self, num_requests: int) -> bool:
        return num_requests <= self.max_requests

    def verify(self, tokens_BK: torch.Tensor) -> Any:
        self.verified.append(tokens_BK)
        return "output"


@pytest.mark.parametrize(("max_requests", "width", "replayed"), [(B, K, True), (B, W, False), (B - 1, K, False)])
def test_whole_blocks_are_verified_by_the_rounds_graphs_and_all_else_by_sglang(
    max_requests: int, width: int, replayed: bool, injected: Injected, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = a_target(injected, Backend.FULL, monkeypatch)
    graphs = Graphs(max_requests)
    target.init_graphs(injected, GreedyChoices(OPS, B, K, torch.device("cpu")), graphs)  # type: ignore[arg-type]
    ids_BK = torch.arange(B * K).view(B, K)
    lens = torch.tensor([4, 9])

    def prepare(self: Any, batch: Any, worker: Any, defer_metadata_init: bool) -> Any:
        return "forward batch", True

    monkeypatch.setattr(target_model.DFlashVerifyInput, "prepare_for_verify", prepare)
    target.worker.forward_batch_generation = lambda batch, forward_batch, is_verify: (forward_batch, is_verify)
    round_ = Round(lens, lens, lens, lens, 13, ("a", "b"))
    result = target._forward(SimpleNamespace(), round_, Block(ids_BK, ids_BK, ids_BK, None), ids_BK[:, :width])
    if replayed:
        assert [tokens_BK.tolist() for tokens_BK in graphs.verified] == [ids_BK.tolist()]
        assert (result.logits_output, result.can_run_cuda_graph) == ("output", True)
    else:
        assert not graphs.verified
        assert result == ("forward batch", True)
