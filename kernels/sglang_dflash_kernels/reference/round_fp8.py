"""Reference of `round_fp8`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.reference.fp8_rows import store_rounded


def round_fp8(x_NH: torch.Tensor, *, out_NH: torch.Tensor, scale_N: torch.Tensor) -> None:
    """Rows in FP8 (E4M3) with a scale a row: scale[n] = max(|x[n]|) / 448, out[n] = fp8(x[n] / scale[n]).

    Args:
        x_NH: float, shape [N, H], any row stride.
        out_NH: float8_e4m3fn output, shape [N, H], any row stride.
        scale_N: float32 output, shape [N].
    """
    contracts.round_fp8(x_NH, out_NH=out_NH, scale_N=scale_N)
    store_rounded(x_NH.float(), out_NH, scale_N)
