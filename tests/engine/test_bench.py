"""`sglang-dflash bench profile` on a real engine: SGLang's profiler, the marks in its scheduler, the trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sglang_dflash import cli, demo

pytestmark = pytest.mark.engine


def test_a_round_of_ours_falls_into_its_stages(models: demo.Models, tmp_path: Path) -> None:
    paths = ["--target", str(models.target), "--drafter", str(models.drafter), "--logs", str(tmp_path / "logs")]
    sizes = ["--kinds", "ours", "--batches", "2", "--new-tokens", "20", "--repeats", "1"]
    assert cli.main(["bench", "profile", *paths, *sizes, "--out", str(tmp_path / "p.json")]) == 0
    profiled = json.loads((tmp_path / "p.json").read_text())["batches"]["2"]["rounds"]["ours"]
    stages = profiled["stages"]
    assert {"draft", "head", "verify", "accept", "inject", "glue", "scheduler"} <= set(stages)
    assert profiled["num_rounds"] >= 5
    assert sum(stage["host_ms"] for stage in stages.values()) == pytest.approx(profiled["round_ms"])
    if torch.cuda.is_available():
        assert profiled["notes"] == []
        assert all(stages[name]["busy_ms"] > 0 for name in ("draft", "head", "verify", "accept", "inject"))
