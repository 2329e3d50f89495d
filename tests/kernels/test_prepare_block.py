from __future__ import annotations

import pytest
import torch

MASK = 151_669


def naive(anchors, seq_lens, rows, table, mask_token_id, width):
    ids, positions, slots = [], [], []
    for anchor, seq_len, row in zip(anchors, seq_lens, rows):
        ids.append([anchor if k == 0 else mask_token_id for k in range(width)])
        positions.append([seq_len + k for k in range(width)])
        slots.append([table[row][p] if row and p < len(table[row]) else 0 for p in positions[-1]])
    return ids, positions, slots


def run(ops, poison, anchors, seq_lens, rows, table, width, dtype, table_dtype):
    size, device = len(anchors), poison.device
    # A table wider than its visible columns: what stands past the last column must not be read.
    wide = torch.full((len(table), len(table[0]) + 70), -5, dtype=table_dtype, device=device)
    req_to_token = wide[:, : len(table[0])]
    req_to_token.copy_(torch.tensor(table, dtype=table_dtype))
    ids_BK, positions_BK, slots_BK = (poison.output(size, width) for _ in range(3))
    ops.prepare_block(
        torch.tensor(anchors, dtype=dtype, device=device),
        torch.tensor(seq_lens, dtype=dtype, device=device),
        torch.tensor(rows, dtype=dtype, device=device),
        req_to_token,
        MASK,
        ids_BK=ids_BK,
        positions_BK=positions_BK,
        slots_BK=slots_BK,
    )
    poison.check_surroundings()
    return ids_BK.tolist(), positions_BK.tolist(), slots_BK.tolist()


def table_of(num_rows: int, num_columns: int) -> list[list[int]]:
    return [[1 + 1000 * row + column for column in range(num_columns)] for row in range(num_rows)]


@pytest.mark.parametrize("width", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_matches_twin(ops, poison, size, width):
    table = table_of(9, 130)
    anchors, seq_lens = [17 + b for b in range(size)], [(41 * b) % 66 for b in range(size)]
    rows = [(5 * b + 2) % 8 + 1 for b in range(size)]
    got = run(ops, poison, anchors, seq_lens, rows, table, width, torch.int64, torch.int32)
    assert got == naive(anchors, seq_lens, rows, table, MASK, width)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_index_dtypes(ops, poison, dtype, table_dtype):
    table = table_of(4, 40)
    got = run(ops, poison, [3, 4], [0, 20], [3, 1], table, 5, dtype, table_dtype)
    assert got == naive([3, 4], [0, 20], [3, 1], table, MASK, 5)


def test_past_the_last_column(ops, poison):
    """The last row too: a position past its end is past the table's end in memory."""
    table = table_of(3, 20)
    seq_lens = [18, 19, 20, 4000]
    got = run(ops, poison, [1, 2, 3, 4], seq_lens, [1, 1, 2, 2], table, 6, torch.int64, torch.int32)
    assert got == naive([1, 2, 3, 4], seq_lens, [1, 1, 2, 2], table, MASK, 6)
    assert got[2][0] == [1019, 1020, 0, 0, 0, 0]


def test_large_slots_survive(ops, poison):
    big = 2**31 + 5
    got = run(ops, poison, [9], [0], [1], [[1, 2], [big, big + 1]], 2, torch.int64, torch.int64)
    assert got[2] == [[big, big + 1]]


def test_a_padded_request_has_slot_0(ops, poison):
    """Whatever stands in row 0: after a server slept, nobody has written it."""
    table = table_of(3, 20)
    got = run(ops, poison, [0, 7, 0], [0, 3, 0], [0, 2, 0], table, 4, torch.int64, torch.int32)
    assert got == naive([0, 7, 0], [0, 3, 0], [0, 2, 0], table, MASK, 4)
    assert got[2] == [[0] * 4, table[2][3:7], [0] * 4]


def test_empty_batch(ops, poison):
    got = run(ops, poison, [], [], [], table_of(2, 4), 5, torch.int64, torch.int32)
    assert got == ([], [], [])


def test_wrong_output_shape_is_refused(ops, device):
    block = torch.zeros(2, 4, dtype=torch.int64, device=device)
    vector = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(AssertionError, match="slots_BK: expected shape"):
        ops.prepare_block(vector, vector, vector, block, MASK, ids_BK=block, positions_BK=block, slots_BK=block[:, :3])
