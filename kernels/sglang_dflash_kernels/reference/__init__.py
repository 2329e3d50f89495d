"""The ops in pure torch: the oracle of the Triton kernels and the path of devices without Triton.

Unlike the kernels they allocate, and `store_features` synchronizes a CUDA device: they are not for graph capture.
"""

from sglang_dflash_kernels.reference.accept_greedy import accept_greedy
from sglang_dflash_kernels.reference.fp8_logits import fp8_logits
from sglang_dflash_kernels.reference.prepare_block import prepare_block
from sglang_dflash_kernels.reference.rms_norm_fp8 import rms_norm_fp8
from sglang_dflash_kernels.reference.round_fp8 import round_fp8
from sglang_dflash_kernels.reference.silu_mul_fp8 import silu_mul_fp8
from sglang_dflash_kernels.reference.skinny_linear import skinny_linear
from sglang_dflash_kernels.reference.store_features import store_features
from sglang_dflash_kernels.reference.top1 import top1

__all__ = [
    "accept_greedy",
    "fp8_logits",
    "prepare_block",
    "rms_norm_fp8",
    "round_fp8",
    "silu_mul_fp8",
    "skinny_linear",
    "store_features",
    "top1",
]
