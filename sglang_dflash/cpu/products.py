"""Matrix products of the CPU engine by oneDNN.

PyTorch gives float32 products to MKL. For the few rows of a decode step MKL copies the weights into another layout in
every call; oneDNN reads them where they are. All of SmolLM2-135M's products of one step, float32, two threads on two
cores of an AMD EPYC (AVX-512), by number of rows (`sglang-dflash bench cpu-products`):

    rows        1      4     16     64
    MKL        46     74     80    160 ms
    oneDNN     31     37     54    125 ms
"""

from __future__ import annotations

import functools

import torch

# What it registers lasts as long as it does.
_library = torch.library.Library("aten", "IMPL")


@functools.cache
def register() -> None:
    """Let oneDNN compute `aten::mm` of float32 activations and weights in this process."""
    if torch.backends.mkldnn.is_available():
        _library.impl("mm", mm, "CPU", allow_override=True)


def mm(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """a @ b; by oneDNN where b is the transpose of a weight (N, K), as in a linear layer."""
    weight_NK = b_KN.T
    if a_MK.dtype == torch.float32 == weight_NK.dtype and a_MK.numel() and weight_NK.is_contiguous():
        return torch.ops.mkldnn._linear_pointwise(a_MK, weight_NK, None, "none", [], "")
    out_MN = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
    return torch.ops.aten.mm.out(a_MK, b_KN, out=out_MN)
