"""Reference of `fp8_logits`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts


def fp8_logits(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, scale_V: torch.Tensor, *, logits_NV: torch.Tensor
) -> None:
    """Logits of a few rows by a head in FP8 (E4M3), hidden states rounded to FP8 as they are read.

    With the columns in parts of 128, and hidden states of part p rounded with a scale s[n, p] of their own, which makes
    the part's largest magnitude FP8's largest, 448:

        logits[n, v] = scale[v] * sum over p of s[n, p] * (fp8(hidden[n, p] / s[n, p]) . weight[v, p])

    Args:
        hidden_NH: float, shape [N, H], 1 <= N <= 16, any row stride.
        weight_VH: float8_e4m3fn, shape [V, H], contiguous.
        scale_V: float32, shape [V]: of each token's row.
        logits_NV: bfloat16 output, shape [N, V].
    """
    contracts.fp8_logits(hidden_NH, weight_VH, scale_V, logits_NV=logits_NV)
    total_NV = torch.zeros(logits_NV.shape, device=logits_NV.device)
    for hidden, weight in zip(
        hidden_NH.float().split(contracts.FP8_PART, dim=1), weight_VH.split(contracts.FP8_PART, dim=1), strict=True
    ):
        scale_N1 = hidden.abs().amax(dim=1, keepdim=True).clamp(min=contracts.FP8_LEAST) / contracts.FP8_MAX
        total_NV += scale_N1 * ((hidden / scale_N1).to(torch.float8_e4m3fn).float() @ weight.float().T)
    logits_NV.copy_(total_NV * scale_V)
