"""What kernels share that leave a row in FP8: its scale, and its numbers rounded by it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_rounded(value, out, scale_ptr, mask, FP8_MAX: tl.constexpr, FP8_LEAST: tl.constexpr):
    """A row that one program holds; where `mask` is false its numbers must be 0."""
    scale = tl.maximum(tl.max(tl.abs(value), axis=0), FP8_LEAST) / FP8_MAX
    tl.store(scale_ptr, scale)
    tl.store(out, (value / scale).to(tl.float8e4nv), mask=mask)


def num_warps(columns: int) -> int:
    """For rows of so many columns: 16 of them a thread, more in rows of over 8,192."""
    return min(max(triton.next_power_of_2(columns) // 512, 1), 16)
