"""Training blocks: where they start, what they see, what they should say.

A sequence has S tokens, prompt and answer. A block of K tokens starts at an anchor, a token of the answer: it is the
anchor and K-1 masks, and slot k should predict the token k places after the anchor. The block sees the target's
features of the tokens strictly before its anchor, and itself; never another block, and never a feature of the anchor or
of what it should predict (arXiv 2602.06036, appendix A.1).

Shape letters: B sequences, S tokens, A blocks of a sequence, K tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch.

    Attributes:
        anchors_BA: int64, positions of the anchors, ascending in a sequence.
        labels_BAK: int64, the token each slot should predict; slot 0's is the anchor itself and not a label.
        valid_BAK: bool, slots with a label: not slot 0, not past the answer's end, not of a block that is filling only.
    """

    anchors_BA: torch.Tensor
    labels_BAK: torch.Tensor
    valid_BAK: torch.Tensor

    @property
    def positions_BAK(self) -> torch.Tensor:
        block_size = self.labels_BAK.shape[-1]
        return self.anchors_BA[..., None] + torch.arange(block_size, device=self.anchors_BA.device)


def draw(
    ids_BS: torch.Tensor,
    num_prompt_B: torch.Tensor,
    lengths_B: torch.Tensor,
    num_anchors: int,
    block_size: int,
    generator: torch.Generator,
) -> Blocks:
    """Draw `num_anchors` anchors a sequence, without replacement, among the answer's tokens that have a successor.

    A sequence with fewer such tokens gets them all, and blocks without valid slots to fill up.

    Args:
        ids_BS: int64 tokens, padded on the right.
        num_prompt_B: int64, tokens of the prompt.
        lengths_B: int64, tokens of prompt and answer.
        generator: on the device of `ids_BS`.
    """
    device, (num_sequences, num_tokens) = ids_BS.device, ids_BS.shape
    at_S = torch.arange(num_tokens, device=device)
    eligible_BS = (at_S >= num_prompt_B[:, None]) & (at_S < lengths_B[:, None] - 1)
    keys_BS = torch.rand(num_sequences, num_tokens, generator=generator, device=device).masked_fill(~eligible_BS, -1.0)
    if num_tokens < num_anchors:
        keys_BS = torch.nn.functional.pad(keys_BS, (0, num_anchors - num_tokens), value=-1.0)
    keys_BA, chosen_BA = keys_BS.topk(num_anchors, dim=1)
    drawn_BA = keys_BA >= 0
    # Blocks without an anchor of their own sort last and stand on the last token.
    anchors_BA, order_BA = torch.where(drawn_BA, chosen_BA, num_tokens).sort(dim=1)
    drawn_BA = drawn_BA.gather(1, order_BA)
    anchors_BA = anchors_BA.clamp(max=num_tokens - 1)
    positions_BAK = anchors_BA[..., None] + torch.arange(block_size, device=device)
    inside_BAK = positions_BAK < lengths_B[:, None, None]
    labels_BAK = ids_BS.gather(1, positions_BAK.clamp(max=num_tokens - 1).flatten(1)).view(positions_BAK.shape)
    valid_BAK = inside_BAK & drawn_BA[..., None]
    valid_BAK[..., 0] = False
    return Blocks(anchors_BA, labels_BAK, valid_BAK)


def visible(
    anchors_BA: torch.Tensor, num_tokens: int, block_size: int, causal: bool, window: int | None
) -> torch.Tensor:
    """Which keys each slot sees: bool (B, A * K, S + A * K); the keys are S context tokens, then all blocks' own.

    Args:
        anchors_BA: int64 positions.
        causal: a slot sees only the slots before it, and itself.
        window: a slot sees only tokens less than this many places away; None for no limit.
    """
    device, (num_sequences, num_blocks) = anchors_BA.device, anchors_BA.shape
    slot_K = torch.arange(block_size, device=device)
    position_BQ = (anchors_BA[..., None] + slot_K).flatten(1)
    anchor_BQ = anchors_BA.repeat_interleave(block_size, dim=1)
    context_S = torch.arange(num_tokens, device=device)
    context_BQS = context_S < anchor_BQ[..., None]
    block_Q = torch.arange(num_blocks, device=device).repeat_interleave(block_size)
    slot_Q = slot_K.repeat(num_blocks)
    own_QQ = block_Q[:, None] == block_Q
    if causal:
        own_QQ = own_QQ & (slot_Q[:, None] >= slot_Q)
    if window is not None:
        context_BQS = context_BQS & (position_BQ[..., None] - context_S < window)
        own_QQ = own_QQ & ((slot_Q[:, None] - slot_Q).abs() < window)
    return torch.cat([context_BQS, own_QQ.expand(num_sequences, -1, -1)], dim=-1)
