"""Plots of a training run: its curves, and acceptance by position of the block."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from sglang_dflash import validation
from sglang_dflash.train.evaluate import Evaluation

_DPI = 120
# A rate from fewer blocks is off by more than 0.2 once in twenty times: drawn, it would look like an effect.
_MIN_BLOCKS = 20
# What of a row is drawn, with its axis.
_CURVES = {
    "loss": "loss (nats a slot, weighted)",
    "slot1_accuracy": "accuracy of slot 1",
    "acceptance_length": "acceptance length (tokens, bonus included)",
}


class Row(BaseModel):
    """A line of metrics.jsonl, as far as it is drawn."""

    step: int
    split: str
    loss: float
    slot1_accuracy: float
    acceptance_length: float


def read_metrics(file: str | Path) -> dict[str, list[Row]]:
    """The rows of a metrics.jsonl by split, in the order of their steps.

    A line counts once its end is written, so a run that is going on or was killed can be read. A step that is there
    twice was done again after a kill: its last row counts.

    Raises ValueError that names the line that is no row, or where there is none.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{path}: expected a training run's metrics.jsonl, got no file; train first")
    rows: dict[str, dict[int, Row]] = {}
    for number, line in enumerate(path.read_text().split("\n")[:-1], start=1):
        try:
            row = Row.model_validate_json(line)
        except ValidationError as error:
            found = "; ".join(validation.problems(error))
            raise ValueError(f"{path}, line {number}: expected a row of metrics, got: {found}") from None
        rows.setdefault(row.split, {})[row.step] = row
    if not rows:
        raise ValueError(f"{path}: expected at least one row, got none; train for at least `log_every` steps")
    return {split: [by_step[step] for step in sorted(by_step)] for split, by_step in sorted(rows.items())}


def plot_training(metrics: str | Path, image: str | Path, title: str) -> Path:
    """Draw loss, slot-1 accuracy and acceptance length over the steps, a line for every split; return the image's path.

    The image's format is that of its name's ending. Raises ValueError where matplotlib or the metrics are missing.
    """
    figure = _figure(width=14.0, height=4.2)
    splits = read_metrics(metrics)
    for axes, (key, label) in zip(figure.subplots(1, len(_CURVES)), _CURVES.items()):
        for split, rows in splits.items():
            # A held-out split has few rows: without markers a single one would not be seen.
            marker = "o" if len(rows) <= 50 else None
            values = [getattr(row, key) for row in rows]
            axes.plot([row.step for row in rows], values, label=split, marker=marker, markersize=3)
        axes.set(xlabel="training step", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend(title="split")
    return _save(figure, image, title)


def plot_acceptance(evaluation: Evaluation, image: str | Path, title: str) -> Path:
    """Draw conditional acceptance by slot, a line for every family and one for all; return the image's path.

    A slot that fewer than _MIN_BLOCKS blocks of a family reached has no point. Raises ValueError where matplotlib is
    missing.
    """
    figure = _figure(width=8.0, height=5.0)
    axes = figure.subplots()
    slots = range(1, evaluation.block_size)
    lines = {**evaluation.families, "all families": evaluation.overall}
    for name, acceptance in lines.items():
        style: dict[str, Any] = {"color": "black", "linewidth": 2.5} if acceptance is evaluation.overall else {}
        rates = [
            math.nan if rate is None or num_blocks < _MIN_BLOCKS else rate
            for rate, num_blocks in zip(acceptance.slots, acceptance.reached)
        ]
        axes.plot(slots, rates, marker="o", markersize=3, label=f"{name} ({acceptance.length:.2f})", **style)
    axes.set(
        xlabel=f"slot of the block (reached by {_MIN_BLOCKS} blocks or more)",
        ylabel="P(slot right | slots before it right)",
        ylim=(0, 1.02),
    )
    axes.set_xticks(list(slots))
    axes.grid(alpha=0.3)
    axes.legend(title="family (acceptance length, tokens)")
    return _save(figure, image, title)


def _figure(width: float, height: float) -> Any:
    """A figure of `width` x `height` inches. Made without pyplot, so it keeps no state and is drawn by Agg."""
    check_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def check_matplotlib() -> None:
    """Raise ValueError where it is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"expected matplotlib installed to draw plots, got: {error}; run: pip install 'sglang-dflash[train]'"
        ) from error


def _save(figure: Any, image: str | Path, title: str) -> Path:
    path = Path(image)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    return path
