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


def test_a_failure_of_several_lines_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(server_args: dict[str, Any]) -> None:
        raise ValueError("misfit:\n  - one\n  - two")

    sent: list[Any] = []
    monkeypatch.setattr(offline, "_start", fail)
    monkeypatch.setattr(offline.os, "dup2", lambda source, target: None)
    with pytest.raises(ValueError, match="misfit"):
        offline._serve(types.SimpleNamespace(send=sent.append), str(tmp_path / "log"), {}, {})
    assert sent == [("error", "ValueError: misfit:\n  - one\n  - two")]
