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
from sglang_dflash.host.few_rows import Parts
from sglang_dflash_kernels import SKINNY_MAX_ROWS, select, skinny_splits


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
    """The reference ops; `parts` has the parts of the sums of each product."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        reference = select(torch.device("cpu"))

        def skinny_linear(*args: Any, **outputs: Any) -> None:
            self.parts.append(len(outputs["partial_SNO"]))
            reference.skinny_linear(*args, **outputs)

        self.ops = dataclasses.replace(reference, skinny_linear=skinny_linear)


def linear(inputs: int, outputs: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    layer = ReplicatedLinear(inputs, outputs, bias=bias, params_dtype=dtype)
    for parameter in layer.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape).to(dtype)
    return layer


def rows(num_rows: int, inputs: int = 128) -> torch.Tensor:
    return torch.randint(-1, 2, (num_rows, inputs)).bfloat16()


def served(*layers: Any, as_decoded: bool = False) -> tuple[int, Products]:
    products = Products()
    runner = SimpleNamespace(model=torch.nn.ModuleList(layers))
    return few_rows.serve(runner, products.ops, as_decoded=as_decoded), products


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [2, 16, SKINNY_MAX_ROWS])
def test_captured_few_rows_are_multiplied_here(host: SimpleNamespace, bias: bool, num_rows: int) -> None:
    layer, x = linear(128, 192, bias), rows(num_rows)
    expected, _ = layer(x)
    count, products = served(layer)
    got, _ = layer(x)
    assert (count, len(products.parts)) == (1, 1)
    assert torch.equal(got, expected)


def test_other_passes_are_left_to_sglang(host: SimpleNamespace) -> None:
    layer = linear(128, 64)
    _, products = served(layer)
    for x in (rows(1), rows(SKINNY_MAX_ROWS + 1), rows(6).view(2, 3, 128), rows(4).t().contiguous().t()):
        assert torch.equal(layer(x)[0], torch.nn.functional.linear(x, layer.weight))
    host.captures = False
    layer(rows(16))
    assert not products.parts


def test_a_new_weight_is_read(host: SimpleNamespace) -> None:
    layer, x = linear(128, 64), rows(16)
    _, products = served(layer)
    layer.weight = torch.nn.Parameter(-layer.weight.data, requires_grad=False)
    assert torch.equal(layer(x)[0], torch.nn.functional.linear(x, layer.weight))
    assert len(products.parts) == 1


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


class Parted:
    """Products whose numbers tell in how many parts they were summed: by SGLang by the number of rows, and by ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, by_rows: dict[int, int], ours_at_64: int = 0) -> None:
        self.ops = SimpleNamespace(skinny_linear=self._ours)
        self._ours_at_64 = ours_at_64
        by_sglang = UnquantizedLinearMethod.apply

        def apply(method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return by_sglang(method, layer, x, bias) + by_rows[len(x)]

        monkeypatch.setattr(UnquantizedLinearMethod, "apply", apply)

    def _ours(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **outputs: torch.Tensor) -> None:
        parts = len(outputs["partial_SNO"]) + (self._ours_at_64 if len(x) == 64 else 0)
        outputs["out_NO"].copy_(torch.nn.functional.linear(x, weight, bias) + parts)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("decoded", "blocks", "ours_at_64", "expected"),
    [
        ([1, 1, 1], [1, 1, 1, 1], 0, Parts(1)),
        ([1, 1, 1], [1, 1, 2, 2], 0, Parts(1)),
        ([3, 3, 3], [3, 3, 3, 3], 0, None),
        ([3, 3, 3], [3, 3, 3, 1], 0, Parts(3, above=48)),
        ([3, 3, 3], [3, 1, 3, 3], 0, Parts(3, above=16)),
        ([3, 3, 3], [1, 3, 3, 3], 0, Parts(3)),
        ([16, 16, 16], [1, 1, 1, 1], 0, Parts(16)),
        ([17, 17, 17], [1, 1, 1, 1], 0, None),
        ([3, 3, 2], [1, 1, 1, 1], 0, None),
        ([3, 3, 3], [1, 1, 1, 1], 1, None),
    ],
)
def test_parts_are_those_of_a_decoded_token(
    monkeypatch: pytest.MonkeyPatch,
    decoded: list[int],
    blocks: list[int],
    ours_at_64: int,
    expected: Parts | None,
    bias: bool,
) -> None:
    """One part is the fastest for this shape: then ours takes every number of rows."""
    assert skinny_splits(64, 128) == 1
    layer = linear(128, 64, bias)
    for parameter in layer.parameters():  # every product is the number of its parts
        parameter.data.zero_()
    by_rows = dict(zip((1, 2, 4, 16, 32, 48, 64), (*decoded, *blocks), strict=True))
    assert few_rows.parts_of_decoding(layer, Parted(monkeypatch, by_rows, ours_at_64).ops) == expected


def test_layers_whose_sums_are_not_known_are_left_to_sglang(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {64: Parts(5, above=16), 192: None}
    monkeypatch.setattr(few_rows, "parts_of_decoding", lambda layer, ops: parts[len(layer.weight)])
    layers = [linear(128, 64), linear(128, 192), linear(128, 64)]
    with caplog.at_level("INFO"):
        count, products = served(*layers, as_decoded=True)
    assert count == 2
    assert "64x128: 5 above 16 rows, 192x128: left to SGLang" in caplog.text
    for layer in layers:
        layer(rows(16))
        layer(rows(17))
    assert products.parts == [5, 5]


def test_a_drafter_s_layers_are_all_served(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "parts_of_decoding", lambda layer, ops: None)
    layer = linear(2048, 64)
    count, products = served(layer)
    layer(rows(16, 2048))
    assert (count, products.parts) == (1, [skinny_splits(64, 2048)])


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
