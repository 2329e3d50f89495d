"""An engine in a process of its own that fails: told with its log, and gone."""

from __future__ import annotations

import multiprocessing
import types
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import offline
from sglang_dflash.offline import EngineProcess


def test_a_failed_engine_is_told_with_its_log_and_leaves_no_process(tmp_path: Path) -> None:
    log, model = tmp_path / "log", tmp_path / "nowhere"
    with pytest.raises(RuntimeError, match="plain engine: ") as error:
        EngineProcess("plain", log, model_path=str(model))
    assert multiprocessing.active_children() == []
    assert str(log) in str(error.value)
    assert str(model) in str(error.value)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ValueError("misfit:\n  - one\n  - two"), ("mistake", "misfit:\n  - one\n  - two")),
        (RuntimeError("one\ntwo"), ("error", "RuntimeError: one\ntwo")),
    ],
)
def test_a_failure_of_several_lines_is_told_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, told: tuple[str, str]
) -> None:
    def fail(server_args: dict[str, Any]) -> None:
        raise failure

    sent: list[Any] = []
    monkeypatch.setattr(offline, "_start", fail)
    monkeypatch.setattr(offline.os, "dup2", lambda source, target: None)
    with pytest.raises(type(failure)):
        offline._serve(types.SimpleNamespace(send=sent.append), str(tmp_path / "log"), {}, {})
    assert sent == [told]


@pytest.mark.parametrize(
    ("outcome", "kind", "text"),
    [("mistake", ValueError, r"^misfit$"), ("error", RuntimeError, r"^ours engine: misfit\n.*\nlast words$")],
)
def test_a_mistake_is_told_without_the_log(tmp_path: Path, outcome: str, kind: type[Exception], text: str) -> None:
    engine = EngineProcess.__new__(EngineProcess)
    engine.kind, engine.log = "ours", tmp_path / "log"
    engine.log.write_text("last words")
    process = types.SimpleNamespace(join=lambda seconds: None, kill=lambda: None)
    connection = types.SimpleNamespace(recv=lambda: (outcome, "misfit"))
    vars(engine).update(_process=process, _connection=connection)
    with pytest.raises(kind, match=text):
        engine._receive()
