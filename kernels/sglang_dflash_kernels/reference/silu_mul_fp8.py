"""Reference of `silu_mul_fp8`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.reference.fp8_rows import store_rounded


def silu_mul_fp8(gate_up_NI: torch.Tensor, *, out_NI: torch.Tensor, scale_N: torch.Tensor) -> None:
    """SwiGLU's product, silu(gate) * up, in FP8 (E4M3) with a scale a row.

        y[n] = silu(gate[n]) * up[n]          scale[n] = max(|y[n]|) / 448          out[n] = fp8(y[n] / scale[n])

    Args:
        gate_up_NI: float, shape [N, 2 I], any row stride: a row's gate, then its up projection.
        out_NI: float8_e4m3fn output, shape [N, I], any row stride.
        scale_N: float32 output, shape [N].
    """
    contracts.silu_mul_fp8(gate_up_NI, out_NI=out_NI, scale_N=scale_N)
    gate_NI, up_NI = gate_up_NI.float().chunk(2, dim=1)
    store_rounded(torch.nn.functional.silu(gate_NI) * up_NI, out_NI, scale_N)
