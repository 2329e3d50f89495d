"""An engine in a process of its own that fails: told with its log, and gone."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from sglang_dflash.offline import EngineProcess


def test_a_failed_engine_is_told_with_its_log_and_leaves_no_process(tmp_path: Path) -> None:
    log, model = tmp_path / "log", tmp_path / "nowhere"
    with pytest.raises(RuntimeError, match="plain engine: ") as error:
        EngineProcess("plain", log, model_path=str(model))
    assert multiprocessing.active_children() == []
    assert str(log) in str(error.value)
    assert str(model) in str(error.value)
