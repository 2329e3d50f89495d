"""The sgl_kernel ops of the CPU engine against plain loops."""

from __future__ import annotations

import torch

from sglang_dflash.cpu import ops


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_slots_are_written_and_read_back_request_by_request():
    table = torch.full((5, 12), -7, dtype=torch.int32)
    rows, starts, ends = tensor(3, 0, 4), tensor(2, 0, 9), tensor(5, 0, 12)  # the second request gets no slot
    slots = tensor(50, 51, 40, 90, 7, 8)
    expected = table.clone()
    expected[3, 2:5] = torch.tensor([50, 51, 40], dtype=torch.int32)
    expected[4, 9:12] = torch.tensor([90, 7, 8], dtype=torch.int32)
    ops.assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, table.shape[1])
    assert torch.equal(table, expected)

    read = torch.full((6,), -1, dtype=torch.int64)
    ops.assign_extend_cache_locs_cpu(rows, table, starts, ends, read, table.shape[1])
    assert torch.equal(read, slots)


def test_copying_slots_reads_every_source_first():
    buffers = [torch.randn(8, 3, 4), torch.randn(8, 2, 5).to(torch.bfloat16)]
    before = [buffer.clone() for buffer in buffers]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = tensor(*(buffer[0].numel() * buffer.element_size() for buffer in buffers))
    sources, targets = tensor(1, 2, 7), tensor(2, 3, 0)  # slot 2 is read and written
    ops.copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources)
    for buffer, old in zip(buffers, before):
        expected = old.clone()
        for target, source in zip(targets.tolist(), sources.tolist()):
            expected[target] = old[source]
        assert torch.equal(buffer, expected)
    ops.copy_all_layer_kv_cache_cpu(pointers, strides, tensor(), tensor())


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86 32 of whole words with seed 0, on Python integers."""
    state, word_mask = 0, 0xFFFFFFFF
    for i in range(0, len(data), 4):
        word = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & word_mask
        word = (word << 15 | word >> 17) * 0x1B873593 & word_mask
        state ^= word
        state = ((state << 13 | state >> 19) & word_mask) * 5 + 0xE6546B64 & word_mask
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & word_mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & word_mask
    return state ^ state >> 16


def test_murmur_hash():
    assert murmur3(bytes(4)) == 0x2362F9DE  # published test vector: four zero bytes, seed 0
    seeds = [0, 1, 2**40 + 17, 2**64 - 1]
    positions, columns = tensor(0, 5, 8191, 3), tensor(0, 1, 49151)
    hashed = ops.murmur_hash32_cpu(torch.tensor(seeds, dtype=torch.uint64), positions, columns)
    assert hashed.dtype == torch.uint32
    for seed, position, got in zip(seeds, positions.tolist(), hashed.tolist()):
        words = [murmur3(seed.to_bytes(8, "little") + position.to_bytes(4, "little") + c.to_bytes(4, "little"))
                 for c in columns.tolist()]  # fmt: skip
        assert got == words


def test_registering_adds_what_is_missing_and_overrides_nothing():
    ops.register_missing()
    assert ops.register_missing() == []
    for name in ops.OPS:
        assert hasattr(torch.ops.sgl_kernel, name)
    table, slots = torch.zeros(2, 4, dtype=torch.int32), tensor(8, 9)
    torch.ops.sgl_kernel.assign_req_to_token_pool_cpu(tensor(1), table, tensor(1), tensor(3), slots, 4)
    assert table.tolist() == [[0, 0, 0, 0], [0, 8, 9, 0]]
