"""PyTorch implementations of the sgl_kernel ops that SGLang calls on a CPU and that its CUDA build has not.

SGLang calls them through `sgl_kernel`'s Python wrappers, which look for `torch.ops.sgl_kernel.<name>`. Each stands for
a kernel of SGLang's CPU build; the contract in its docstring is what the call sites need. The ops of EAGLE's draft
trees are left out: DFlash drafts no tree.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

_MASK32 = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated slots into the request-to-token table.

    Columns start_offset[i]..end_offset[i]-1 of row req_pool_indices[i] get the slots that out_cache_loc (int64) holds
    packed request after request. req_to_token is int32 (num_rows, pool_len) and changes.
    """
    taken = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read slots back: the reverse of `assign_req_to_token_pool_cpu`.

    out_cache_loc (int64) changes: it gets columns start_offset[i]..end_offset[i]-1 of row req_pool_indices[i], packed
    request after request.
    """
    taken = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[taken : taken + end - start] = req_to_token[row, start:end]
        taken += end - start


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy slots src_loc to slots tgt_loc in every KV buffer; all sources are read before the first write.

    data_ptrs (uint64) are the buffers' addresses, strides (int64) the bytes of one slot in each. The caller keeps the
    buffers alive and the slots inside them.
    """
    if tgt_loc.numel() == 0:
        return
    targets, sources = tgt_loc.long().reshape(-1), src_loc.long().reshape(-1)
    num_slots = int(torch.maximum(targets.max(), sources.max())) + 1
    for address, slot_bytes in zip(data_ptrs.tolist(), strides.tolist()):
        memory = (ctypes.c_uint8 * (num_slots * slot_bytes)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, slot_bytes)
        buffer[targets] = buffer[sources]


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit) of the 16 bytes seed (8), position (4), column (4): the noise of seeded sampling.

    seed (n,) uint64, positions (n,), col_indices (m,) -> uint32 (n, m). Source: Appleby, MurmurHash3, public domain.
    """
    # Arithmetic in int64: the product of two 32-bit words wraps there, and its low 32 bits stay right.
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(seed).unsqueeze(1)
    for word in (seed, seed >> 32, positions.to(torch.int64)):
        state = _mix(state, word.unsqueeze(1) & _MASK32)
    state = _mix(state, col_indices.to(torch.int64).unsqueeze(0) & _MASK32) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & _MASK32
    return (state ^ (state >> 16)).to(torch.uint32)


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (_rotate_left((word * 0xCC9E2D51) & _MASK32, 15) * 0x1B873593) & _MASK32
    return (_rotate_left(state ^ word, 13) * 5 + 0xE6546B64) & _MASK32


def _rotate_left(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _MASK32


def _spans(rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> list[tuple[int, int, int]]:
    return list(zip(rows.tolist(), starts.tolist(), ends.tolist()))


_LOCS = "Tensor req_pool_indices, Tensor{} req_to_token, Tensor start_offset, Tensor end_offset, Tensor{} out_cache_loc"
OPS: dict[str, tuple[str, Callable]] = {
    "assign_req_to_token_pool_cpu": (
        f"({_LOCS.format('(a!)', '')}, int pool_len) -> ()",
        assign_req_to_token_pool_cpu,
    ),
    "assign_extend_cache_locs_cpu": (
        f"({_LOCS.format('', '(a!)')}, int pool_len) -> ()",
        assign_extend_cache_locs_cpu,
    ),
    "copy_all_layer_kv_cache_cpu": (
        "(Tensor data_ptrs, Tensor strides, Tensor tgt_loc, Tensor src_loc) -> ()",
        copy_all_layer_kv_cache_cpu,
    ),
    "murmur_hash32_cpu": ("(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor", murmur_hash32_cpu),
}


def register_missing() -> list[str]:
    """Register those of `OPS` that `torch.ops.sgl_kernel` has not, for CPU tensors, and return their names."""
    missing = [name for name in OPS if not hasattr(torch.ops.sgl_kernel, name)]
    for name in missing:
        schema, implementation = OPS[name]
        torch.library.define(f"sgl_kernel::{name}", schema)
        torch.library.impl(f"sgl_kernel::{name}", "CPU", implementation)
    return missing
