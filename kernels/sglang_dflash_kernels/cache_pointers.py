"""The caches of all draft layers behind two device tensors of addresses, so that one launch stores to all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Kernels store 16 bytes at a time: the widest store of one thread.
ALIGNMENT_BYTES = 16


class CachePointers:
    """Addresses of L key caches and L value caches, each of shape [num_slots, kv_heads, head_dim].

    Built once, when the pool is: it keeps the tensors alive, so the addresses stay valid as long as it lives.

    Attributes:
        key_caches, value_caches: the tensors themselves, one a layer.
        key_pointers_L, value_pointers_L: int64 on the caches' device, the address of each tensor's first element.
        num_layers, kv_heads, head_dim: sizes.
        dtype: of every cache.
        slot_stride, head_stride: in elements, of every cache.

    Raises ValueError where the caches differ in dtype, shape, strides or device, where the innermost dimension is not
    contiguous, where the dtype is not a 16 or 32 bit float, or where an address is not 16-byte aligned.
    """

    def __init__(self, key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor]) -> None:
        _check(key_caches, value_caches)
        first = key_caches[0]
        self.key_caches = list(key_caches)
        self.value_caches = list(value_caches)
        self.key_pointers_L = _addresses(self.key_caches)
        self.value_pointers_L = _addresses(self.value_caches)
        self.num_layers = len(self.key_caches)
        self.kv_heads, self.head_dim = first.shape[1], first.shape[2]
        self.dtype = first.dtype
        self.slot_stride, self.head_stride = first.stride(0), first.stride(1)


def _addresses(caches: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=caches[0].device)


def _check(key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor]) -> None:
    if not key_caches or len(key_caches) != len(value_caches):
        raise ValueError(
            f"expected one key cache and one value cache for each draft layer, got {len(key_caches)} and "
            f"{len(value_caches)}; pass two lists of equal length, at least 1"
        )
    first = key_caches[0]
    if first.dim() != 3 or first.stride(2) != 1:
        raise ValueError(
            f"expected caches of shape [num_slots, kv_heads, head_dim], contiguous in head_dim, got shape "
            f"{list(first.shape)} with strides {first.stride()}; use the pool's token-major layout"
        )
    if first.dtype not in CACHE_DTYPES:
        raise ValueError(
            f"expected caches of bfloat16, float16 or float32, got {first.dtype}; "
            "give the drafter a cache of one of these dtypes"
        )
    for cache in [*key_caches, *value_caches]:
        got = (cache.dtype, cache.shape, cache.stride(), cache.device)
        want = (first.dtype, first.shape, first.stride(), first.device)
        if got != want:
            raise ValueError(
                f"expected every cache with the dtype, shape, strides and device of the first, {want}, got {got}; "
                "allocate all layers alike"
            )
        if cache.data_ptr() % ALIGNMENT_BYTES:
            raise ValueError(
                f"expected cache addresses divisible by {ALIGNMENT_BYTES}, got {cache.data_ptr():#x}; "
                "do not slice a cache in the middle of a 16-byte word"
            )
