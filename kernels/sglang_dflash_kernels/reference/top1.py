"""Reference of `top1`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.top1_workspace import Top1Workspace


def top1(
    logits_NV: torch.Tensor,
    *,
    tokens_N: torch.Tensor,
    confidence_N: torch.Tensor,
    workspace: Top1Workspace | None = None,
) -> None:
    """The likeliest token of each row and its softmax probability.

    The token is the index of the first maximum, a NaN counting as the largest (as torch.argmax has it). The confidence
    is 1 / sum(exp(logit - maximum)) in float32. It is NaN where the softmax is: in a row with a NaN or +inf, and in a
    row of -inf only (token 0).

    Args:
        logits_NV: bf16, fp16 or fp32, shape [N, V], 1 <= V <= 524288, any row stride.
        tokens_N: int64 output, shape [N], or [B, C] with B * C = N and any row stride.
        confidence_N: float32 output of the same shape, with a row stride of its own.
        workspace: of `top1_workspace(max_N, device)`, max_N >= N. The reference needs none; the Triton op allocates one
            where it is None.
    """
    num_rows, _ = contracts.top1(logits_NV, tokens_N=tokens_N, confidence_N=confidence_N, workspace=workspace)
    if num_rows == 0:
        return
    logits = logits_NV.float()
    tokens = logits.argmax(dim=1)
    maximum = logits.gather(1, tokens[:, None])
    confidence = 1.0 / torch.exp(logits - maximum).sum(dim=1)
    tokens_N.copy_(tokens.view(tokens_N.shape))
    confidence_N.copy_(confidence.view(confidence_N.shape))
