"""Reference of `accept_greedy`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts


def accept_greedy(
    tokens_BK: torch.Tensor,
    target_BW: torch.Tensor,
    seq_lens_B: torch.Tensor,
    widths_B: torch.Tensor | None,
    *,
    commit_B: torch.Tensor,
    bonus_B: torch.Tensor,
    tokens_BW: torch.Tensor,
    new_lens_B: torch.Tensor,
) -> None:
    """Accept the longest run of drafts that the target would have chosen itself, and add its next token.

    With w = widths[b] verified columns, a = the number of leading i < w-1 with tokens[b, i+1] == target[b, i]:

        commit[b] = a + 1, bonus[b] = target[b, a], new_lens[b] = seq_lens[b] + commit[b]
        tokens_BW[b] = the a accepted drafts, the bonus token, zeros

    A padded row, w = 0, commits nothing: commit 0, bonus 0, tokens 0, new length = old length.

    Args:
        tokens_BK: int64, shape [B, K]: the anchor, then the drafts; columns from W on are not read.
        target_BW: int64, shape [B, W], 1 <= W <= min(K, 64): the target's argmax after each of these tokens.
        seq_lens_B: int32 or int64, shape [B].
        widths_B: int32 or int64, shape [B], 0 <= w <= W; None verifies W columns of every row.
        commit_B: int32 output, shape [B].
        bonus_B, new_lens_B: int64 outputs, shape [B]; new_lens_B may be seq_lens_B itself.
        tokens_BW: int64 output, shape [B, W], any row stride.
    """
    size, width = contracts.accept_greedy(
        tokens_BK,
        target_BW,
        seq_lens_B,
        widths_B,
        commit_B=commit_B,
        bonus_B=bonus_B,
        tokens_BW=tokens_BW,
        new_lens_B=new_lens_B,
    )
    if size == 0:
        return
    column = torch.arange(width, device=target_BW.device)
    widths = torch.full_like(commit_B, width) if widths_B is None else widths_B
    matches = (tokens_BK[:, 1:width] == target_BW[:, :-1]) & (column[1:] < widths[:, None])
    accepted = matches.long().cumprod(dim=1).sum(dim=1)
    active = widths > 0
    # An accepted draft equals the target's token, so the committed tokens are a prefix of the target's row.
    committed = (column <= accepted[:, None]) & active[:, None]
    bonus_B.copy_(target_BW.gather(1, accepted[:, None])[:, 0].masked_fill(~active, 0))
    commit_B.copy_(committed.sum(dim=1))
    tokens_BW.copy_(target_BW.masked_fill(~committed, 0))
    new_lens_B.copy_(seq_lens_B + commit_B)
