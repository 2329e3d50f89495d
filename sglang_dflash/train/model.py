"""The drafter as it is trained: many blocks of many sequences in one pass, the same weights as the reference.

Shape letters: see `blocks`; D concatenated features, H hidden size, Q = A * K block tokens of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex

from sglang_dflash.reference.drafter import Attention, Drafter, Layer, rotate
from sglang_dflash.train import blocks
from sglang_dflash.train.blocks import Blocks

Rope = tuple[torch.Tensor, torch.Tensor]


class BlockDrafter(Drafter):
    """`reference.drafter.Drafter` over batches of blocks; parameters and their names are the reference's."""

    # On a GPU a layer is compiled, with an attention that skips what no block sees: most of the keys.
    compiled = False

    def forward_blocks(
        self, features_BSD: torch.Tensor, drawn: Blocks, embedding: torch.nn.Module, mask_token_id: int
    ) -> torch.Tensor:
        """Hidden states (B, A, K, H) of every block.

        Args:
            features_BSD: tapped hidden states of the sequences; a block does not see those from its anchor on.
            drawn: the blocks.
            embedding: the target's, frozen.
        """
        num_tokens, block_size = features_BSD.shape[1], drawn.labels_BAK.shape[-1]
        ids_BAK = torch.full_like(drawn.labels_BAK, mask_token_id)
        ids_BAK[..., 0] = drawn.labels_BAK[..., 0]
        x_BQH = embedding(ids_BAK.flatten(1))
        fused_BSH = self.hidden_norm(self.fc(features_BSD))
        context_rope = self._rope(torch.arange(num_tokens, device=x_BQH.device))
        cos, sin = self._rope(drawn.positions_BAK.flatten())
        cos, sin = (part.view(x_BQH.shape[0], 1, -1, part.shape[-1]) for part in (cos, sin))
        masks: dict[Any, Any] = {}
        for index, layer in enumerate(self.layers):
            kind = (self.config.layer_is_causal(index), self.config.layer_window(index))
            if kind not in masks:
                seen_by = block_mask if self.compiled else blocks.visible
                masks[kind] = seen_by(drawn.anchors_BA, num_tokens, block_size, *kind)
            assert isinstance(layer, Layer)
            forward = _compiled_layer if self.compiled else _layer
            x_BQH = forward(layer, x_BQH, fused_BSH, (cos, sin), context_rope, masks[kind])
        return self.norm(x_BQH).view(*drawn.labels_BAK.shape, -1)


def _layer(
    layer: Layer, x_BQH: torch.Tensor, fused_BSH: torch.Tensor, block_rope: Rope, context_rope: Rope, sees: Any
) -> torch.Tensor:
    x_BQH = x_BQH + _attend(layer.self_attn, layer.input_layernorm(x_BQH), fused_BSH, block_rope, context_rope, sees)
    return x_BQH + layer.mlp(layer.post_attention_layernorm(x_BQH))


_compiled_layer = torch.compile(_layer, dynamic=False, fullgraph=True)
_compiled_block_mask = torch.compile(flex.create_block_mask, dynamic=False)


def _attend(
    attention: Attention,
    x_BQH: torch.Tensor,
    fused_BSH: torch.Tensor,
    block_rope: Rope,
    context_rope: Rope,
    sees: Any,
) -> torch.Tensor:
    """Queries of the blocks over the context's and the blocks' own keys."""

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, attention.config.head_dim)).transpose(1, 2)

    def keys_values(x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        values = heads(attention.v_proj(x)) * (attention.config.attention_value_scale or 1.0)
        return rotate(attention.k_norm(heads(attention.k_proj(x))), rope), values

    queries = rotate(attention.q_norm(heads(attention.q_proj(x_BQH))), block_rope)
    pairs = zip(keys_values(fused_BSH, context_rope), keys_values(x_BQH, block_rope))
    keys, values = (torch.cat(pair, dim=2) for pair in pairs)
    if isinstance(sees, torch.Tensor):
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=sees[:, None], enable_gqa=True)
    else:
        # Norms leave queries and keys in float32 where the values are in the compute dtype.
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        out = flex.flex_attention(queries, keys, values, block_mask=sees, enable_gqa=True)
    return attention.o_proj(out.transpose(1, 2).flatten(2))


def block_mask(
    anchors_BA: torch.Tensor, num_tokens: int, block_size: int, causal: bool, window: int | None
) -> flex.BlockMask:
    """`blocks.visible`, for flex attention."""

    def sees(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        block, slot = query // block_size, query % block_size
        anchor = anchors_BA[b, block]
        other_block, other_slot = (key - num_tokens) // block_size, (key - num_tokens) % block_size
        context, own = key < anchor, (key >= num_tokens) & (other_block == block)
        if causal:
            own = own & (other_slot <= slot)
        if window is not None:
            context = context & (anchor + slot - key < window)
            own = own & ((slot - other_slot).abs() < window)
        return context | own

    num_sequences, num_blocks = anchors_BA.shape
    num_queries = num_blocks * block_size
    sizes = (num_sequences, None, num_queries, num_tokens + num_queries)
    return _compiled_block_mask(sees, *sizes, device=anchors_BA.device)
