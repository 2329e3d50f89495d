"""A training run's state on disk: written whole or not at all, the newest one taken up again."""

from __future__ import annotations

import os
import pickle
import re
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
    with scratch.open("wb") as file:
        torch.save({"step": step, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    for old in _all(folder)[:-KEPT]:
        old.unlink()
    return path


def load(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """The newest state, None where there is none. Raises ValueError where it cannot be read."""
    found = _all(folder)
    if not found:
        return None
    try:
        return torch.load(found[-1], map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{found[-1]}: expected a training run's state, got a damaged file; delete it, and the run goes on from "
            "the one before"
        ) from error


def _all(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found)
