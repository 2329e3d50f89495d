"""What `bench_kernels.py` times: each op at a model's shapes, with the bytes that it must move and its check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sglang_dflash_kernels import (
    SKINNY_MAX_ROWS,
    SKINNY_TILE,
    CachePointers,
    select,
    skinny_splits,
    top1_workspace,
)
from sglang_dflash_kernels.contracts import FP8_MAX_ROWS

CUDA = torch.device("cuda")
OPS = select(CUDA)
REFERENCE = select(torch.device("cpu"))

BLOCK = 16  # K and W: the anchor and 15 drafts
CONTEXT = 40_960  # columns of the request-to-token table, rows of the cos-sin table
NUM_SLOTS = 65_536  # of the drafter's cache
PREFILL_TOKENS = (1024, 8192)
BASELINES = {
    "torch.argmax": "top1",
    "torch.matmul": "fp8_logits",
    "torch.mm": "skinny_linear",
}  # what is timed beside an op

Call = Callable[[], object]


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab: int


MODELS = (
    Model(
        "Qwen3-8B",
        layers=5,
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden_size=4096,
        intermediate_size=12_288,
        vocab=151_936,
    ),
    Model(
        "SmolLM2-135M",
        layers=5,
        heads=9,
        kv_heads=3,
        head_dim=64,
        hidden_size=576,
        intermediate_size=1536,
        vocab=49_152,
    ),
)


@dataclass
class Case:
    op: str
    model: str
    shape: str
    bytes_moved: int
    make: Callable[[], Call]  # a call on inputs of its own
    check: Call  # raises where the op is wrong


def cases_of(model: Model, batches: list[int]) -> Iterator[Case]:
    """Yields one case at a time, so that the inputs of a finished one are free."""
    for batch in batches:
        yield prepare_block_case(model, batch)
        yield accept_greedy_case(model, batch)
        yield from top1_cases(model, batch)
        yield from fp8_rows_cases(model, batch * BLOCK)
        if batch * BLOCK <= SKINNY_MAX_ROWS:
            yield from skinny_linear_cases(model, batch * BLOCK)
        if batch * (BLOCK - 1) <= FP8_MAX_ROWS:
            yield from fp8_logits_cases(model, batch * (BLOCK - 1))

    shape = (NUM_SLOTS, model.kv_heads, model.head_dim)
    keys, values = ([torch.zeros(shape, dtype=torch.bfloat16, device=CUDA) for _ in range(model.layers)] for _ in "kv")
    caches = CachePointers(keys, values)
    for num_tokens in sorted({*(batch * BLOCK for batch in batches), *PREFILL_TOKENS}):
        yield store_features_case(model, num_tokens, caches)


def ints(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=dtype, device=CUDA)


def prepare_block_case(model: Model, batch: int) -> Case:
    table = ints(NUM_SLOTS, max(batch, 64), CONTEXT, dtype=torch.int32)

    def inputs():
        rows_B = torch.randperm(table.shape[0], device=CUDA)[:batch]
        return ints(model.vocab, batch), ints(CONTEXT - BLOCK, batch), rows_B, table, model.vocab - 1

    def outputs():
        return {name: ints(2, batch, BLOCK) for name in ("ids_BK", "positions_BK", "slots_BK")}

    bytes_moved = batch * (3 * 8 + BLOCK * (4 + 3 * 8))
    return Case(
        "prepare_block",
        model.name,
        f"B={batch} K={BLOCK}",
        bytes_moved,
        maker(OPS.prepare_block, inputs, outputs),
        checker("prepare_block", inputs, outputs, assert_equal),
    )


def accept_greedy_case(model: Model, batch: int) -> Case:
    def inputs():
        return ints(2, batch, BLOCK), ints(2, batch, BLOCK), ints(CONTEXT, batch), None

    def outputs():
        return {
            "commit_B": ints(2, batch, dtype=torch.int32),
            "bonus_B": ints(2, batch),
            "tokens_BW": ints(2, batch, BLOCK),
            "new_lens_B": ints(2, batch),
        }

    bytes_moved = batch * (3 * BLOCK * 8 + 8 + 4 + 8 + 8)
    return Case(
        "accept_greedy",
        model.name,
        f"B={batch} W={BLOCK}",
        bytes_moved,
        maker(OPS.accept_greedy, inputs, outputs),
        checker("accept_greedy", inputs, outputs, assert_equal),
    )


def store_features_case(model: Model, num_tokens: int, caches: CachePointers) -> Case:
    width = 2 * model.kv_heads * model.head_dim
    constants = {
        "k_norm_LD": torch.rand(model.layers, model.head_dim, device=CUDA).bfloat16(),
        "eps_L": torch.full((model.layers,), 1e-6, device=CUDA),
        "cos_sin_PR": torch.randn(CONTEXT, model.head_dim, device=CUDA),
        "value_scale": 1.0,
    }

    def inputs():
        kv_NLE = torch.randn(num_tokens, model.layers, width, device=CUDA).bfloat16()
        slots_N = torch.randperm(NUM_SLOTS, device=CUDA)[:num_tokens]
        return kv_NLE, ints(CONTEXT, num_tokens), slots_N

    def outputs():
        return constants | {"caches": caches}

    def check() -> None:
        arguments, tensors = inputs(), [*caches.key_caches, *caches.value_caches]
        for tensor in tensors:
            tensor.zero_()
        OPS.store_features(*arguments, **outputs())
        ours = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        REFERENCE.store_features(*arguments, **outputs())
        for got, wanted in zip(ours, tensors):
            # Two roundings to bfloat16 apart at most, and float32 noise where a rotation cancels.
            torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=1e-4)

    element_bytes = 2 + caches.dtype.itemsize
    bytes_moved = num_tokens * (model.layers * width * element_bytes + model.head_dim * 4 + 16)
    make = maker(OPS.store_features, inputs, outputs)
    return Case("store_features", model.name, f"N={num_tokens}", bytes_moved, make, check)


def top1_cases(model: Model, batch: int) -> list[Case]:
    num_rows = batch * (BLOCK - 1)
    workspace = top1_workspace(num_rows, CUDA)

    def inputs():
        return (torch.randn(num_rows, model.vocab, dtype=torch.bfloat16, device=CUDA),)

    def outputs():
        return {
            "tokens_N": ints(2, num_rows),
            "confidence_N": torch.zeros(num_rows, device=CUDA),
            "workspace": workspace,
        }

    def argmax(logits_NV, *, tokens_N, confidence_N, workspace) -> None:
        torch.argmax(logits_NV, dim=1, out=tokens_N)

    def same(ours, oracle) -> None:
        assert torch.equal(ours["tokens_N"], oracle["tokens_N"]), "top1 differs from torch.argmax"
        torch.testing.assert_close(ours["confidence_N"], oracle["confidence_N"], rtol=1e-5, atol=0)

    check = checker("top1", inputs, outputs, same)
    bytes_moved = num_rows * model.vocab * 2
    shape = f"N={num_rows} V={model.vocab}"
    return [
        Case("top1", model.name, shape, bytes_moved, maker(OPS.top1, inputs, outputs), check),
        Case("torch.argmax", model.name, shape, bytes_moved, maker(argmax, inputs, outputs), lambda: None),
    ]


def fp8_logits_cases(model: Model, num_rows: int) -> list[Case]:
    def hidden():
        return torch.randn(num_rows, model.hidden_size, dtype=torch.bfloat16, device=CUDA)

    def head():
        return torch.randn(model.vocab, model.hidden_size, dtype=torch.bfloat16, device=CUDA)

    def fp8_inputs():
        scale_V = (0.5 + torch.rand(model.vocab, device=CUDA)) / math.sqrt(model.hidden_size)
        return hidden(), head().to(torch.float8_e4m3fn), scale_V

    def dense_inputs():
        return hidden(), head().T

    def logits():
        return torch.zeros(num_rows, model.vocab, dtype=torch.bfloat16, device=CUDA)

    def outputs():
        return {"logits_NV": logits()}

    def close(ours, oracle) -> None:
        # Logits of order one, sums in another order, and a hidden state in the middle of two FP8 numbers is either.
        torch.testing.assert_close(ours["logits_NV"], oracle["logits_NV"], rtol=2.0**-7, atol=2.0**-4)

    check = checker("fp8_logits", fp8_inputs, outputs, close)
    shape = f"N={num_rows} V={model.vocab}"
    num_weights, rows_bytes = model.vocab * model.hidden_size, 2 * num_rows * (model.hidden_size + model.vocab)
    ours = maker(OPS.fp8_logits, fp8_inputs, outputs)
    dense = maker(torch.matmul, dense_inputs, lambda: {"out": logits()})
    return [
        Case("fp8_logits", model.name, shape, num_weights + 4 * model.vocab + rows_bytes, ours, check),
        Case("torch.matmul", model.name, shape, 2 * num_weights + rows_bytes, dense, lambda: None),
    ]


def fp8_rows_cases(model: Model, num_rows: int) -> list[Case]:
    """The products' inputs: a norm's and an activation's rows."""
    hidden, inner = model.hidden_size, model.intermediate_size
    weight_H = torch.rand(hidden, device=CUDA).bfloat16()

    def norm_inputs():
        x_NH, residual_NH = torch.randn(2, num_rows, hidden, dtype=torch.bfloat16, device=CUDA)
        return x_NH, residual_NH, weight_H, 1e-6

    def silu_inputs():
        return (torch.randn(num_rows, 2 * inner, dtype=torch.bfloat16, device=CUDA),)

    def case(op: str, inputs, name: str, columns: int, bytes_moved: int) -> Case:
        def outputs():
            out = torch.zeros(num_rows, columns, device=CUDA).to(torch.float8_e4m3fn)
            return {name: out, "scale_N": torch.zeros(num_rows, device=CUDA)}

        def close(ours, oracle) -> None:
            # A number in the middle of two of FP8's is either.
            rows = [out[name].float() * out["scale_N"][:, None] for out in (ours, oracle)]
            torch.testing.assert_close(*rows, rtol=2.0**-3, atol=2.0**-6)

        make = maker(getattr(OPS, op), inputs, outputs)
        return Case(op, model.name, f"N={num_rows}", bytes_moved, make, checker(op, inputs, outputs, close))

    return [
        case("round_fp8", lambda: norm_inputs()[:1], "out_NH", hidden, num_rows * (3 * hidden + 4)),
        case("rms_norm_fp8", norm_inputs, "out_NH", hidden, num_rows * (7 * hidden + 4) + 2 * hidden),
        case("silu_mul_fp8", silu_inputs, "out_NI", inner, num_rows * (5 * inner + 4)),
    ]


def skinny_linear_cases(model: Model, num_rows: int) -> Iterator[Case]:
    """A target layer's products."""
    width = model.heads * model.head_dim
    shapes = {
        "qkv": (width + 2 * model.kv_heads * model.head_dim, model.hidden_size),
        "o": (model.hidden_size, width),
        "gate_up": (2 * model.intermediate_size, model.hidden_size),
        "down": (model.hidden_size, model.intermediate_size),
    }
    for name, (outputs, inputs) in shapes.items():
        yield from skinny_linear_case(model, f"N={num_rows} {name}", num_rows, outputs, inputs)


def skinny_linear_case(model: Model, shape: str, num_rows: int, outputs: int, inputs: int) -> list[Case]:
    def arguments():
        return (
            torch.randn(num_rows, inputs, dtype=torch.bfloat16, device=CUDA),
            torch.randn(outputs, inputs, dtype=torch.bfloat16, device=CUDA) / math.sqrt(inputs),
            None,
        )

    def dense_arguments():
        x_NI, weight_OI, _ = arguments()
        return x_NI, weight_OI.T

    def out():
        return torch.zeros(num_rows, outputs, dtype=torch.bfloat16, device=CUDA)

    def results():
        return {
            "out_NO": out(),
            "partial_SNO": torch.zeros(skinny_splits(outputs, inputs), num_rows, outputs, device=CUDA),
            "arrived_T": torch.zeros(outputs // SKINNY_TILE, dtype=torch.int32, device=CUDA),
        }

    def close(ours, oracle) -> None:
        # Of order one, and sums in another order.
        torch.testing.assert_close(ours["out_NO"], oracle["out_NO"], rtol=2.0**-7, atol=2.0**-10)

    bytes_moved = 2 * (outputs * inputs + num_rows * (outputs + inputs))
    check = checker("skinny_linear", arguments, results, close)
    ours = maker(OPS.skinny_linear, arguments, results)
    dense = maker(torch.mm, dense_arguments, lambda: {"out": out()})
    return [
        Case("skinny_linear", model.name, shape, bytes_moved, ours, check),
        Case("torch.mm", model.name, shape, bytes_moved, dense, lambda: None),
    ]


def checker(
    op: str, inputs: Callable[[], tuple], outputs: Callable[[], dict], judge: Callable[[dict, dict], None]
) -> Call:
    """The op and its reference on the same inputs, each on a copy of its own; `judge` raises where outputs differ."""

    def check() -> None:
        arguments, ours, oracle = inputs(), outputs(), outputs()
        again = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)
        getattr(OPS, op)(*arguments, **ours)
        getattr(REFERENCE, op)(*again, **oracle)
        judge(ours, oracle)

    return check


def maker(op: Callable[..., object], inputs: Callable[[], tuple], outputs: Callable[[], dict]) -> Callable[[], Call]:
    def make() -> Call:
        arguments, keywords = inputs(), outputs()
        return lambda: op(*arguments, **keywords)

    return make


def assert_equal(ours: dict[str, torch.Tensor], oracle: dict[str, torch.Tensor]) -> None:
    for name, tensor in ours.items():
        assert torch.equal(tensor, oracle[name]), f"{name} differs from the reference"
