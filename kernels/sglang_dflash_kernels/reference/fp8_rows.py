"""What references share that leave rows in FP8."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts


def store_rounded(value: torch.Tensor, out: torch.Tensor, scale_N: torch.Tensor) -> None:
    """Each row in FP8, by the scale that makes its largest magnitude FP8's largest."""
    scale_N.copy_(value.abs().amax(dim=1).clamp(min=contracts.FP8_LEAST) / contracts.FP8_MAX)
    out.copy_(value / scale_N[:, None])
