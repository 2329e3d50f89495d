"""What is compared: the options' columns, what each engine is started with, and mistakes told before one starts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_dflash.bench import columns
from sglang_dflash.bench.columns import Column
from sglang_dflash.cpu import bootstrap

GPU, CPU = False, True


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda kind: monkeypatch.setattr(bootstrap, "wanted", lambda device=None: kind)


@pytest.mark.parametrize(("kind", "names"), [(GPU, ["plain", "stock", "ours"]), (CPU, ["plain", "ours"])])
def test_all_kinds_that_run_here(machine: Any, kind: bool, names: list[str]) -> None:
    machine(kind)
    assert [column.name for column in columns.of(None, None, [])] == names


def test_kinds_variants_and_settings(machine: Any) -> None:
    machine(GPU)
    variant = 'wide={"proposer": "a:B", "engine": {"speculative_num_draft_tokens": 8}}'
    got = columns.of("ours,plain", '{"proposer": "argmax"}', [variant, "none={}"])
    assert got == [
        Column("plain", "plain"),
        Column("ours", "ours", {"proposer": "argmax"}),
        Column("wide", "ours", {"proposer": "a:B"}, {"speculative_num_draft_tokens": 8}),
        Column("none", "ours"),
    ]
    [*_, mapped] = columns.of("ours", None, ['map={"engine": {"speculative_token_map": "map.pt"}}'])
    assert mapped == Column("map", "ours", {}, {"speculative_token_map": "map.pt"})


@pytest.mark.parametrize(
    ("kind", "kinds", "settings", "variants", "complaint"),
    [
        (GPU, "plain,fast", None, [], "--kinds: expected some of plain, stock, ours, got fast"),
        (CPU, "stock", None, [], "expected plain and ours on a CPU, got stock"),
        (GPU, None, "[1]", [], r"--config: expected a JSON object, .*got '\[1\]'"),
        (GPU, None, "{", [], "--config: expected a JSON object, got '{'"),
        (GPU, None, None, ["x"], "--ours: expected NAME=JSON, got 'x'"),
        (GPU, None, None, ["={}"], "--ours: expected NAME=JSON, got '={}'"),
        (GPU, None, None, ['x={"engine": 1}'], "--ours x: expected a JSON object"),
        (GPU, None, None, ['x={"colour": "red"}'], "unknown key colour"),
        (GPU, None, None, ["ours={}"], "expected names that differ, got ours twice"),
    ],
)
def test_mistakes(
    machine: Any, kind: bool, kinds: str | None, settings: str | None, variants: list[str], complaint: str
) -> None:
    machine(kind)
    with pytest.raises(ValueError, match=complaint):
        columns.of(kinds, settings, variants)


@pytest.mark.parametrize(
    ("column", "forced", "expected"),
    [
        (Column("plain", "plain"), 6.49, {}),
        (Column("stock", "stock"), None, {}),
        (Column("stock", "stock"), 6.49, {"SGLANG_SIMULATE_ACC_LEN": "6.49"}),
        (Column("ours", "ours"), None, {"SGLANG_DFLASH_CONFIG": ""}),
        (
            Column("x", "ours", {"proposer": "a:B"}),
            2.0,
            {"SGLANG_DFLASH_CONFIG": '{"proposer": "a:B"}', "SGLANG_SIMULATE_ACC_LEN": "2.0"},
        ),
    ],
)
def test_environment(column: Column, forced: float | None, expected: dict[str, str]) -> None:
    assert columns.environment(column, forced) == expected


class _Engine:
    running: ClassVar[list[str]] = []
    started: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, kind: str, log: Path, env: dict[str, str], **arguments: Any) -> None:
        if arguments["page_size"] == 3:
            raise RuntimeError("does not start")
        self.name = log.stem
        _Engine.started.append((kind, log, env, arguments))

    def __enter__(self) -> _Engine:
        _Engine.running.append(self.name)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _Engine.running.remove(self.name)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "EngineProcess", _Engine)
    monkeypatch.setattr(_Engine, "running", [])
    monkeypatch.setattr(_Engine, "started", [])


@pytest.mark.usefixtures("played")
def test_engines_stand_side_by_side_with_their_own_arguments(tmp_path: Path) -> None:
    chosen = [Column("plain", "plain"), Column("x", "ours", {}, {"page_size": 2})]
    logs = tmp_path / "logs"
    with columns.engines(chosen, logs, {"page_size": 1}, variables={"x": {"A": "b"}}) as engines:
        assert list(engines) == ["plain", "x"]
        assert sorted(_Engine.running) == ["plain", "x"]
    assert _Engine.running == []
    assert sorted(_Engine.started, key=lambda how: how[0], reverse=True) == [
        ("plain", logs / "plain.log", {}, {"page_size": 1}),
        ("ours", logs / "x.log", {"SGLANG_DFLASH_CONFIG": "", "A": "b"}, {"page_size": 2}),
    ]
    assert logs.is_dir()


@pytest.mark.usefixtures("played")
def test_engines_start_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    class Waiting(_Engine):
        def __init__(self, kind: str, log: Path, env: dict[str, str], **arguments: Any) -> None:
            both.wait(timeout=10)  # broken where one starts after the other
            super().__init__(kind, log, env, **arguments)

    monkeypatch.setattr(columns, "EngineProcess", Waiting)
    chosen = [Column("plain", "plain"), Column("x", "ours")]
    with columns.engines(chosen, tmp_path, {"page_size": 1}) as engines:
        assert list(engines) == ["plain", "x"]


@pytest.mark.usefixtures("played")
def test_one_that_does_not_start_leaves_none(tmp_path: Path) -> None:
    chosen = [Column("plain", "plain"), Column("x", "ours", {}, {"page_size": 3})]
    with pytest.raises(RuntimeError, match="does not start"), columns.engines(chosen, tmp_path, {"page_size": 1}):
        pass
    assert _Engine.running == []
