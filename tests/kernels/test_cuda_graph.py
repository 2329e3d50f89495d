"""Each Triton op captured once, replayed with other inputs, against the reference on the same inputs."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash_kernels import SKINNY_TILE, CachePointers, select, skinny_splits, top1_workspace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")

CUDA = torch.device("cuda")
B, K, W, CONTEXT, VOCAB, HIDDEN = 5, 16, 7, 300, 49_152, 576
LAYERS, KV_HEADS, HEAD_DIM, NUM_SLOTS = 5, 3, 64, 512


def random_ints(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, high, shape, device=CUDA, dtype=dtype)


def capture(call) -> torch.cuda.CUDAGraph:
    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def check_replays(call, inputs, outputs, refresh, tolerance=0.0) -> None:
    """`call(ops, outputs)` runs the op; `refresh()` gives new values for `inputs`, the tensors that it reads."""
    graph = capture(lambda: call(select(CUDA), outputs))
    oracle = [output.clone() for output in outputs]
    for _ in range(3):
        for tensor, fresh in zip(inputs, refresh()):
            tensor.copy_(fresh)
        for ours, wanted in zip(outputs, oracle):
            ours.fill_(77)
            wanted.fill_(77)
        graph.replay()
        call(select(torch.device("cpu")), oracle)
        for ours, wanted in zip(outputs, oracle):
            torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance)


def test_prepare_block():
    table = random_ints(10_000, 9, CONTEXT, dtype=torch.int32)

    def refresh():
        return random_ints(1000, B), random_ints(CONTEXT, B), random_ints(9, B)

    inputs = refresh()

    def call(ops, outputs):
        ids, positions, slots = outputs
        ops.prepare_block(*inputs, table, 999, ids_BK=ids, positions_BK=positions, slots_BK=slots)

    check_replays(call, inputs, [random_ints(9, B, K) for _ in range(3)], refresh)


def test_accept_greedy():
    def refresh():
        return random_ints(2, B, K), random_ints(2, B, W), random_ints(99, B), random_ints(W + 1, B, dtype=torch.int32)

    inputs = refresh()

    def call(ops, outputs):
        commit, bonus, tokens, new_lens = outputs
        ops.accept_greedy(*inputs, commit_B=commit, bonus_B=bonus, tokens_BW=tokens, new_lens_B=new_lens)

    outputs = [random_ints(9, B, dtype=torch.int32), random_ints(9, B), random_ints(9, B, W), random_ints(9, B)]
    check_replays(call, inputs, outputs, refresh)


def test_top1():
    workspace = top1_workspace(64, CUDA)

    def refresh():
        return (torch.randn(15, VOCAB, device=CUDA).bfloat16(),)

    inputs = refresh()

    def call(ops, outputs):
        ops.top1(*inputs, tokens_N=outputs[0], confidence_N=outputs[1], workspace=workspace)

    check_replays(call, inputs, [random_ints(9, 15), torch.zeros(15, device=CUDA)], refresh, tolerance=1e-5)


def test_fp8_logits():
    """Logits of order one, sums in another order, and a hidden state in the middle of two FP8 numbers is either."""

    def refresh():
        hidden_NH = torch.randn(15, HIDDEN, device=CUDA).bfloat16()
        weight_VH = torch.randn(VOCAB, HIDDEN, device=CUDA).to(torch.float8_e4m3fn)
        return hidden_NH, weight_VH, (0.5 + torch.rand(VOCAB, device=CUDA)) / HIDDEN**0.5

    inputs = refresh()

    def call(ops, outputs):
        ops.fp8_logits(*inputs, logits_NV=outputs[0])

    outputs = [torch.zeros(15, VOCAB, device=CUDA, dtype=torch.bfloat16)]
    check_replays(call, inputs, outputs, refresh, tolerance=2.0**-4)


@pytest.mark.parametrize(("outputs", "inputs"), [(192, 1088), (9216, 512)])
def test_skinny_linear(outputs, inputs):
    """Of whole numbers: nothing is rounded, so the order of sums does not matter."""
    splits = skinny_splits(outputs, inputs)
    arrived_T = torch.zeros(outputs // SKINNY_TILE, device=CUDA, dtype=torch.int32)
    partial_SNO = torch.zeros(splits, 16, outputs, device=CUDA)

    def refresh():
        return [torch.randint(-1, 2, shape, device=CUDA).bfloat16() for shape in ((16, inputs), (outputs, inputs))]

    tensors = refresh()

    def call(ops, results):
        ops.skinny_linear(*tensors, None, out_NO=results[0], partial_SNO=partial_SNO, arrived_T=arrived_T)

    check_replays(call, tensors, [torch.zeros(16, outputs, device=CUDA, dtype=torch.bfloat16)], refresh)
    assert not arrived_T.any()


def test_skinny_linears_in_a_row_wait_for_each_other():
    """Each reads what the one before wrote, and all share counters and scratch: permutations, so sums are exact."""
    size, length = 1024, 20
    order = torch.randperm(size, device=CUDA)
    weight = torch.eye(size, device=CUDA, dtype=torch.bfloat16)[order].contiguous()
    rows = torch.zeros(length + 1, 16, size, device=CUDA, dtype=torch.bfloat16)
    scratch = {
        "partial_SNO": torch.zeros(skinny_splits(size, size), 16, size, device=CUDA),
        "arrived_T": torch.zeros(size // SKINNY_TILE, device=CUDA, dtype=torch.int32),
    }

    def chain() -> None:
        for i in range(length):
            select(CUDA).skinny_linear(rows[i], weight, None, out_NO=rows[i + 1], **scratch)

    graph = capture(chain)
    for _ in range(50):
        rows.fill_(float("nan"))
        want = rows[0].copy_(torch.randint(-99, 100, (16, size), device=CUDA)).clone()
        graph.replay()
        for _ in range(length):
            want = want[:, order]
        assert torch.equal(rows[-1], want)


@pytest.mark.parametrize("op", ["round_fp8", "rms_norm_fp8", "silu_mul_fp8"])
def test_fp8_rows(op):
    """Within an FP8 number of the reference's, whose sums are in another order; the residual is the same."""
    columns = 2 * HIDDEN if op == "silu_mul_fp8" else HIDDEN
    weight_H = torch.rand(HIDDEN, device=CUDA)

    def refresh():
        return (torch.randn(15, columns, device=CUDA).bfloat16(),)

    inputs = refresh()

    out = torch.zeros(15, HIDDEN, device=CUDA).to(torch.float8_e4m3fn)

    def call(ops, outputs):
        residual, rows, scale = outputs
        residual.fill_(0.5)
        if op == "round_fp8":
            ops.round_fp8(*inputs, out_NH=out, scale_N=scale)
        elif op == "rms_norm_fp8":
            ops.rms_norm_fp8(*inputs, residual, weight_H, 1e-6, out_NH=out, scale_N=scale)
        else:
            ops.silu_mul_fp8(*inputs, out_NI=out, scale_N=scale)
        rows.copy_(out.float() * scale[:, None])

    outputs = [
        torch.zeros(15, HIDDEN, device=CUDA, dtype=torch.bfloat16),
        torch.zeros(15, HIDDEN, device=CUDA),
        torch.zeros(15, device=CUDA),
    ]
    check_replays(call, inputs, outputs, refresh, tolerance=2.0**-3)


def test_store_features():
    k_norm_LD = torch.rand(LAYERS, HEAD_DIM, device=CUDA)
    eps_L = torch.full((LAYERS,), 1e-6, device=CUDA)
    cos_sin_PR = torch.randn(CONTEXT, HEAD_DIM, device=CUDA)

    def refresh():
        kv_NLE = torch.randn(B * W, LAYERS, 2 * KV_HEADS * HEAD_DIM, device=CUDA).bfloat16()
        slots_N = torch.randperm(NUM_SLOTS, device=CUDA)[: B * W]
        return kv_NLE, random_ints(CONTEXT, B * W), slots_N

    inputs = refresh()
    pointers = {}

    def call(ops, outputs):
        # Addresses are read when a graph is captured and may not be rebuilt within it.
        if id(outputs) not in pointers:
            pointers[id(outputs)] = CachePointers(outputs[:LAYERS], outputs[LAYERS:])
        ops.store_features(
            *inputs,
            k_norm_LD=k_norm_LD,
            eps_L=eps_L,
            cos_sin_PR=cos_sin_PR,
            value_scale=1.0,
            caches=pointers[id(outputs)],
        )

    outputs = [torch.zeros(NUM_SLOTS, KV_HEADS, HEAD_DIM, device=CUDA) for _ in range(2 * LAYERS)]
    check_replays(call, inputs, outputs, refresh, tolerance=2e-5)
