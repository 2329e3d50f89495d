"""The token map: which tokens are chosen, what is told of them, and what is no map."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash import cli, token_map
from sglang_dflash.train import dataset
from sglang_dflash.train.dataset import Example
from tests.engine import tiny

VOCAB_SIZE = 100


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    "content", [[7, 3, 99, 0], torch.tensor([7, 3, 99, 0]), torch.tensor([7, 3, 99, 0], dtype=torch.int32)], ids=str
)
def test_a_list_or_a_tensor_is_read_in_its_order(tmp_path: Path, content: Any) -> None:
    tokens_S = token_map.load(saved(tmp_path / "map.pt", content), VOCAB_SIZE)
    assert tokens_S.dtype == torch.int64
    assert tokens_S.tolist() == [7, 3, 99, 0]


WRONG: dict[str, tuple[Any, str]] = {
    "empty": ([], "expected token ids, got none; make it anew"),
    "floats": ([1.0, 2.0], r"expected integers, got torch\.float32; save the ids as int64"),
    "bools": ([True, False], r"expected integers, got torch\.bool"),
    "beyond": ([1, VOCAB_SIZE], "expected ids below the target's vocabulary of 100, got 100; make this target"),
    "negative": ([1, -1], "expected ids below the target's vocabulary of 100, got -1"),
    "twice": ([4, 5, 4], "expected each token once, got 4 2 times; leave the repeats out"),
    "nested": ([[1, 2], [3, 4]], r"expected one list of token ids, got the shape \[2, 2\]; flatten it"),
    "one number": (3, r"expected one list of token ids, got the shape \[\]"),
    "a dict": ({"ids": [1]}, "expected token ids saved by torch, got .*; make it anew"),
    "ragged": ([[1], [2, 3]], "expected token ids saved by torch, got .*; make it anew"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_map_is_refused(tmp_path: Path, name: str) -> None:
    content, complaint = WRONG[name]
    path = saved(tmp_path / "map.pt", content)
    with pytest.raises(ValueError, match=f"--speculative-token-map {re.escape(str(path))}: {complaint}"):
        token_map.load(path, VOCAB_SIZE)


@pytest.mark.parametrize("content", [b"", b"not torch's", b"[1, 2, 3]"])
def test_a_file_that_torch_did_not_save_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "map.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected token ids saved by torch, got .*; make it anew"):
        token_map.load(path, VOCAB_SIZE)


@pytest.mark.parametrize("path", ["/nowhere/map.pt", "owner/repository/map.pt", "/"])
def test_a_path_that_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=f"expected a file, got {path}, which is none; make one with: sglang-dflash"):
        token_map.load(path, VOCAB_SIZE)


def test_the_most_frequent_are_chosen_with_every_special_token_that_was_counted() -> None:
    counts = Counter({10: 5, 11: 9, 12: 5, 13: 1, 2: 1, 14: 3})
    assert token_map.choose(counts, 3, []) == [11, 10, 12]
    # 3 was never said; 2 takes the place of the least frequent.
    assert token_map.choose(counts, 3, [2, 3]) == [11, 10, 2]
    assert token_map.choose(counts, 50, [2, 3]) == [11, 10, 12, 14, 2, 13]
    assert token_map.choose(counts, 1, [2]) == [2]
    for size, special, least in ((0, [], 1), (1, [2, 13], 2)):
        with pytest.raises(ValueError, match=f"--size: expected at least {least}, .* got {size}; raise it"):
            token_map.choose(counts, size, special)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("models")).target


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Answers to train on say 40 five times, 41 three times, 42 once and two kinds of end; prompts do not count."""
    examples = [
        Example("chat", "train", [90] * 50, [40, 41, 40, 42, 41, tiny.EOS]),
        Example("code", "train", [91], [40, 40, 41, 40, tiny.SPECIAL.index("<|im_end|>")]),
        Example("chat", "heldout", [92], [40, 43, 43, tiny.EOS]),
        Example("code", "heldout", [92], [41, 41, 42, 44]),
    ]
    dataset.write(tmp_path / "data.jsonl", examples)
    return tmp_path / "data.jsonl"


def command(data: Path, target: Path, size: int, *more: str) -> list[str]:
    options = ["--data", str(data), "--target", str(target), "--size", str(size), "--out", str(data.parent / "map.pt")]
    return ["token-map", *options, *more]


def test_the_command_writes_a_map_and_prints_its_coverage(
    data: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(data, target, 4, "--heldout", str(data))) == 0
    path = data.parent / "map.pt"
    end = tiny.SPECIAL.index("<|im_end|>")
    assert torch.load(path, weights_only=True) == [40, 41, tiny.EOS, end]  # a list, as SGLang's own reader has it
    vocab_size = len(tiny.byte_tokenizer())
    assert token_map.load(path, vocab_size).tolist() == [40, 41, tiny.EOS, end]
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: 4 of {vocab_size} tokens",
        "coverage of the answers that were counted: 90.91% of 11 tokens",
        "coverage of held-out answers: 50.00% of 8 tokens",
    ]


def test_of_fewer_tokens_than_asked_for_all_are_written(
    data: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(data, target, 64)) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"{data}: expected 64 different tokens, got 5; the map holds these"
    assert told[2:] == ["coverage of the answers that were counted: 100.00% of 11 tokens"]
    assert len(torch.load(data.parent / "map.pt", weights_only=True)) == 5


def test_the_commands_mistakes(data: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heldout = data.with_name("heldout.jsonl")
    dataset.write(heldout, [example for example in dataset.read(data) if example.split == "heldout"])
    beyond = data.with_name("beyond.jsonl")
    dataset.write(beyond, [Example("chat", "train", [1], [100_000])])
    for asked, complaint in (
        (command(heldout, target, 4), "expected answers to train on, got held-out ones alone"),
        (command(beyond, target, 4), "expected ids below the target's vocabulary of"),
        (command(data, data.parent, 4), "--target: expected a model's directory"),
        (command(data, target, 1), "--size: expected at least 2"),
        (command(data, target, 4, "--heldout", str(beyond)), "expected held-out examples"),
    ):
        assert cli.main(asked) == 2
        assert complaint in capsys.readouterr().err
    assert not (data.parent / "map.pt").exists()


def test_a_targets_settings_name_tokens_that_end_an_answer(data: Path, tmp_path: Path) -> None:
    target = tiny.make(tmp_path).target
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [tiny.EOS, 42]}))
    assert cli.main(command(data, target, 4)) == 0
    end = tiny.SPECIAL.index("<|im_end|>")
    assert torch.load(data.parent / "map.pt", weights_only=True) == [40, tiny.EOS, end, 42]
