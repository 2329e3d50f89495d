"""The drafter as it is trained: many blocks of many sequences in one pass, the same weights as the reference.

Shape letters: see `blocks`; D concatenated features, H hidden size, Q = A * K block tokens of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sglang_dflash.reference.drafter import Attention, Drafter, Layer, rotate
from sglang_dflash.train import blocks
from sglang_dflash.train.blocks import Blocks


class BlockDrafter(Drafter):
    """`reference.drafter.Drafter` over batches of blocks; parameters and their names are the reference's."""

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
        block_rope = tuple(part.view(x_BQH.shape[0], 1, -1, part.shape[-1]) for part in (cos, sin))
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            sees = blocks.visible(
                drawn.anchors_BA,
                num_tokens,
                block_size,
                self.config.layer_is_causal(index),
                self.config.layer_window(index),
            )
            x_BQH = x_BQH + _attend(
                layer.self_attn, layer.input_layernorm(x_BQH), fused_BSH, block_rope, context_rope, sees
            )
            x_BQH = x_BQH + layer.mlp(layer.post_attention_layernorm(x_BQH))
        return self.norm(x_BQH).view(*drawn.labels_BAK.shape, -1)


def _attend(
    attention: Attention,
    x_BQH: torch.Tensor,
    fused_BSH: torch.Tensor,
    block_rope: Any,
    context_rope: Any,
    sees_BQN: torch.Tensor,
) -> torch.Tensor:
    """Queries of the blocks over the context's and the blocks' own keys."""

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, attention.config.head_dim)).transpose(1, 2)

    def keys_values(x: torch.Tensor, rope: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values = heads(attention.v_proj(x)) * (attention.config.attention_value_scale or 1.0)
        return rotate(attention.k_norm(heads(attention.k_proj(x))), rope), values

    queries = rotate(attention.q_norm(heads(attention.q_proj(x_BQH))), block_rope)
    pairs = zip(keys_values(fused_BSH, context_rope), keys_values(x_BQH, block_rope), strict=True)
    keys, values = (torch.cat(pair, dim=2) for pair in pairs)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=sees_BQN[:, None], enable_gqa=True)
    return attention.o_proj(out.transpose(1, 2).flatten(2))
