"""Training examples on disk and in batches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_dflash.train import dataset
from sglang_dflash.train.dataset import Batches, Example


def make_examples(count: int, longest: int = 300) -> list[Example]:
    """Example i has the prompt [i + 1] and an answer of some length; its tokens tell its number."""
    return [Example("f", "train", [i + 1], [i + 1] * (2 + (i * 37) % (longest - 1))) for i in range(count)]


def numbers(batches: Batches, steps: range) -> list[int]:
    return [int(i) for step in steps for i in batches.batch(step).ids_BS[:, 0]]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    examples = [Example("chat", "train", [1, 2], [3]), Example("code", "heldout", [4], [5, 6], looped=True)]
    path = tmp_path / "new" / "data.jsonl"
    dataset.write(path, examples)
    assert dataset.read(path) == examples
    assert [p.name for p in path.parent.iterdir()] == ["data.jsonl"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    dataset.write(path, make_examples(2))

    def broken() -> Iterator[Example]:
        yield make_examples(1)[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dataset.write(path, broken())
    assert dataset.read(path) == make_examples(2)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "line",
    [
        '{"family": "f", "split": "train", "prompt_ids": [1], "answ',
        '{"family": "f", "split": "train", "prompt_ids": [1]}',
        '{"family": "f", "split": "test", "prompt_ids": [1], "answer_ids": [2]}',
        '{"family": "f", "split": "train", "prompt_ids": [], "answer_ids": [2]}',
        '{"family": "f", "split": "train", "prompt_ids": [1], "answer_ids": ["2"]}',
        '{"family": "f", "split": "train", "prompt_ids": [1], "answer_ids": [true]}',
        '{"family": "f", "split": "train", "prompt_ids": [1], "answer_ids": [-2]}',
        "[1]",
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "data.jsonl"
    dataset.write(path, make_examples(1))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"line 2: expected"):
        dataset.read(path)


def test_no_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        dataset.read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="empty file"):
        dataset.read(tmp_path / "empty.jsonl")


def test_split_is_stable_and_of_the_asked_size() -> None:
    # Fixed values: a change of the hash would mix the held-out prompts of older runs into the training of newer ones.
    assert [i for i in range(60) if dataset.split_of(f"prompt {i}") == "heldout"] == [33, 42, 50]
    counts = Counter(dataset.split_of(f"prompt {i}", 10) for i in range(5000))
    assert 400 < counts["heldout"] < 600
    assert {dataset.split_of(str(i), 0) for i in range(500)} == {"train"}
    assert {dataset.split_of(str(i), 100) for i in range(500)} == {"heldout"}


def test_batches_hold_the_examples_padded() -> None:
    examples = [Example("f", "train", [7, 8], [9] * 70), Example("f", "train", [5], [6, 6])]
    batch = Batches(examples, 2, 128, seed=0).batch(0)
    assert batch.ids_BS.shape == (2, 128)
    assert batch.ids_BS.dtype == batch.lengths_B.dtype == batch.num_prompt_B.dtype == torch.int64
    assert batch.lengths_B.tolist() == [3, 72]
    assert batch.num_prompt_B.tolist() == [1, 2]
    assert batch.ids_BS[0].tolist() == [5, 6, 6] + [0] * 125
    assert batch.ids_BS[1].tolist() == [7, 8] + [9] * 70 + [0] * 56


def test_long_sequences_are_cut_and_those_without_a_block_left_out() -> None:
    without = [Example("f", "heldout", [4] * 63, [5, 6]), Example("f", "heldout", [4], [5])]
    examples = [Example("f", "heldout", [1] * 62, [2, 3, 4]), *without]
    batches = Batches(examples, 1, 64, seed=0)
    assert batches.num_examples == 1
    assert batches.batch(0).ids_BS.tolist() == [[1] * 62 + [2, 3]]
    assert batches.batch(0).lengths_B.tolist() == [64]
    with pytest.raises(ValueError, match=r"of the split heldout .* within max_tokens 64, got none among 2"):
        Batches(examples[1:], 1, 64, seed=0)
    with pytest.raises(ValueError, match="multiple of 64"):
        Batches(examples, 1, 100, seed=0)
    with pytest.raises(ValueError, match="at least 1"):
        Batches(examples, 0, 64, seed=0)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    examples = make_examples(50)
    steps = range(30)
    first, second = Batches(examples, 4, 320, seed=3), Batches(examples, 4, 320, seed=3)
    expected = [first.batch(step).ids_BS.tolist() for step in steps]
    assert [second.batch(step).ids_BS.tolist() for step in reversed(steps)] == expected[::-1]
    other = Batches(examples, 4, 320, seed=4)
    assert [other.batch(step).ids_BS.tolist() for step in steps] != expected


def test_every_example_comes_once_an_epoch_in_a_new_order() -> None:
    batches = Batches(make_examples(50), 4, 320, seed=0)
    assert batches.steps_per_epoch == 13
    epochs = [numbers(batches, range(13 * epoch, 13 * epoch + 13)) for epoch in range(3)]
    for epoch in epochs:
        assert set(epoch) == set(range(1, 51))
        assert len(epoch) == 52
    assert epochs[0] != epochs[1] != epochs[2]


def test_fewer_examples_than_a_batch_fill_it() -> None:
    batches = Batches(make_examples(3), 8, 320, seed=0)
    assert batches.steps_per_epoch == 1
    assert Counter(numbers(batches, range(1))).most_common()[-1][1] >= 2


def test_a_batch_holds_similar_lengths_and_batches_come_mixed() -> None:
    batches = Batches(make_examples(2000), 8, 320, seed=0)
    lengths = [batches.batch(step).lengths_B for step in range(batches.steps_per_epoch)]
    spread = sum(int(x.max() - x.min()) for x in lengths) / len(lengths)
    assert spread < 30  # a random batch of 8 spreads over 230 tokens
    means = torch.stack([x.float().mean() for x in lengths])
    assert abs(float(torch.corrcoef(torch.stack([means[:-1], means[1:]]))[0, 1])) < 0.3


def test_lines_are_json_objects(tmp_path: Path) -> None:
    dataset.write(tmp_path / "x", make_examples(1))
    assert json.loads((tmp_path / "x").read_text()) == {
        "family": "f",
        "split": "train",
        "prompt_ids": [1],
        "answer_ids": [1, 1],
        "looped": False,
    }
