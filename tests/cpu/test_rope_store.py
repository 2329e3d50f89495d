"""Which layers' rotation stores keys and values, and that their passes over blocks are otherwise SGLang's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import UnquantizedKVCacheMethod
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models.llama import LlamaAttention
from sglang.srt.models.qwen2 import Qwen2Attention
from sglang.srt.models.qwen3 import Qwen3Attention

from sglang_dflash.host import rope_store

HEADS, KV_HEADS, HEAD, SLOTS, TOKENS = 4, 2, 8, 11, 5


class Rotary(RotaryEmbedding):
    """A rotation by an angle a position, which stores what SGLang's kernel would store."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.head_size = self.rotary_dim = HEAD
        self.use_fallback_kernel = self.is_torch_compile = False
        self.stores = 0

    def forward(self, positions: Any, q: Any, k: Any, fused_set_kv_buffer_arg: Any = None) -> Any:
        q, k = q * torch.cos(positions)[:, None], k * torch.cos(positions)[:, None]
        if fused_set_kv_buffer_arg is not None:
            store = fused_set_kv_buffer_arg
            self.stores += 1
            store.k_buffer[store.cache_loc] = k
            store.v_buffer[store.cache_loc] = store.value
        return q, k


class Attention(torch.nn.Module):
    """SGLang's RadixAttention over the tokens of a pass: it stores keys and values unless told not to, and adds up."""

    layer_id = 0

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.pool, self.k_scale, self.v_scale = pool, None, None
        self.stores = 0

    def forward(self, q: Any, k: Any, v: Any, forward_batch: Any, save_kv_cache: bool = True) -> Any:
        if save_kv_cache:
            self.stores += 1
            self.pool.k_buffer[0].view(SLOTS, -1)[forward_batch.out_cache_loc] = k
            self.pool.v_buffer[0].view(SLOTS, -1)[forward_batch.out_cache_loc] = v
        cached = sum(
            b[0].view(SLOTS, -1)[forward_batch.out_cache_loc] for b in (self.pool.k_buffer, self.pool.v_buffer)
        )
        return q + cached.repeat(1, HEADS // KV_HEADS)


class Norm(torch.nn.Module):
    variance_epsilon = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(HEAD), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.rms_norm(x, (HEAD,), self.weight, self.variance_epsilon)


class Linear(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x), None


def made(kind: type) -> Any:
    """An attention layer of SGLang's class, with small parts of ours, and its runner."""
    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool.dtype = torch.bfloat16
    pool.kv_cache_layout, pool.quant_method = "nhd", UnquantizedKVCacheMethod.__new__(UnquantizedKVCacheMethod)
    pool.k_buffer, pool.v_buffer = (list(torch.zeros(2, 1, SLOTS, KV_HEADS, HEAD)[i]) for i in range(2))
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.q_size, layer.kv_size, layer.head_dim, layer.alt_stream = HEADS * HEAD, KV_HEADS * HEAD, HEAD, None
    layer.use_fused_qk_norm_mrope = layer.use_fused_qk_norm_rope = False
    layer.qkv_proj, layer.o_proj = Linear(6, layer.q_size + 2 * layer.kv_size), Linear(layer.q_size, 6)
    layer.q_norm, layer.k_norm = Norm(), Norm()
    layer.rotary_emb, layer.attn = Rotary(), Attention(pool)
    return layer, SimpleNamespace(token_to_kv_pool=pool, model=torch.nn.ModuleList([layer]))


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang's forward context and settings are during a pass."""
    state = SimpleNamespace(
        pool=None, on_cuda=True, forced=None, deterministic=SimpleNamespace(rl_on_policy_target=None)
    )
    pool = lambda: SimpleNamespace(  # noqa: E731
        get_key_buffer=lambda i: state.pool.k_buffer[i], get_value_buffer=lambda i: state.pool.v_buffer[i]
    )
    monkeypatch.setattr("sglang.srt.models.utils.get_token_to_kv_pool", pool)
    monkeypatch.setattr(rope_store, "enable_fused_set_kv_buffer", lambda forward_batch: state.on_cuda)
    monkeypatch.setattr(rope_store, "get_exec", lambda: state)
    monkeypatch.setattr(rope_store, "get_fused_op_backend", lambda: state.forced)
    monkeypatch.setattr("sglang.srt.models.qwen3.get_exec", lambda: state)
    settings = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=None)))
    monkeypatch.setattr("sglang.srt.models.utils.get_exec", lambda: settings)
    monkeypatch.setattr("sglang.srt.models.utils.can_use_fused_qk_norm_cpu", lambda *args: False)
    return state


def batch(verifies: bool) -> Any:
    mode = SimpleNamespace(is_target_verify=lambda: verifies, is_decode=lambda: False, is_extend=lambda: True)
    return SimpleNamespace(forward_mode=mode, out_cache_loc=torch.tensor([7, 2, 9, 3, 4]))


@pytest.mark.parametrize("kind", [LlamaAttention, Qwen2Attention, Qwen3Attention])
def test_a_pass_over_blocks_is_sglangs(kind: type, host: SimpleNamespace) -> None:
    torch.manual_seed(0)
    layer, runner = made(kind)
    host.pool, pool = runner.token_to_kv_pool, runner.token_to_kv_pool
    positions, hidden = torch.arange(3, 3 + TOKENS), torch.randn(TOKENS, 6)
    with torch.inference_mode():
        expected = layer(positions=positions, hidden_states=hidden, forward_batch=batch(True))
        cached = torch.stack([pool.k_buffer[0], pool.v_buffer[0]]).clone()
        assert cached[:, [2, 3, 4, 7, 9]].all()
        assert rope_store.fuse(runner) == 1
        for buffers in (pool.k_buffer, pool.v_buffer):
            buffers[0].zero_()
        got = layer(positions=positions, hidden_states=hidden, forward_batch=batch(True))
    assert (layer.rotary_emb.stores, layer.attn.stores) == (1, 1), "one of them in each of the two passes"
    assert torch.equal(got, expected)
    assert torch.equal(torch.stack([pool.k_buffer[0], pool.v_buffer[0]]), cached)


def test_other_passes_are_left_to_sglang(host: SimpleNamespace) -> None:
    layer, runner = made(LlamaAttention)
    host.pool = runner.token_to_kv_pool
    rope_store.fuse(runner)
    positions, hidden = torch.arange(TOKENS), torch.randn(TOKENS, 6)
    with torch.inference_mode():
        layer(positions, hidden, batch(False))
        host.on_cuda = False
        layer(positions, hidden, batch(True))
        host.on_cuda, layer.rotary_emb.is_torch_compile = True, True
        layer(positions, hidden, batch(True))
    assert (layer.rotary_emb.stores, layer.attn.stores) == (0, 3)


class OtherRotary(Rotary):
    def forward_cuda(self, *args: Any, **options: Any) -> Any:
        return None


def _another_rotation(layer: Any, runner: Any, host: Any) -> None:
    layer.rotary_emb.__class__ = OtherRotary


def _part_of_a_head(layer: Any, runner: Any, host: Any) -> None:
    layer.rotary_emb.rotary_dim //= 2


def _a_fallback_kernel(layer: Any, runner: Any, host: Any) -> None:
    layer.rotary_emb.use_fallback_kernel = True


def _scaled_keys(layer: Any, runner: Any, host: Any) -> None:
    layer.attn.k_scale = 0.5


def _another_model(layer: Any, runner: Any, host: Any) -> None:
    layer.__class__ = type("Derived", (LlamaAttention,), {})


def _another_layout(layer: Any, runner: Any, host: Any) -> None:
    runner.token_to_kv_pool.kv_cache_layout = "hnd"


def _a_quantized_cache(layer: Any, runner: Any, host: Any) -> None:
    runner.token_to_kv_pool.quant_method = None


def _float16(layer: Any, runner: Any, host: Any) -> None:
    runner.token_to_kv_pool.dtype = torch.float16


def _a_forced_backend(layer: Any, runner: Any, host: Any) -> None:
    host.forced = "torch"


def _another_pool(layer: Any, runner: Any, host: Any) -> None:
    runner.token_to_kv_pool.__class__ = type("Pool", (MHATokenToKVPool,), {})


def _on_policy(layer: Any, runner: Any, host: Any) -> None:
    host.deterministic.rl_on_policy_target = "fsdp"


@pytest.mark.parametrize(
    "change",
    [
        *(_another_rotation, _part_of_a_head, _a_fallback_kernel, _scaled_keys, _another_model),
        *(_another_layout, _a_quantized_cache, _float16, _another_pool, _on_policy, _a_forced_backend),
    ],
)
def test_what_is_not_served(change: Any, host: SimpleNamespace) -> None:
    layer, runner = made(LlamaAttention)
    change(layer, runner, host)
    assert rope_store.fuse(runner) == 0
    assert "forward" not in vars(layer)
