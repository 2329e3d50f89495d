"""Verification's attention on FlashAttention 3, planned once a pass.

SGLang plans single-token decoding ahead of its layers; of a pass over blocks each layer plans anew (a kernel of its
own, FlashAttention's `prepare_varlen_num_blocks`) and copies its queries before. Here the first layer plans for all,
inside the captured graph, and queries are read where they stand. The attention kernel and its number of splits are the
same, and so are the results. It serves target and drafter alike; what it does not know goes SGLang's own way.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

_BIDIRECTIONAL = (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)


def forward_extend(
    original: Any,
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **options: Any,
) -> torch.Tensor:
    """In place of `FlashAttentionBackend.forward_extend`, whose arguments these are; (N, heads * head size)."""
    if not _plain_block(self, k, layer, forward_batch, options):
        return original(self, q, k, v, layer, forward_batch, save_kv_cache, **options)
    planned = self.forward_metadata
    if save_kv_cache:
        where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=planned.swa_out_cache_loc)
        self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
    key_cache, value_cache = self.get_paged_mha_kv_cache(layer)
    common = {"cache_seqlens": planned.cache_seqlens_int32, "cu_seqlens_q": planned.cu_seqlens_q}
    common |= {"max_seqlen_q": planned.max_seq_len_q, "causal": layer.attn_type not in _BIDIRECTIONAL}
    common["num_splits"] = self.num_splits
    if layer.layer_id == 0:
        self.dflash_schedule = self._get_scheduler_metadata(
            batch_size=forward_batch.batch_size,
            # The longest that the page table can hold: the attention kernel sizes its splits by the same figure.
            max_seqlen_k=planned.page_table.shape[1] * self.page_size,
            num_heads=layer.tp_q_head_num,
            num_heads_k=layer.tp_k_head_num,
            headdim=layer.head_dim,
            headdim_v=layer.v_head_dim,
            qkv_dtype=q.dtype,
            page_size=self.page_size,
            has_softcap=layer.logit_cap > 0,
            **common,
        )
    out = self.flash_attn_with_kvcache(
        q=q.view(-1, layer.tp_q_head_num, layer.head_dim),
        k_cache=key_cache,
        v_cache=value_cache,
        page_table=planned.page_table,
        softmax_scale=layer.scaling,
        softcap=layer.logit_cap,
        scheduler_metadata=self.dflash_schedule,
        **common,
    )
    return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _plain_block(self: Any, k: torch.Tensor | None, layer: Any, forward_batch: Any, options: dict[str, Any]) -> bool:
    """A pass over blocks through a layer of full attention, with nothing that only SGLang's own path knows."""
    return (
        forward_batch.forward_mode.is_target_verify()
        and k is not None
        and self.fa_impl_ver == 3
        and not self.use_mla
        and self.topk <= 1
        and self.kv_cache_dtype_str == "auto"
        and self.local_attn_builder is None
        and not self.use_sliding_window_kv_pool
        and layer.sliding_window_size in (None, -1)
        and not layer.is_cross_attention
        and getattr(forward_batch, "_attn_output", None) is None
        and not any(option is not None and option is not False for option in options.values())
    )
