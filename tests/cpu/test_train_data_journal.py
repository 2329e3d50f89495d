"""The journal of a data run: what it recalls, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.train.journal import Journal, key_of

IDENTITY = {"seed": 1, "target": "t", "template_arguments": {"x": True}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "new" / "data.journal"
    with Journal(path, IDENTITY) as journal:
        journal.add_turns(["What is tea?", "ä\n"])
        journal.add_turns([])
        journal.add_answers([("k1", [1, 2], False), ("k2", [3], True)])
    return path


def test_recalls_what_was_added(path: Path) -> None:
    with Journal(path, IDENTITY) as journal:
        assert journal.turns == [["What is tea?", "ä\n"], []]
        assert journal.answers == {"k1": ([1, 2], False), "k2": ([3], True)}
        journal.add_answers([("k3", [4], False)])
        assert journal.answers["k3"] == ([4], False)
    with Journal(path, IDENTITY) as journal:
        assert list(journal.answers) == ["k1", "k2", "k3"]


def test_every_torn_end_loses_the_torn_line_alone(path: Path) -> None:
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with Journal(path, IDENTITY) as journal:
            num_lines = whole[:size].count(b"\n")
            assert (len(journal.turns), len(journal.answers)) == (
                min(2, max(0, num_lines - 1)),
                max(0, num_lines - 3),
            )
            journal.add_answers([("new", [9], False)])
        with Journal(path, IDENTITY) as journal:
            assert journal.answers["new"] == ([9], False)


def test_the_journal_of_another_run_is_refused_with_the_difference(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"seed 1, not 2; take the settings back") as refused:
        Journal(path, {**IDENTITY, "seed": 2})
    assert path.read_bytes() == before
    with Journal(path, IDENTITY) as journal:  # the refused one has let go of the lock
        assert journal.turns
    assert refused.value


def test_a_journal_with_nothing_generated_takes_new_settings(tmp_path: Path) -> None:
    path = tmp_path / "data.journal"
    for seed in (1, 2):
        with Journal(path, {"seed": seed}):
            pass
    assert path.read_text() == '{"identity":{"seed":2}}\n'


def test_two_runs_do_not_write_one_journal(path: Path) -> None:
    with Journal(path, IDENTITY), pytest.raises(ValueError, match="another run that writes it"):
        Journal(path, IDENTITY)
    with Journal(path, IDENTITY):
        pass


@pytest.mark.parametrize("line", [b"{broken}", b"[]", b'{"key": "k"}'])
def test_a_broken_line_in_the_middle_is_named(path: Path, line: bytes) -> None:
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(ValueError, match=r"line 3: expected"):
        Journal(path, IDENTITY)


def test_keys_tell_prompts_apart() -> None:
    assert key_of([1, 23]) != key_of([12, 3])
    assert key_of([1, 23]) == key_of([1, 23])
    assert len(key_of([1])) == 24
