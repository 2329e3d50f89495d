"""The target's attention over blocks with one launch a layer less: rotation stores keys and values itself.

SGLang's rotary kernel can write what it rotated, and the values, into the KV cache; some of its models let it. Llama,
Qwen2 and Qwen3 launch a second kernel for that. Over a few tokens a launch costs what its latency is, whatever it
moves. The rotation is the same arithmetic, so the cache holds the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.kernels.fused_op import get_fused_op_backend
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models.llama import LlamaAttention
from sglang.srt.models.qwen2 import Qwen2Attention
from sglang.srt.models.qwen3 import Qwen3Attention
from sglang.srt.models.utils import apply_qk_norm, create_fused_set_kv_buffer_arg, enable_fused_set_kv_buffer
from sglang.srt.runtime_context import get_exec

# Their forward passes are projection, norm of queries and keys in Qwen3, rotation, attention, projection.
_SERVED = (LlamaAttention, Qwen2Attention, Qwen3Attention)


def fuse(runner: Any) -> int:
    """Let passes over blocks store so; the number of a model's layers that do, none where its kind is not served.

    Call after the runner's KV pool is made and before its graphs are captured.
    """
    if not _plain_pool(runner.token_to_kv_pool) or get_fused_op_backend() is not None:
        return 0
    if get_exec().deterministic.rl_on_policy_target is not None:
        return 0
    attention = [module for module in runner.model.modules() if type(module) in _SERVED and _rotates(module)]
    for module in attention:
        module.forward = partial(_forward, module, module.forward)
    return len(attention)


def _plain_pool(pool: Any) -> bool:
    return (
        type(pool) is MHATokenToKVPool
        and pool.kv_cache_layout == "nhd"
        and not pool.is_quantized_kv_cache
        and pool.dtype == torch.bfloat16
    )


def _rotates(attention: Any) -> bool:
    """Whether SGLang's kernel rotates whole heads of this layer and stores them unscaled."""
    rotary, scales = attention.rotary_emb, (attention.attn.k_scale, attention.attn.v_scale)
    return (
        isinstance(rotary, RotaryEmbedding)
        and type(rotary).forward_cuda is RotaryEmbedding.forward_cuda
        and not rotary.use_fallback_kernel
        and rotary.rotary_dim == rotary.head_size
        and scales == (None, None)
    )


def _forward(
    attention: Any, original: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
) -> torch.Tensor:
    # A rotation that torch compiles is another one, which stores nothing.
    if (
        not forward_batch.forward_mode.is_target_verify()
        or not enable_fused_set_kv_buffer(forward_batch)
        or attention.rotary_emb.is_torch_compile
    ):
        return original(positions, hidden_states, forward_batch)
    qkv, _ = attention.qkv_proj(hidden_states)
    q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    if isinstance(attention, Qwen3Attention):
        q, k = apply_qk_norm(q, k, attention.q_norm, attention.k_norm, attention.head_dim, attention.alt_stream)
    store = create_fused_set_kv_buffer_arg(v, attention.attn, forward_batch)
    q, k = attention.rotary_emb(positions, q, k, fused_set_kv_buffer_arg=store)
    output, _ = attention.o_proj(attention.attn(q, k, v, forward_batch, save_kv_cache=False))
    return output
