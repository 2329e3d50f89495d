"""The DFlash drafter as a plain torch module, one request at a time.

A drafter is a few Qwen3-style layers over a block of K tokens: the anchor (the last committed token), then K-1 mask
tokens. One pass fills all masks at once: slot k's output is the draft of the token k places after the anchor. What lets
so small a model draft well is that the target's hidden states of every committed token are put into the key/value cache
of each of its layers ("injected"): the drafter attends to what the target already worked out about the context.

Shape letters: N context tokens, K block tokens, D concatenated target features, H hidden size, V vocabulary, A query
heads, G key/value heads, E head dimension.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_dflash.checkpoint import DrafterConfig, load_tensors, read_config


class Context:
    """Keys and values of the committed tokens, for each draft layer. Filled by `Drafter.inject`."""

    def __init__(self, num_layers: int) -> None:
        self.kv: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers  # each (G, N, E)

    @property
    def num_tokens(self) -> int:
        return 0 if self.kv[0] is None else self.kv[0][0].shape[1]

    def append(self, layer: int, keys_GNE: torch.Tensor, values_GNE: torch.Tensor) -> None:
        self.kv[layer] = self.joined(layer, keys_GNE, values_GNE)

    def joined(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The context's keys and values of a layer followed by the given ones; the context keeps its own."""
        if (old := self.kv[layer]) is None:
            return keys, values
        return torch.cat((old[0], keys), dim=1), torch.cat((old[1], values), dim=1)


class Drafter(nn.Module):
    """The drafter. It has no embedding and no head of its own: it borrows the target's.

    Parameter names are those of the checkpoint (`checkpoint.expected_tensors`).
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        if config.variant != "dflash":
            raise ValueError(f"expected a plain DFlash drafter, got variant {config.variant}; use another reference")
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(hidden, eps=eps)

    def new_context(self) -> Context:
        return Context(self.config.num_hidden_layers)

    def inject(self, features_ND: torch.Tensor, context: Context) -> None:
        """Append N committed tokens to the context, from the target's features (tapped hidden states, concatenated).

        Fusing (`fc`, `hidden_norm`) is done once and shared by all layers; each layer's own projections then give keys
        and values. The features pass no layer norm, no query, no MLP.
        """
        positions_N = torch.arange(features_ND.shape[0], device=features_ND.device) + context.num_tokens
        fused_NH = self.hidden_norm(self.fc(features_ND))
        rope = self._rope(positions_N)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            context.append(i, *layer.self_attn.keys_values(fused_NH, rope))

    def forward(self, embeds_KH: torch.Tensor, context: Context) -> torch.Tensor:
        """Hidden states (K, H) of a block that follows the context: `embeds_KH` embeds the anchor and K-1 masks."""
        positions_K = torch.arange(embeds_KH.shape[0], device=embeds_KH.device) + context.num_tokens
        rope = self._rope(positions_K)
        x_KH = embeds_KH
        for layer in self.layers:
            x_KH = layer(x_KH, rope, positions_K, context)
        return self.norm(x_KH)

    def draft_logits(
        self, target: Any, anchor: int, context: Context, block_size: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (K, H) and logits (K, V) of every slot of the block that starts with `anchor`.

        Slot k, for k of 1 and up, drafts the token k places after the anchor; slot 0 drafts nothing.
        """
        block_ids_K = torch.full(
            (block_size or self.config.block_size,), self._mask_token_id(), device=self.fc.weight.device
        )
        block_ids_K[0] = anchor
        hidden_KH = self(target.get_input_embeddings()(block_ids_K), context)
        return hidden_KH, target.get_output_embeddings()(hidden_KH)

    def _mask_token_id(self) -> int:
        if self.config.mask_token_id is None:
            raise ValueError("mask_token_id: expected an id in config.json, got none; add the id of the training")
        return self.config.mask_token_id

    def _rope(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine (N, E) of rotary embedding, in the layout whose halves rotate together (NeoX)."""
        config, device = self.config, positions_N.device
        if config.rope_scaling is None:
            exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
            frequencies, scale = config.rope_theta**-exponents, 1.0
        else:
            frequencies, scale = _scaled_frequencies(config, device)
        angles_NE = torch.outer(positions_N.float(), frequencies).repeat(1, 2)
        return angles_NE.cos() * scale, angles_NE.sin() * scale


class Layer(nn.Module):
    """A Qwen3 decoder layer: pre-norm attention, pre-norm SwiGLU."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = MLP(hidden, config.intermediate_size)

    def forward(
        self, x_KH: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions_K: torch.Tensor, context: Context
    ) -> torch.Tensor:
        x_KH = x_KH + self.self_attn(self.input_layernorm(x_KH), rope, positions_K, context)
        return x_KH + self.mlp(self.post_attention_layernorm(x_KH))


class Attention(nn.Module):
    """Queries of the block over [context; block]; keys and values of both come from the same projections."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        hidden, head, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.config, self.index = config, index
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * head, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)

    def keys_values(
        self, x_NH: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed, rotated) and values, each (G, N, E), of context or block tokens."""
        values_GNE = self._heads(self.v_proj(x_NH)) * (self.config.attention_value_scale or 1.0)
        return rotate(self.k_norm(self._heads(self.k_proj(x_NH))), rope), values_GNE

    def forward(
        self, x_KH: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions_K: torch.Tensor, context: Context
    ) -> torch.Tensor:
        queries_AKE = rotate(self.q_norm(self._heads(self.q_proj(x_KH))), rope)
        keys, values = context.joined(self.index, *self.keys_values(x_KH, rope))
        out_AKE = F.scaled_dot_product_attention(
            queries_AKE[None], keys[None], values[None], attn_mask=self._visible(positions_K), enable_gqa=True
        )[0]
        return self.o_proj(out_AKE.transpose(0, 1).flatten(1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)

    def _visible(self, positions_K: torch.Tensor) -> torch.Tensor:
        """Which of the N + K tokens each slot sees, (K, N + K): the context and, unless causal, the whole block."""
        all_positions = torch.arange(int(positions_K[-1]) + 1, device=positions_K.device)
        ahead = all_positions - positions_K[:, None]
        visible = ahead <= 0 if self.config.layer_is_causal(self.index) else torch.ones_like(ahead, dtype=torch.bool)
        window = self.config.layer_window(self.index)
        return visible if window is None else visible & (ahead.abs() < window)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x_GNE: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of heads, computed in float32 as the engine does."""
    cos_NE, sin_NE = rope
    first, second = x_GNE.float().chunk(2, dim=-1)
    return (x_GNE.float() * cos_NE + torch.cat((-second, first), dim=-1) * sin_NE).to(x_GNE.dtype)


def _scaled_frequencies(config: DrafterConfig, device: torch.device) -> tuple[torch.Tensor, float]:
    """Frequencies and amplitude of a scaled RoPE (linear, yarn, llama3), from Transformers' own formulas."""
    parameters = dict(config.rope_scaling or {}) | {"rope_theta": config.rope_theta}
    kind = parameters.setdefault("rope_type", parameters.pop("type", None))
    if kind not in ("linear", "yarn", "llama3"):
        raise ValueError(f"rope_scaling: expected linear, yarn or llama3, got {kind}; use a drafter with one of those")
    rope = Qwen3Config(
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[kind](rope, device)


def load_drafter(path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Drafter:
    """A drafter from a checkpoint directory of either form, in evaluation mode. `dtype` None keeps the file's."""
    config = read_config(path)
    tensors = load_tensors(path, config, dtype, device)
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.requires_grad_(False).eval()
