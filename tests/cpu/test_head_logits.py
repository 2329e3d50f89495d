"""The target's logits without float32: which heads keep theirs, where they are kept, and what is chosen by them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglang_dflash_kernels as kernels
from sglang_dflash.host import head_logits
from sglang_dflash.host.head_logits import GreedyChoices

CPU = torch.device("cpu")
N, H, V = 6, 8, 10


class Processor:
    """SGLang's LogitsProcessor, of which float32 logits are told by their value."""

    def __init__(self, **fields: Any) -> None:
        plain = {
            "do_tensor_parallel_all_gather": False,
            "do_tensor_parallel_all_gather_dp_attn": False,
            "use_fp32_lm_head": False,
            "use_fp32_lm_head_output": False,
            "logit_scale": None,
            "final_logit_softcapping": None,
            "rl_on_policy_target": None,
            "vocab_size": V,
        }
        vars(self).update(plain | fields)

    def _get_logits(self, hidden: Any, head: Any, metadata: Any, bias: Any = None, use_buffer: bool = True) -> Any:
        return torch.full((hidden.shape[0], V), 7.0)


@dataclasses.dataclass
class Metadata:
    next_token_logits_buffer: torch.Tensor | None
    verifies: bool = True

    @property
    def forward_mode(self) -> Any:
        return SimpleNamespace(is_target_verify=lambda: self.verifies)


def a_runner(processor: Any, rows: int = V, dtype: torch.dtype = torch.bfloat16, **head: Any) -> Any:
    weight = torch.randn(rows, H).to(dtype)
    lm_head = SimpleNamespace(weight=weight, quant_method=None, **head)
    return SimpleNamespace(model=SimpleNamespace(logits_processor=processor, lm_head=lm_head))


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_logits, "LogitsProcessor", Processor)


@pytest.mark.parametrize("rows", [V, V + 6])
def test_the_logits_of_a_block_stay_as_the_head_says_them(rows: int) -> None:
    """In the memory that all graphs share, without the head's padded rows."""
    processor = Processor()
    runner = a_runner(processor, rows)
    assert head_logits.keep_dtype(runner)
    buffer_NV, hidden_NH = torch.zeros(N, V), torch.randn(N, H).to(torch.bfloat16)
    got = processor._get_logits(hidden_NH, runner.model.lm_head, Metadata(buffer_NV))
    assert got.dtype == torch.bfloat16
    assert got.data_ptr() == buffer_NV.data_ptr()
    assert torch.equal(got, (hidden_NH @ runner.model.lm_head.weight.T)[:, :V])


@pytest.mark.parametrize(
    ("changed", "metadata"),
    [
        ({}, Metadata(None)),
        ({}, Metadata(torch.zeros(N, V), verifies=False)),
        ({}, Metadata(torch.zeros(N // 2 - 1, V))),
        ({"embedding_bias": torch.zeros(V)}, Metadata(torch.zeros(N, V))),
        ({"use_logits_buffer": False}, Metadata(torch.zeros(N, V))),
        ({"hidden_states": torch.zeros(N, H)}, Metadata(torch.zeros(N, V))),
    ],
)
def test_all_other_logits_are_sglangs(changed: dict[str, Any], metadata: Metadata) -> None:
    processor = Processor()
    runner = a_runner(processor)
    assert head_logits.keep_dtype(runner)
    hidden_NH = changed.pop("hidden_states", torch.zeros(N, H, dtype=torch.bfloat16))
    assert (processor._get_logits(hidden_NH, runner.model.lm_head, metadata, **changed) == 7.0).all()


@pytest.mark.parametrize(
    "runner",
    [
        a_runner(None),
        a_runner(Processor(do_tensor_parallel_all_gather=True)),
        a_runner(Processor(do_tensor_parallel_all_gather_dp_attn=True)),
        a_runner(Processor(use_fp32_lm_head=True)),
        a_runner(Processor(use_fp32_lm_head_output=True)),
        a_runner(Processor(logit_scale=1.0)),
        a_runner(Processor(final_logit_softcapping=30.0)),
        a_runner(Processor(rl_on_policy_target="fsdp")),
        a_runner(type("Other", (Processor,), {})()),
        a_runner(Processor(), dtype=torch.float32),
        a_runner(Processor(), set_lora=print),
    ],
)
def test_heads_that_do_more_than_a_short_product_stay_as_they_are(runner: Any) -> None:
    before = getattr(runner.model.logits_processor, "_get_logits", None)
    assert not head_logits.keep_dtype(runner)
    assert getattr(runner.model.logits_processor, "_get_logits", None) == before


def test_a_quantized_head_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_logits, "should_apply_lm_head_quant_method", lambda head, method: method is None)
    assert not head_logits.keep_dtype(a_runner(Processor()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_choice_is_the_argmax_of_float32(dtype: torch.dtype) -> None:
    """Numbers of 16 bits that share their maximum often: the first of them, as plain decoding's argmax has it."""
    torch.manual_seed(0)
    choices = GreedyChoices(kernels.select(CPU), 5, 4, CPU)
    for num_requests in (5, 1, 3):
        logits_NV = torch.randint(-3, 4, (num_requests * 4, 700)).to(dtype)
        assert (logits_NV == logits_NV.max(dim=1, keepdim=True).values).sum() > 100 * num_requests
        choices.score(logits_NV)
        got_BW = choices.tokens(num_requests, 4)
        assert got_BW.tolist() == logits_NV.float().argmax(dim=1).view(num_requests, 4).tolist()
