"""Batched decoding with buffers of fixed address: a step of any Transformers causal LM as one CUDA graph.

Prompts are left-padded, so that all rows write the same cache slot at the same step; positions count from each row's
own first token. A step reads the cache up to a window that grows in strides, and each window has a graph of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, Cache

PROMPT_STRIDE = 32  # tokens: prompts of a batch are padded to a multiple
WINDOW_STRIDE = 128  # slots: a graph for each multiple, against reading slots that nothing was written to
# Without "flash" in it: Transformers takes such a name for a FlashAttention package.
ATTENTION = "grouped_static"
KNOWN_LAYERS = ("full_attention", "sliding_attention")
# Their rotary embedding looks at the positions on the host in every step.
HOST_ROPES = ("dynamic", "longrope")


class StaticCache(Cache):
    """Keys and values of every layer, (rows, KV heads, slots, head dim), at an address that never changes.

    `slots` says where the next forward writes, `window` how many slots its attention reads.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.slots = torch.empty(0, dtype=torch.int64)
        self.window = 0
        self.pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx not in self.pairs:
            # Zeros: a masked slot has weight 0, and 0 times a NaN of fresh memory would still be NaN.
            self.pairs[layer_idx] = (self._zeros(key_states), self._zeros(value_states))
        pair = self.pairs[layer_idx]
        for stored, new in zip(pair, (key_states, value_states)):
            stored.index_copy_(2, self.slots, new)
        return pair[0][:, :, : self.window], pair[1][:, :, : self.window]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        rows, heads, _, dim = like.shape
        return like.new_zeros((rows, heads, self.num_slots, dim))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and mask are given to the model: it never needs to ask


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention under a given mask, as Transformers calls it: (B, heads, Q, dim) to (B, Q, heads, dim).

    A decode step (Q = 1) takes the query heads that share a KV head as that head's queries: the keys and values are
    read once, not copied once a query head.
    """
    extra = [name for name in ("s_aux", "softcap", "position_bias") if kwargs.get(name) is not None]
    if extra:
        raise ValueError(
            f"expected plain softmax attention, got {', '.join(extra)}; this target cannot be decoded here"
        )
    batch, heads, num_queries, dim = query.shape
    kv_heads = key.shape[1]
    if num_queries == 1:
        query = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    elif heads != kv_heads:
        key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    if num_queries == 1:
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, grouped_attention)


@contextmanager
def static_attention(model: Any) -> Iterator[None]:
    """Let the model attend with `grouped_attention`.

    Raises:
        ValueError: the model has layers or an attention that this does not compute.
    """
    config = model.config.get_text_config(decoder=True)
    others = set(getattr(config, "layer_types", None) or KNOWN_LAYERS[:1]) - set(KNOWN_LAYERS)
    if others:
        raise ValueError(f"expected layers of attention, got {', '.join(sorted(others))}; use another target")
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    if config._attn_implementation != ATTENTION:
        raise ValueError(
            f"expected a model whose attention Transformers can replace, got {type(model).__name__}; use another target"
        )
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def check_length(model: Any, num_tokens: int) -> None:
    """Refuse sequences that the model does not attend over in full."""
    config = model.config.get_text_config(decoder=True)
    limit, what = getattr(config, "max_position_embeddings", None), "the target's context"
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None) or KNOWN_LAYERS
    if window is not None and "sliding_attention" in layers and (limit is None or window < limit):
        limit, what = window, "the target's sliding window"
    if limit is not None and num_tokens > limit:
        raise ValueError(
            f"expected prompt and answer within {limit} tokens, {what}, got {num_tokens}; lower max_prompt_tokens or "
            "max_new_tokens"
        )


class Decoder:
    """Decodes batches of up to `batch_size` prompts, one after another: `prefill`, then `step` for each token."""

    def __init__(self, model: Any, batch_size: int, max_prompt_tokens: int, max_new_tokens: int) -> None:
        longest = round_up(max_prompt_tokens, PROMPT_STRIDE)
        self.num_slots = round_up(longest + max_new_tokens, WINDOW_STRIDE)
        self.model, self.batch_size, self.device = model, batch_size, model.device
        rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        if self.device.type == "cuda" and rope.get("rope_type") in HOST_ROPES:
            raise ValueError(
                f"expected a rotary embedding that a CUDA graph can hold, got {rope['rope_type']}; use a CPU"
            )
        self.cache = StaticCache(self.num_slots)
        self.lowest = torch.finfo(model.dtype).min
        zeros = torch.zeros((batch_size, 1), dtype=torch.int64, device=self.device)
        # What a step reads: the tokens, their positions, the slot written, each row's first slot.
        self.ids_B1, self.positions_B1, self.first_B1 = zeros, zeros.clone(), zeros.clone()
        self.slot = zeros[:1, 0].clone()
        self.next_slot = 0  # `slot` of the step to come, known to the host
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self.pool: Any = None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits (batch_size, V) after each prompt. Rows without a prompt hold one token 0 and mean nothing."""
        rows = [*prompts, *([[0]] * (self.batch_size - len(prompts)))]
        width = round_up(max(map(len, rows)), PROMPT_STRIDE)
        ids_BP = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=self.device)
        self.first_B1.copy_(torch.tensor([[width - len(row)] for row in rows]))
        columns_P = torch.arange(width, device=self.device)
        # A padding token sees itself: a row of the mask without an open slot has no softmax.
        visible_BPP = (columns_P >= self.first_B1[:, :, None]) & (columns_P <= columns_P[:, None])
        visible_BPP = visible_BPP | torch.eye(width, dtype=torch.bool, device=self.device)
        self.cache.slots, self.cache.window = columns_P, width
        positions_BP = (columns_P - self.first_B1).clamp(min=0)
        self.next_slot = width
        return self._forward(ids_BP, positions_BP, visible_BPP)

    def step(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Logits (batch_size, V) after one more token of each row; overwritten by the next step."""
        assert self.next_slot < self.num_slots, "more steps than max_new_tokens"
        self.ids_B1.copy_(tokens_B[:, None])
        self.slot.fill_(self.next_slot)
        torch.sub(self.slot, self.first_B1, out=self.positions_B1)
        window = round_up(self.next_slot + 1, WINDOW_STRIDE)
        self.next_slot += 1
        if self.device.type != "cuda":
            return self._decode(window)
        if window not in self.graphs:
            self.graphs[window] = self._capture(window)
        graph, logits_BV = self.graphs[window]
        graph.replay()
        return logits_BV

    def _decode(self, window: int) -> torch.Tensor:
        columns_W = torch.arange(window, device=self.device)
        visible_BW = (columns_W >= self.first_B1) & (columns_W <= self.slot)
        self.cache.slots, self.cache.window = self.slot, window
        return self._forward(self.ids_B1, self.positions_B1, visible_BW[:, None])

    def _forward(self, ids_BQ: torch.Tensor, positions_BQ: torch.Tensor, visible_BQK: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(visible_BQK.shape, dtype=self.model.dtype, device=self.device)
        mask.masked_fill_(~visible_BQK, self.lowest)
        out = self.model(
            input_ids=ids_BQ,
            attention_mask=mask[:, None],
            position_ids=positions_BQ,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _capture(self, window: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A step writes its slot before it reads, so running it twice, once to warm up, changes nothing."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._decode(window)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits_BV = self._decode(window)
        self.pool = graph.pool()
        return graph, logits_BV


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
