"""CpuAttnBackend against dense attention written as loops in float64, on SGLang's own pools. Starts no engine.

Slots that no request owns hold NaN, so reading one of them shows.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.cpu import bootstrap

if bootstrap.wanted():
    bootstrap.install()

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.cpu import attention

Q_HEADS, K_HEADS, DIM, NUM_SLOTS, CONTEXT = 6, 2, 8, 512, 200
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


class Bench:
    """A KV pool with requests whose keys and values are known, in slots that are scattered page by page."""

    def __init__(self, totals: list[int], page_size: int = 1, dtype: torch.dtype = torch.float32, window_pool=False):
        generator = torch.Generator().manual_seed(sum(totals) + page_size)
        self.dtype, self.page_size = dtype, page_size
        make = {"page_size": page_size, "dtype": dtype, "head_num": K_HEADS, "head_dim": DIM, "device": "cpu"}
        if window_pool:
            self.pool = SWAKVPool(
                size=NUM_SLOTS, size_swa=NUM_SLOTS, swa_attention_layer_ids=[1], full_attention_layer_ids=[0],
                token_to_kv_pool_class=MHATokenToKVPool, enable_memory_saver=False, **make,
            )  # fmt: skip
            self.pool.register_mapping(torch.arange(NUM_SLOTS + page_size).roll(7))
            buffers = [self.pool.get_kv_buffer(0), self.pool.get_kv_buffer(1)]
        else:
            self.pool = MHATokenToKVPool(size=NUM_SLOTS, layer_num=1, enable_memory_saver=False, **make)
            buffers = [self.pool.get_kv_buffer(0)]
        for key_buffer, value_buffer in buffers:
            key_buffer.fill_(float("nan"))
            value_buffer.fill_(float("nan"))
        self.table = ReqToTokenPool(size=16, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
        pages = torch.randperm(NUM_SLOTS // page_size - 1, generator=generator) + 1
        self.rows, self.keys, self.values = [], [], []
        for i, total in enumerate(totals):
            num_pages = -(-total // page_size)
            mine, pages = pages[:num_pages], pages[num_pages:]
            slots = (mine[:, None] * page_size + torch.arange(page_size)).reshape(-1)[:total]
            row = 2 * i + 1
            self.table.req_to_token[row, :total] = slots.int()
            self.rows.append(row)
            self.keys.append(torch.randn(total, K_HEADS, DIM, generator=generator).to(dtype))
            self.values.append(torch.randn(total, K_HEADS, DIM, generator=generator).to(dtype))
        self.queries = [torch.randn(total, Q_HEADS, DIM, generator=generator).to(dtype) for total in totals]
        runner = SimpleNamespace(req_to_token_pool=self.table, token_to_kv_pool=self.pool)
        self.backend = attention.CpuAttnBackend(runner)

    def slots(self, i: int, first: int, last: int) -> torch.Tensor:
        return self.table.req_to_token[self.rows[i], first:last].long()

    def run(self, mode: ForwardMode, layer: RadixAttention, spans: list[tuple[int, int]], layout=None) -> torch.Tensor:
        """Forward tokens first..last-1 of every request; the tokens before them must be cached. -> (N, Q_HEADS, DIM)"""
        first = torch.tensor([span[0] for span in spans])
        last = torch.tensor([span[1] for span in spans])
        batch = SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=torch.tensor(self.rows),
            seq_lens=first if mode.is_target_verify() else last,
            extend_seq_lens=last - first if mode.is_extend() and not mode.is_target_verify() else None,
            out_cache_loc=torch.cat([self.slots(i, *span) for i, span in enumerate(spans)]),
            out_cache_loc_is_physical=False,
            spec_info=SimpleNamespace(topk=1, ragged_verify_layout=layout) if mode.is_target_verify() else None,
        )

        def flat(parts):
            return torch.cat([part[slice(*span)] for part, span in zip(parts, spans)])

        self.backend.init_forward_metadata(batch)
        self.batch = batch
        self.qkv = flat(self.queries).reshape(-1, Q_HEADS * DIM), flat(self.keys), flat(self.values)
        return self.next_layer(layer)

    def next_layer(self, layer: RadixAttention) -> torch.Tensor:
        """Another layer of the same forward, with the same queries, keys and values."""
        return self.backend.forward(*self.qkv, layer, self.batch).view(-1, Q_HEADS, DIM)

    def expect(self, layer: RadixAttention, spans: list[tuple[int, int]]) -> torch.Tensor:
        return torch.cat([self._dense(i, layer, *span) for i, span in enumerate(spans)])

    def _dense(self, i: int, layer: RadixAttention, first: int, last: int) -> torch.Tensor:
        out = torch.zeros(last - first, Q_HEADS, DIM, dtype=torch.float64)
        causal, window = layer.attn_type == AttentionType.DECODER, layer.sliding_window_size
        for position in range(first, last):
            seen = [key for key in range(last) if not (causal and key > position)]
            if window >= 0:
                seen = [key for key in seen if abs(key - position) <= window]
            for head in range(Q_HEADS):
                kv_head = head * K_HEADS // Q_HEADS
                keys = self.keys[i][seen, kv_head].double()
                scores = keys @ self.queries[i][position, head].double() * layer.scaling
                out[position - first, head] = scores.softmax(0) @ self.values[i][seen, kv_head].double()
        return out


def make_layer(attn_type=AttentionType.DECODER, window: int = -1, layer_id: int = 0, **options) -> RadixAttention:
    return RadixAttention(
        Q_HEADS, DIM, 0.3, K_HEADS, layer_id, sliding_window_size=window, attn_type=attn_type, **options
    )


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def prefill(bench: Bench, layer: RadixAttention, lengths: list[int]) -> None:
    bench.run(ForwardMode.EXTEND, layer, [(0, length) for length in lengths])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [-1, 0, 5])
@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_ONLY])
def test_verify_block_over_prefixes_of_different_lengths(attn_type, window, page_size, dtype):
    prefixes, width = [1, 33, 100], 7
    bench = Bench([p + width for p in prefixes], page_size, dtype)
    layer = make_layer(attn_type, window or -1)
    layer.sliding_window_size = window  # RadixAttention itself reads 0 as none
    prefill(bench, layer, prefixes)
    spans = [(p, p + width) for p in prefixes]
    assert_close(bench.run(ForwardMode.TARGET_VERIFY, layer, spans), bench.expect(layer, spans), dtype)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("max_queries", [3, 512])
@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_ONLY])
def test_prefill_in_chunks(attn_type, window, max_queries, page_size, monkeypatch):
    monkeypatch.setattr(attention, "MAX_QUERIES", max_queries)
    bench = Bench([20, 11, 64], page_size)
    layer = make_layer(attn_type, window)
    for spans in ([(0, 8), (0, 11), (0, 1)], [(8, 20), (10, 11), (1, 64)]):
        assert_close(bench.run(ForwardMode.EXTEND, layer, spans), bench.expect(layer, spans))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [-1, 5])
def test_decode_one_token_of_each_request(window, page_size):
    bench = Bench([1, 40, 17], page_size)
    layer = make_layer(window=window)
    bench.run(ForwardMode.EXTEND, layer, [(0, 1), (0, 39), (0, 16)])
    spans = [(0, 1), (39, 40), (16, 17)]
    assert_close(bench.run(ForwardMode.DECODE, layer, spans), bench.expect(layer, spans))


def test_verify_answers_as_decode_does():
    """The rows of a verified block are those of as many decode steps, up to float32 rounding."""
    prefixes, width = [3, 90], 16
    verified, decoded = (Bench([p + width for p in prefixes]) for _ in range(2))
    layer = make_layer()
    prefill(verified, layer, prefixes)
    prefill(decoded, layer, prefixes)
    block = verified.run(ForwardMode.TARGET_VERIFY, layer, [(p, p + width) for p in prefixes])
    for j in range(width):
        step = decoded.run(ForwardMode.DECODE, layer, [(p + j, p + j + 1) for p in prefixes])
        torch.testing.assert_close(step, block.view(2, width, Q_HEADS, DIM)[:, j], atol=5e-7, rtol=1e-6)


def test_a_lone_request_in_consecutive_slots():
    bench = Bench([60])
    bench.table.req_to_token[bench.rows[0], :60] = torch.arange(9, 69)
    layer = make_layer()
    prefill(bench, layer, [50])
    spans = [(50, 60)]
    assert_close(bench.run(ForwardMode.TARGET_VERIFY, layer, spans), bench.expect(layer, spans))
    assert bench.backend.requests[0].slots == slice(9, 69)


def test_rejected_tokens_are_overwritten_by_the_next_block():
    bench = Bench([30])
    layer = make_layer()
    prefill(bench, layer, [10])
    committed = bench.keys[0].clone()
    bench.keys[0][14:18] = 9.0  # a first block whose last four tokens are rejected
    bench.run(ForwardMode.TARGET_VERIFY, layer, [(10, 18)])
    bench.keys[0] = committed
    spans = [(14, 22)]
    assert_close(bench.run(ForwardMode.TARGET_VERIFY, layer, spans), bench.expect(layer, spans))


def test_each_request_verifies_its_own_width():
    prefixes, widths = [12, 5, 40], [1, 8, 3]
    spans = [(p, p + w) for p, w in zip(prefixes, widths)]
    bench = Bench([last for _, last in spans])
    layer = make_layer()
    prefill(bench, layer, prefixes)
    layout = SimpleNamespace(verify_lens=torch.tensor(widths, dtype=torch.int32))
    assert_close(bench.run(ForwardMode.TARGET_VERIFY, layer, spans, layout), bench.expect(layer, spans))


@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_ONLY])
def test_window_layers_keep_their_keys_in_the_window_pool(attn_type):
    bench = Bench([30, 9], window_pool=True)
    spans = [(22, 30), (1, 9)]
    for layer in (make_layer(attn_type, layer_id=0), make_layer(attn_type, window=6, layer_id=1)):
        prefill(bench, layer, [22, 1])
        assert_close(bench.run(ForwardMode.TARGET_VERIFY, layer, spans), bench.expect(layer, spans))


def test_layers_of_one_forward_may_differ():
    bench, spans = Bench([30, 25]), [(10, 18), (15, 23)]
    layers = [make_layer(kind, window) for kind in AttentionType for window in (-1, 3, 6)]
    prefill(bench, layers[0], [10, 15])
    bench.run(ForwardMode.TARGET_VERIFY, layers[0], spans)
    for layer in layers:
        assert_close(bench.next_layer(layer), bench.expect(layer, spans))


def test_an_empty_batch_verifies_nothing():
    bench = Bench([4])
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, req_pool_indices=torch.empty(0, dtype=torch.int64),
        seq_lens=torch.empty(0, dtype=torch.int64), out_cache_loc=torch.empty(0, dtype=torch.int64),
        out_cache_loc_is_physical=False, spec_info=None,
    )  # fmt: skip
    bench.backend.init_forward_metadata(batch)
    empty = torch.empty(0, K_HEADS, DIM)
    out = bench.backend.forward(torch.empty(0, Q_HEADS * DIM), empty, empty, make_layer(), batch)
    assert out.shape == (0, Q_HEADS * DIM)


@pytest.mark.parametrize("options", [{"logit_cap": 30.0}, {"is_cross_attention": True}])
def test_layers_that_are_not_served_are_refused(options):
    bench = Bench([4])
    with pytest.raises(ValueError, match="without a logit cap"):
        bench.run(ForwardMode.EXTEND, make_layer(**options), [(0, 4)])
