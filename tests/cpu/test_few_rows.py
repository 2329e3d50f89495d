"""Which dense layers multiply few rows by this package's kernel, in which passes, and that the product is SGLang's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
        dp=SimpleNamespace(capturing_prefill_graph=False),
        backend=Bf16GemmBackend.AUTO,
        deterministic=SimpleNamespace(enable_deterministic_inference=False, rl_on_policy_target=None),
    )
    monkeypatch.setattr(few_rows, "_is_hopper", lambda device: state.hopper)
    monkeypatch.setattr(few_rows, "get_is_capture_mode", lambda: state.captures)
    monkeypatch.setattr(few_rows, "get_bf16_gemm_backend", lambda: state.backend)
    monkeypatch.setattr(few_rows, "get_exec", lambda: state)
    monkeypatch.setattr(few_rows, "get_flags", lambda: state)
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


def served(*layers: Any, decoded: Sequence[int] | None = None) -> tuple[int, Products]:
    products = Products()
    runner = SimpleNamespace(model=torch.nn.ModuleList(layers))
    return few_rows.serve(runner, products.ops, decoded=decoded), products


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
    host.dp.capturing_prefill_graph = True
    layer(rows(16))
    host.dp.capturing_prefill_graph, host.captures = False, False
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


BIAS = 32
BLOCKS = (16, 32, 48, 64)


class Parted:
    """Products of zeros whose numbers tell in how many parts they were summed, and the bias."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, by_rows: dict[int, int], ours_at: dict[int, int]) -> None:
        self.ops = SimpleNamespace(skinny_linear=self._ours)
        self._ours_at = ours_at

        def apply(method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return torch.nn.functional.linear(x, layer.weight, bias) + by_rows[len(x)]

        monkeypatch.setattr(UnquantizedLinearMethod, "apply", apply)

    def _ours(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **outputs: torch.Tensor) -> None:
        parts = len(outputs["partial_SNO"]) + self._ours_at.get(len(x), 0)
        outputs["out_NO"].copy_(torch.nn.functional.linear(x, weight, bias) + parts)


def zeros(bias: bool) -> Any:
    layer = linear(128, 64, bias)
    layer.weight.data.zero_()
    if bias:
        layer.bias.data.fill_(BIAS)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("alone", "blocks", "ours_at", "expected"),
    [
        (1, [1, 1, 1, 1], {}, (1, [16, 32, 48, 64])),
        (1, [1, 1, 2, 2], {}, (1, [16, 32, 48, 64])),
        (3, [3, 3, 3, 3], {}, None),
        (3, [3, 3, 3, 1], {}, (3, [64])),
        (3, [3, 1, 3, 1], {}, (3, [32, 64])),
        (3, [1, 1, 1, 1], {}, (3, [16, 32, 48, 64])),
        (16, [1, 1, 1, 1], {}, (16, [16, 32, 48, 64])),
        (17, [1, 1, 1, 1], {}, None),
        (3, [1, 1, 1, 1], {64: 1}, None),
        (3, [1, 1, 1, 1], {48: 1}, None),
        (3, [1, 1, 1, 1], {32: 1}, None),
    ],
)
def test_parts_are_those_of_a_decoded_token(
    monkeypatch: pytest.MonkeyPatch,
    alone: int,
    blocks: list[int],
    ours_at: dict[int, int],
    expected: tuple[int, list[int]] | None,
    bias: bool,
) -> None:
    """One part is the fastest for this shape: then all numbers of rows are taken, else those where SGLang differs."""
    assert skinny_splits(64, 128) == 1
    by_rows = {1: alone, **dict(zip(BLOCKS, blocks, strict=True))}
    assert few_rows.parts_of_decoding(zeros(bias), Parted(monkeypatch, by_rows, ours_at).ops, BLOCKS) == (
        expected and Parts(*expected)
    )


def test_a_bias_that_is_added_later_is_not_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, given = zeros(bias=True), []
    layer.skip_bias_add = True
    products = Parted(monkeypatch, {1: 3, **dict.fromkeys(BLOCKS, 1)}, {})
    ours = products.ops.skinny_linear
    products.ops.skinny_linear = lambda x, weight, bias, **outputs: (
        given.append(bias) or ours(x, weight, bias, **outputs)
    )
    assert few_rows.parts_of_decoding(layer, products.ops, BLOCKS) == Parts(3, list(BLOCKS))
    assert set(given) == {None}


def test_each_kind_of_layer_is_tried_once_and_left_to_sglang_where_nothing_fits(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def parts_of_decoding(layer: Any, ops: Any, decoded: Sequence[int]) -> Parts | None:
        tried.append(layer)
        assert decoded == BLOCKS
        return Parts(5, [16]) if len(layer.weight) == 64 else None

    monkeypatch.setattr(few_rows, "parts_of_decoding", parts_of_decoding)
    kinds = [linear(128, 64), linear(128, 192), linear(128, 64, bias=True), linear(128, 64, dtype=torch.float16)]
    with caplog.at_level("INFO"):
        count, products = served(*kinds, linear(128, 64), linear(128, 192), decoded=BLOCKS)
    assert (count, tried) == (4, kinds)
    assert "64x128 torch.bfloat16 in 5, 192x128 torch.bfloat16 in those of cuBLAS" in caplog.text
    for layer in kinds[:2]:
        layer(rows(16))
        layer(rows(32))
    assert products.parts == [5]


def test_a_drafter_s_layers_are_all_served(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "parts_of_decoding", lambda *args: None)
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
