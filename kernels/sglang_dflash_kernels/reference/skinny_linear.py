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

    A sum has S parts of consecutive inputs (`contracts.skinny_share`), added up in their order.

    Args:
        x_NI: bfloat16 or float16, shape [N, I], 1 <= N <= 64, any row stride.
        weight_OI: of x's dtype, shape [O, I], contiguous; O and I multiples of 64.
        bias_O: of x's dtype, shape [O], or None.
        out_NO: output of x's dtype, shape [N, O].
        partial_SNO: float32 scratch, shape [S, N, O], contiguous, S <= 16. `skinny_splits(O, I)` is fast.
        arrived_T: int32, shape [O // 64]: zeros, and zeros again afterwards. Two launches may not share one at a time.
    """
    _, _, inputs = contracts.skinny_linear(
        x_NI, weight_OI, bias_O, out_NO=out_NO, partial_SNO=partial_SNO, arrived_T=arrived_T
    )
    share = contracts.skinny_share(inputs, partial_SNO.shape[0])
    total_NO = torch.zeros(out_NO.shape, device=out_NO.device)
    for x_NS, weight_OS in zip(x_NI.split(share, dim=1), weight_OI.split(share, dim=1), strict=True):
        total_NO += x_NS.float() @ weight_OS.float().T
    out_NO.copy_(total_NO if bias_O is None else total_NO + bias_O.float())
