"""Triton `store_features`: norm, RoPE, scale and store of all draft layers in one launch.

A program takes the heads of a few consecutive tokens in one layer, as rows of a two-dimensional tile. Keys are held as
three column segments (the two rotated halves and the rest), each contiguous in memory, so that every load and store is
as wide as the row allows and the rotation stays within a thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.cache_pointers import ALIGNMENT_BYTES, CachePointers

_TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# Elements of one rotated half that a program holds. The large tile moves the most bytes a thread; the small one spreads
# a decode batch over more multiprocessors, and serves while large tiles would be fewer than FULL_GRID programs.
LARGE_TILE, LARGE_WARPS = 2048, 4
SMALL_TILE, SMALL_WARPS = 256, 1
FULL_GRID = 512


@triton.jit
def _store_keys(
    source,
    target,
    row_mask,
    norm_row,
    angle_row,
    eps,
    CACHE_DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Key norm, then rotation of the first 2 * HALF channels, then the store: a row a head of a token."""
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    half = tl.arange(0, BLOCK_HALF)[None, :]
    half_mask = row_mask & (half < HALF)
    first = tl.load(source + half, mask=half_mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + half, mask=half_mask, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    rest_column = tl.arange(0, BLOCK_REST)[None, :]
    rest_mask = row_mask & (rest_column < REST)
    rest = tl.zeros((BLOCK_ROWS, BLOCK_REST), dtype=tl.float32)
    if REST > 0:
        rest = tl.load(source + 2 * HALF + rest_column, mask=rest_mask, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]

    first *= scale * tl.load(norm_row + half, mask=half < HALF, other=0.0).to(tl.float32)
    second *= scale * tl.load(norm_row + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)
    cos = tl.load(angle_row + half, mask=half_mask, other=0.0).to(tl.float32)
    sin = tl.load(angle_row + HALF + half, mask=half_mask, other=0.0).to(tl.float32)
    tl.store(target + half, (first * cos - second * sin).to(CACHE_DTYPE), mask=half_mask)
    tl.store(target + HALF + half, (second * cos + first * sin).to(CACHE_DTYPE), mask=half_mask)
    if REST > 0:
        rest *= scale * tl.load(norm_row + 2 * HALF + rest_column, mask=rest_column < REST, other=0.0).to(tl.float32)
        tl.store(target + 2 * HALF + rest_column, rest.to(CACHE_DTYPE), mask=rest_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _store_features_kernel(
    kv_ptr,
    positions_ptr,
    slots_ptr,
    k_norm_ptr,
    eps_ptr,
    cos_sin_ptr,
    key_pointers_ptr,
    value_pointers_ptr,
    value_scale,
    num_rows,
    kv_token_stride,
    kv_layer_stride,
    k_norm_stride,
    cos_sin_stride,
    slot_stride,
    head_stride,
    CACHE_DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    layer = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = row // KV_HEADS
    head = row % KV_HEADS
    is_row = row < num_rows

    slot = tl.load(slots_ptr + token, mask=is_row, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=is_row, other=0).to(tl.int64)
    source = (kv_ptr + token.to(tl.int64) * kv_token_stride + layer * kv_layer_stride + head * HEAD_DIM)[:, None]
    offset = (slot * slot_stride + head * head_stride)[:, None]
    # An address read from memory carries no alignment: without the hint each element would be stored alone.
    key_cache = tl.load(key_pointers_ptr + layer).to(tl.pointer_type(CACHE_DTYPE))
    key_target = tl.multiple_of(key_cache, ALIGNMENT) + offset
    value_cache = tl.load(value_pointers_ptr + layer).to(tl.pointer_type(CACHE_DTYPE))
    value_target = tl.multiple_of(value_cache, ALIGNMENT) + offset
    row_mask = is_row[:, None]

    _store_keys(
        source,
        key_target,
        row_mask,
        k_norm_ptr + layer * k_norm_stride,
        (cos_sin_ptr + position * cos_sin_stride)[:, None],
        tl.load(eps_ptr + layer),
        CACHE_DTYPE,
        HEAD_DIM,
        HALF,
        BLOCK_ROWS,
        BLOCK_HALF,
        BLOCK_REST,
    )
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    dim_mask = row_mask & (dim < HEAD_DIM)
    value = tl.load(source + KV_HEADS * HEAD_DIM + dim, mask=dim_mask, other=0.0).to(tl.float32)
    tl.store(value_target + dim, (value * value_scale).to(CACHE_DTYPE), mask=dim_mask)


def store_features(
    kv_NLE: torch.Tensor,
    positions_N: torch.Tensor,
    slots_N: torch.Tensor,
    *,
    k_norm_LD: torch.Tensor,
    eps_L: torch.Tensor,
    cos_sin_PR: torch.Tensor,
    value_scale: float,
    caches: CachePointers,
) -> None:
    """Contract: `reference.store_features`. Capture-safe, allocates nothing."""
    num_tokens = contracts.store_features(
        kv_NLE,
        positions_N,
        slots_N,
        k_norm_LD=k_norm_LD,
        eps_L=eps_L,
        cos_sin_PR=cos_sin_PR,
        caches=caches,
    )
    if num_tokens == 0:
        return
    num_rows = num_tokens * caches.kv_heads
    half = cos_sin_PR.shape[1] // 2
    block_half = triton.next_power_of_2(half)
    block_rows, num_warps = _tile(num_rows, caches.num_layers, block_half)
    _store_features_kernel[(triton.cdiv(num_rows, block_rows), caches.num_layers)](
        kv_NLE,
        positions_N,
        slots_N,
        k_norm_LD,
        eps_L,
        cos_sin_PR,
        caches.key_pointers_L,
        caches.value_pointers_L,
        value_scale,
        num_rows,
        kv_NLE.stride(0),
        kv_NLE.stride(1),
        k_norm_LD.stride(0),
        cos_sin_PR.stride(0),
        caches.slot_stride,
        caches.head_stride,
        CACHE_DTYPE=_TRITON_DTYPE[caches.dtype],
        ALIGNMENT=ALIGNMENT_BYTES,
        KV_HEADS=caches.kv_heads,
        HEAD_DIM=caches.head_dim,
        HALF=half,
        BLOCK_ROWS=block_rows,
        BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(max(caches.head_dim - 2 * half, 1)),
        BLOCK_DIM=triton.next_power_of_2(caches.head_dim),
        num_warps=num_warps,
    )


def _tile(num_rows: int, num_layers: int, block_half: int) -> tuple[int, int]:
    """(rows a program, warps a program)."""
    rows = max(1, LARGE_TILE // block_half)
    if triton.cdiv(num_rows, rows) * num_layers >= FULL_GRID:
        return rows, LARGE_WARPS
    return max(1, SMALL_TILE // block_half), SMALL_WARPS
