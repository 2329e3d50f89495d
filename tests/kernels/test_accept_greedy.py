from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


def naive(tokens, target, seq_lens, widths):
    """Returns (commit, bonus, committed tokens, new lengths), one request after the other."""
    commits, bonuses, outputs, new_lens = [], [], [], []
    for row, choice, seq_len, width in zip(tokens, target, seq_lens, widths):
        output = []
        if width > 0:
            for draft, wanted in zip(row[1:width], choice):
                if draft != wanted:
                    break
                output.append(draft)
            output.append(choice[len(output)])
        commits.append(len(output))
        bonuses.append(output[-1] if output else 0)
        outputs.append(output + [0] * (len(choice) - len(output)))
        new_lens.append(seq_len + len(output))
    return commits, bonuses, outputs, new_lens


def run(ops, poison, tokens, target, seq_lens, widths, width, block, seq_dtype=torch.int64, width_dtype=torch.int32):
    size, device = len(target), poison.device
    commit_B = poison.output(size, dtype=torch.int32)
    bonus_B, new_lens_B = poison.output(size), poison.output(size)
    tokens_BW = poison.output(size, width)
    tokens_BK, target_BW = poison.output(size, block), poison.output(size, width)
    if size:
        tokens_BK.copy_(torch.tensor(tokens))
        target_BW.copy_(torch.tensor(target))
    ops.accept_greedy(
        tokens_BK,
        target_BW,
        torch.tensor(seq_lens, dtype=seq_dtype, device=device),
        None if widths is None else torch.tensor(widths, dtype=width_dtype, device=device),
        commit_B=commit_B,
        bonus_B=bonus_B,
        tokens_BW=tokens_BW,
        new_lens_B=new_lens_B,
    )
    poison.check_surroundings()
    return commit_B.tolist(), bonus_B.tolist(), tokens_BW.tolist(), new_lens_B.tolist()


def planted(size: int, width: int, block: int, accepted: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Drafts that agree with the target for accepted[b] tokens, err once, and agree again after."""
    target = [[100 * (b + 1) + i for i in range(width)] for b in range(size)]
    tokens = []
    for b in range(size):
        drafts = [*target[b], *range(900, 900 + block)][: block - 1]
        if accepted[b] < len(drafts):
            drafts[accepted[b]] = 7
        tokens.append([5, *drafts])
    return tokens, target


@pytest.mark.parametrize("width", [1, 2, 7, 16, 33, 64])
def test_every_accepted_length(ops, poison, width):
    accepted = list(range(width))
    tokens, target = planted(width, width, width, accepted)
    seq_lens = [11 * b for b in range(width)]
    got = run(ops, poison, tokens, target, seq_lens, None, width, width)
    assert got == naive(tokens, target, seq_lens, [width] * width)
    assert got[0] == [a + 1 for a in accepted]


@pytest.mark.parametrize("block", [4, 9])
def test_verified_width_below_block(ops, poison, block):
    """Columns from W on agree with nothing and must not count."""
    tokens, target = planted(3, 4, block, [3, 1, 0])
    got = run(ops, poison, tokens, target, [1, 2, 3], None, 4, block)
    assert got == naive(tokens, target, [1, 2, 3], [4, 4, 4])


@pytest.mark.parametrize("seq_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width_dtype", [torch.int32, torch.int64])
def test_widths_and_padded_rows(ops, poison, seq_dtype, width_dtype):
    widths = [0, 1, 2, 5, 0, 4, 5]
    tokens, target = planted(7, 5, 6, [4, 4, 4, 4, 0, 2, 0])
    seq_lens = [3, 0, 9, 100, 8, 7, 6]
    got = run(ops, poison, tokens, target, seq_lens, widths, 5, 6, seq_dtype, width_dtype)
    assert got == naive(tokens, target, seq_lens, widths)
    assert got[0] == [0, 1, 2, 5, 0, 3, 1]


@given(data=st.data())
def test_any_batch(ops, new_poison, data):
    width = data.draw(st.integers(1, 20))
    block = data.draw(st.integers(width, 24))
    size = data.draw(st.integers(1, 5))
    token = st.sampled_from([0, 1, 2**31 + 3])
    tokens = data.draw(st.lists(st.lists(token, min_size=block, max_size=block), min_size=size, max_size=size))
    target = data.draw(st.lists(st.lists(token, min_size=width, max_size=width), min_size=size, max_size=size))
    widths = data.draw(st.lists(st.integers(0, width), min_size=size, max_size=size))
    seq_lens = data.draw(st.lists(st.integers(0, 1000), min_size=size, max_size=size))
    got = run(ops, new_poison(), tokens, target, seq_lens, widths, width, block)
    assert got == naive(tokens, target, seq_lens, widths)


def test_new_lens_may_be_seq_lens(ops, device):
    tokens, target = planted(2, 4, 4, [3, 1])
    lens_B = torch.tensor([10, 20], device=device)
    ops.accept_greedy(
        torch.tensor(tokens, device=device),
        torch.tensor(target, device=device),
        lens_B,
        None,
        commit_B=torch.zeros(2, dtype=torch.int32, device=device),
        bonus_B=torch.zeros(2, dtype=torch.int64, device=device),
        tokens_BW=torch.zeros(2, 4, dtype=torch.int64, device=device),
        new_lens_B=lens_B,
    )
    assert lens_B.tolist() == [14, 22]


def test_empty_batch(ops, poison):
    assert run(ops, poison, [], [], [], [], 3, 4) == ([], [], [], [])


def test_target_wider_than_block_is_refused(ops, poison):
    tokens, target = planted(1, 5, 5, [0])
    with pytest.raises(AssertionError, match="expected at most the block's 4 columns"):
        run(ops, poison, [tokens[0][:4]], target, [1], None, 5, 4)
