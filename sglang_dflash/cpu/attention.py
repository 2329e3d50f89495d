"""The attention backend of the CPU engine: prefill, decode and TARGET_VERIFY over SGLang's token-granular KV pool.

SGLang's own CPU backends serve no TARGET_VERIFY. This one has a single path for every mode: a request contributes
`num_queries` rows that stand at the end of `num_keys` keys, and one call of scaled_dot_product_attention in float32
answers a slice of them. So the logits of a token that is verified and those of the same token in plain decoding
differ by the rounding of matrix shapes only. A bfloat16 pool is read in float32 too: on one query over 1,000 keys
PyTorch's bfloat16 kernel took 1.0 ms and the float32 one 0.2 ms (one thread, 9 heads of 64), and it is less exact.

The lengths of a batch, as SGLang gives them:

    mode            num_queries                num_keys
    EXTEND, MIXED   extend_seq_lens[i]         seq_lens[i], which counts the queries
    DECODE          1                          seq_lens[i], which counts the query
    TARGET_VERIFY   W, or verify_lens[i]       seq_lens[i] + num_queries: seq_lens leaves the block out

Query j of a request stands at position p = num_keys - num_queries + j. It sees keys 0..p in a causal layer and all
of them in an ENCODER_ONLY one. A layer with sliding_window_size w >= 0 sees at most w keys before its own, and in an
ENCODER_ONLY layer at most w after it: SGLang's models pass their window less one, so w leaves the query's own key out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# Rows of one attention call. Bounds the mask to 512 x num_keys floats; longer prefills skip the keys after each slice.
MAX_QUERIES = 512

Slots = torch.Tensor | slice  # int64 (num_keys,), or a range where the slots are consecutive: then keys are not copied


@dataclass(frozen=True)
class Request:
    """One request's part of a forward batch."""

    rows: slice  # its queries among the batch's tokens
    num_keys: int
    slots: Slots  # of keys 0..num_keys-1 in the full pool
    window_slots: Slots | None  # of the same keys in the sliding-window pool, None where there is none
    # Masks by (first row, causal, window). They are the same in every layer, so each is made once a forward.
    masks: dict[tuple[int, bool, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def num_queries(self) -> int:
        return self.rows.stop - self.rows.start


class CpuAttnBackend(AttentionBackend):
    """Serves one model runner (target or drafter). See the module's docstring for the lengths and the masks."""

    def __init__(self, model_runner: ModelRunner):
        super().__init__()
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.pool = model_runner.token_to_kv_pool
        self.window_pool = self.pool if isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0 else None
        self.requests: list[Request] = []
        self.window_write_loc: torch.Tensor | None = None

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Read the batch's lengths and slots once for all layers."""
        self.requests = []
        start = 0
        for row, (num_queries, num_keys) in zip(forward_batch.req_pool_indices.tolist(), _lengths(forward_batch)):
            slots = self.req_to_token[row, :num_keys].long()
            self.requests.append(
                Request(
                    rows=slice(start, start + num_queries),
                    num_keys=num_keys,
                    slots=_as_range(slots),
                    window_slots=_as_range(self._translate(slots)) if self.window_pool is not None else None,
                )
            )
            start += num_queries
        self.window_write_loc = None
        if self.window_pool is not None and forward_batch.out_cache_loc is not None:
            self.window_write_loc = self._translate(forward_batch.out_cache_loc)

    def _translate(self, slots: torch.Tensor) -> torch.Tensor:
        assert self.window_pool is not None, "only a sliding-window pool has a second slot space"
        return self.window_pool.translate_loc_from_full_to_swa(slots)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Store k and v at out_cache_loc, then attend. q (N, Hq*Dk), k (N, Hk, Dk), v (N, Hk, Dv) -> (N, Hq*Dv).

        Raises ValueError for a layer that needs cross attention or a logit cap.
        """
        if layer.is_cross_attention or layer.logit_cap > 0:
            raise ValueError(
                "expected decoder self attention without a logit cap, got a layer with one of them; "
                "the CPU engine serves models such as Llama, Qwen3 and SmolLM2"
            )
        if save_kv_cache and k is not None and v is not None:
            loc = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=self.window_write_loc)
            self.pool.set_kv_buffer(layer, loc, k, v)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        keys = self.pool.get_key_buffer(layer.layer_id)
        values = self.pool.get_value_buffer(layer.layer_id)
        windowed = self.window_pool is not None and self.window_pool.layers_mapping[layer.layer_id][1]
        for request in self.requests:
            slots = request.window_slots if windowed else request.slots
            out[request.rows] = _attend(q[request.rows], keys[slots], values[slots], request, layer)
        return out.flatten(1)

    # A decode step is an extend by one token: `init_forward_metadata` read its lengths.
    forward_decode = forward_extend


def _lengths(forward_batch: ForwardBatch) -> list[tuple[int, int]]:
    """(num_queries, num_keys) of every request, by the table of the module's docstring."""
    seq_lens = forward_batch.seq_lens.tolist()
    mode = forward_batch.forward_mode
    if mode.is_target_verify():
        spec_info = forward_batch.spec_info
        assert getattr(spec_info, "topk", 1) in (None, 1), "a tree of drafts needs a mask that this backend has not"
        layout = getattr(spec_info, "ragged_verify_layout", None)
        if layout is not None:
            widths = layout.verify_lens.tolist()
        else:
            widths = [forward_batch.out_cache_loc.shape[0] // max(len(seq_lens), 1)] * len(seq_lens)
        return [(width, seq_len + width) for width, seq_len in zip(widths, seq_lens)]
    if mode.is_decode_or_idle():
        return [(1, seq_len) for seq_len in seq_lens]
    return list(zip(forward_batch.extend_seq_lens.tolist(), seq_lens))


def _as_range(slots: torch.Tensor) -> Slots:
    """The same slots as a slice where they are consecutive, as those of a lone request mostly are."""
    first = int(slots[0])
    last = first + slots.shape[0]
    if torch.equal(slots, torch.arange(first, last)):
        return slice(first, last)
    return slots


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: Request, layer: RadixAttention) -> torch.Tensor:
    """q (num_queries, Hq, Dk), k (num_keys, Hk, Dk), v (num_keys, Hk, Dv) -> (num_queries, Hq, Dv) in q's dtype."""
    q_heads, k_heads, v_heads = (x.float().transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    causal = layer.attn_type == AttentionType.DECODER
    outputs = []
    for first in range(0, request.num_queries, MAX_QUERIES):
        last = min(first + MAX_QUERIES, request.num_queries)
        num_keys = request.num_keys - (request.num_queries - last) if causal else request.num_keys
        outputs.append(
            scaled_dot_product_attention(
                q_heads[:, :, first:last],
                k_heads[:, :, :num_keys],
                v_heads[:, :, :num_keys],
                attn_mask=_mask(request, first, last, num_keys, causal, layer.sliding_window_size),
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
        )
    return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1).to(q.dtype)


def _mask(
    request: Request, first: int, last: int, num_keys: int, causal: bool, window: int | None
) -> torch.Tensor | None:
    """Float32 (last - first, num_keys) of 0 and -inf for queries first..last-1, None where every key is seen."""
    window = -1 if window is None else window
    key = (first, causal, window)
    if key not in request.masks:
        position = request.num_keys - request.num_queries + torch.arange(first, last).unsqueeze(1)
        keys = torch.arange(num_keys).unsqueeze(0)
        hidden = torch.zeros(last - first, num_keys, dtype=torch.bool)
        if causal:
            hidden |= keys > position
        if window >= 0:
            hidden |= keys < position - window
            hidden |= keys > position + window
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        request.masks[key] = mask if bool(hidden.any()) else None
    return request.masks[key]
