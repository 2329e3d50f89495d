"""A training run's state on disk: written whole or not at all, the newest readable one taken up again."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch

KEPT = 2
_NAME = re.compile(r"step-(\d+)\.pt")


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after `step` steps; older ones than the last KEPT go once it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:07d}.pt"
    scratch = path.with_suffix(".tmp")
    torch.save({"step": step, **state}, scratch)
    scratch.replace(path)
    for old in _all(folder)[:-KEPT]:
        old.unlink()
    return path


def load(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """The newest state, None where there is none."""
    newest = _all(folder)
    return torch.load(newest[-1], map_location=device, weights_only=True) if newest else None


def clear(folder: Path) -> None:
    """Remove a finished run's states."""
    shutil.rmtree(folder, ignore_errors=True)


def _all(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found)
