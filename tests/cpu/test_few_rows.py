"""Which dense layers multiply few rows by this package's kernel, in which passes, and that the product is SGLang's."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.unquant import Bf16GemmBackend, UnquantizedLinearMethod

from sglang_dflash.host import few_rows
from sglang_dflash_kernels import SKINNY_MAX_ROWS, select


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's settings on a Hopper card while it captures."""
    state = SimpleNamespace(
        hopper=True,
        captures=True,
        backend=Bf16GemmBackend.AUTO,
        deterministic=SimpleNamespace(enable_deterministic_inference=False, rl_on_policy_target=None),
    )
    monkeypatch.setattr(few_rows, "_is_hopper", lambda device: state.hopper)
    monkeypatch.setattr(few_rows, "get_is_capture_mode", lambda: state.captures)
    monkeypatch.setattr(few_rows, "get_bf16_gemm_backend", lambda: state.backend)
    monkeypatch.setattr(few_rows, "get_exec", lambda: state)
    return state


class Products:
    """The reference ops, counting."""

    def __init__(self) -> None:
        self.count = 0
        reference = select(torch.device("cpu"))

        def skinny_linear(*args: Any, **outputs: Any) -> None:
            self.count += 1
            reference.skinny_linear(*args, **outputs)

        self.ops = dataclasses.replace(reference, skinny_linear=skinny_linear)


def linear(inputs: int, outputs: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    layer = ReplicatedLinear(inputs, outputs, bias=bias, params_dtype=dtype)
    for parameter in layer.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape).to(dtype)
    return layer


def rows(num_rows: int, inputs: int = 128) -> torch.Tensor:
    return torch.randint(-1, 2, (num_rows, inputs)).bfloat16()


def served(*layers: Any) -> tuple[int, Products]:
    products = Products()
    return few_rows.serve(SimpleNamespace(model=torch.nn.ModuleList(layers)), products.ops), products


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [2, 16, SKINNY_MAX_ROWS])
def test_captured_few_rows_are_multiplied_here(host: SimpleNamespace, bias: bool, num_rows: int) -> None:
    layer, x = linear(128, 192, bias), rows(num_rows)
    expected, _ = layer(x)
    count, products = served(layer)
    got, _ = layer(x)
    assert (count, products.count) == (1, 1)
    assert torch.equal(got, expected)


def test_other_passes_are_left_to_sglang(host: SimpleNamespace) -> None:
    layer = linear(128, 64)
    _, products = served(layer)
    for x in (rows(1), rows(SKINNY_MAX_ROWS + 1), rows(6).view(2, 3, 128), rows(4).t().contiguous().t()):
        assert torch.equal(layer(x)[0], torch.nn.functional.linear(x, layer.weight))
    host.captures = False
    layer(rows(16))
    assert products.count == 0


def test_a_new_weight_is_read(host: SimpleNamespace) -> None:
    layer, x = linear(128, 64), rows(16)
    _, products = served(layer)
    layer.weight = torch.nn.Parameter(-layer.weight.data, requires_grad=False)
    assert torch.equal(layer(x)[0], torch.nn.functional.linear(x, layer.weight))
    assert products.count == 1


def test_only_dense_tiled_layers_of_16_bits_are_served(host: SimpleNamespace) -> None:
    class Quantized(UnquantizedLinearMethod):
        pass

    quantized = linear(128, 64)
    quantized.quant_method = Quantized()
    transposed = linear(128, 128)
    transposed.weight.data = transposed.weight.data.t()
    offloaded = linear(128, 64).to("meta")
    others = (offloaded, linear(128, 65), linear(72, 64), linear(128, 64, dtype=torch.float32), quantized, transposed)
    assert served(torch.nn.Linear(128, 64).bfloat16(), *others)[0] == 0


@pytest.mark.parametrize("what", ["hopper", "backend", "invariant", "on_policy"])
def test_servers_that_are_left_to_sglang(host: SimpleNamespace, what: str) -> None:
    layer = linear(128, 64)
    if what == "hopper":
        host.hopper = False
    elif what == "backend":
        host.backend = Bf16GemmBackend.TORCH
    elif what == "invariant":
        host.deterministic.enable_deterministic_inference = True
    else:
        host.deterministic.rl_on_policy_target = "fsdp"
    assert served(layer)[0] == 0
    assert type(layer.quant_method) is UnquantizedLinearMethod


def test_a_cpu_is_no_hopper() -> None:
    assert not few_rows._is_hopper(torch.device("cpu"))
