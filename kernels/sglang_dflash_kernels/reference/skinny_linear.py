"""Reference of `skinny_linear`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts


def skinny_linear(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    *,
    out_NO: torch.Tensor,
    partial_SNO: torch.Tensor,
    arrived_T: torch.Tensor,
) -> None:
    """x @ weight.T + bias of a few rows, summed in float32 and rounded once.

    Args:
        x_NI: bfloat16 or float16, shape [N, I], 1 <= N <= 64, any row stride.
        weight_OI: of x's dtype, shape [O, I], contiguous; O and I multiples of 64.
        bias_O: of x's dtype, shape [O], or None.
        out_NO: output of x's dtype, shape [N, O].
        partial_SNO: float32 scratch, shape [S, N, O], contiguous, S = `skinny_splits(O, I)`.
        arrived_T: int32, shape [O // 64]: zeros, and zeros again afterwards. Two launches may not share one at a time.
    """
    contracts.skinny_linear(x_NI, weight_OI, bias_O, out_NO=out_NO, partial_SNO=partial_SNO, arrived_T=arrived_T)
    total_NO = x_NI.float() @ weight_OI.float().T
    out_NO.copy_(total_NO if bias_O is None else total_NO + bias_O.float())
