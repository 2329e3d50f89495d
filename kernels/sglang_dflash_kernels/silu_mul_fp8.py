"""Triton `silu_mul_fp8`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.fp8_rows import launch


def silu_mul_fp8(gate_up_NI: torch.Tensor, *, out_NI: torch.Tensor, scale_N: torch.Tensor) -> None:
    """Contract: `reference.silu_mul_fp8`. Capture-safe, allocates nothing."""
    contracts.silu_mul_fp8(gate_up_NI, out_NI=out_NI, scale_N=scale_N)
    launch("silu_mul", gate_up_NI, out_NI, scale_N)
