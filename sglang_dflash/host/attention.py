"""A block's attention on FlashAttention 3, planned once a pass.

SGLang plans single-token decoding ahead of its layers; in a pass over blocks each layer plans anew (a kernel of its
own, FlashAttention's `prepare_varlen_num_blocks`) and copies its queries before. Here the first layer plans for all,
inside the captured graph, and queries are read where they stand. The attention kernel and its splits are the same, and
so are the results. It serves target and drafter alike.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

_BIDIRECTIONAL = (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)


def plan_once(runner: Any) -> bool:
    """Plan the blocks of a model runner once a pass; False where its backend or its model is not one that this serves.

    Call after the runner's attention backend is made and before its graphs are captured.
    """
    layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    if not _flash_attention_3(runner.attn_backend) or not layers or not all(map(_full_attention, layers)):
        return False
    if len({_shape(layer) for layer in layers}) > 1:
        return False
    runner.attn_backend.forward_extend = PlannedBlocks(runner.attn_backend, min(layer.layer_id for layer in layers))
    return True


def _flash_attention_3(backend: Any) -> bool:
    """SGLang's backend for FlashAttention 3, without what its own path alone knows."""
    return (
        # An attribute of FlashAttentionBackend alone, which is not importable everywhere; wrappers pass it on.
        vars(backend).get("fa_impl_ver") == 3
        and envs.SGLANG_USE_SGL_FA3_KERNEL.get()
        and not backend._disable_scheduler_metadata_precompute
        and not backend.use_mla
        and backend.topk <= 1
        and backend.kv_cache_dtype_str == "auto"
        and backend.local_attn_builder is None
        and not backend.use_sliding_window_kv_pool
        and not backend.fa_skip_kv_cache
    )


def _shape(layer: RadixAttention) -> tuple[Any, ...]:
    """What a plan is made of."""
    sizes = (layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.v_head_dim)
    return (*sizes, layer.logit_cap, layer.attn_type in _BIDIRECTIONAL)


def _full_attention(layer: RadixAttention) -> bool:
    return layer.sliding_window_size in (None, -1) and not layer.is_cross_attention


class PlannedBlocks:
    """In place of a FlashAttentionBackend's `forward_extend`: passes over blocks here, all else as before."""

    def __init__(self, backend: Any, first_layer: int) -> None:
        self._backend = backend
        self._original = backend.forward_extend
        self._first_layer = first_layer
        self._plan: torch.Tensor | None = None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """The attention (N, heads * head size) of N tokens; arguments as of `FlashAttentionBackend.forward_extend`."""
        if not _plain_block(forward_batch, options):
            return self._original(q, k, v, layer, forward_batch, save_kv_cache, **options)
        backend, metadata = self._backend, self._backend.forward_metadata
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.swa_out_cache_loc)
            backend.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        key_cache, value_cache = backend.get_paged_mha_kv_cache(layer)
        common = {
            "cache_seqlens": metadata.cache_seqlens_int32,
            "cu_seqlens_q": metadata.cu_seqlens_q,
            "max_seqlen_q": metadata.max_seq_len_q,
            "causal": layer.attn_type not in _BIDIRECTIONAL,
            "num_splits": backend.num_splits,
        }
        if layer.layer_id == self._first_layer:
            self._plan = backend._get_scheduler_metadata(
                batch_size=forward_batch.batch_size,
                # The longest that the page table can hold: the attention kernel sizes its splits by the same figure.
                max_seqlen_k=metadata.page_table.shape[1] * backend.page_size,
                num_heads=layer.tp_q_head_num,
                num_heads_k=layer.tp_k_head_num,
                headdim=layer.head_dim,
                headdim_v=layer.v_head_dim,
                qkv_dtype=q.dtype,
                page_size=backend.page_size,
                has_softcap=layer.logit_cap > 0,
                **common,
            )
        out = backend.flash_attn_with_kvcache(
            q=q.view(-1, layer.tp_q_head_num, layer.head_dim),
            k_cache=key_cache,
            v_cache=value_cache,
            page_table=metadata.page_table,
            softmax_scale=layer.scaling,
            softcap=layer.logit_cap,
            scheduler_metadata=self._plan,
            **common,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _plain_block(forward_batch: Any, options: dict[str, Any]) -> bool:
    """A pass over blocks, with nothing that only SGLang's own path knows."""
    return (
        forward_batch.forward_mode.is_target_verify()
        and getattr(forward_batch, "_attn_output", None) is None
        and not any(option is not None and option is not False for option in options.values())
    )
