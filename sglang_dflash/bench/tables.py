"""Results as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from sglang_dflash.bench import trace

MIN_WIDTH = 150  # of a table that goes to a file or a narrow terminal: a wrapped row is not readable


def show(table: Group) -> None:
    """Print it."""
    Console(width=max(Console().width, MIN_WIDTH)).print(table)


def comparison(result: Mapping[str, Any]) -> Group:
    """What `bench compare` measured: a row a batch size and column, then first tokens, then notes."""
    setup = result["setup"]
    parts: list[Any] = [Text(title(setup), style="bold")]
    parts.append(_answers(result) if "prompts" in setup else _steps(result))
    if result["ttft_ms"]:
        parts.append(_first_tokens(result))
    notes = [f"check: {result['check']['says']}"]
    if setup["forced_acceptance"] is not None:
        notes.append(f"acceptance forced to {setup['forced_acceptance']} for all but plain decoding: no real answers")
    if setup["sampling"]:
        told = ", ".join(f"{name} {value}" for name, value in setup["sampling"].items())
        notes.append(f"sampled ({told}): answers are draws, so tokens are not compared with plain decoding's")
    notes.append(f"median (least to most) of {setup['repeats']} repeats, engines in turn")
    return Group(*parts, *map(Text, notes))


def title(setup: Mapping[str, Any]) -> str:
    versions = setup["versions"]
    stack = ", ".join(f"{name} {versions[name]}" for name in ("sglang", "torch", "sglang-dflash"))
    driver = f", driver {setup['driver']}" if setup["driver"] else ""
    return f"{setup['card']}{driver}, {setup['weights']} weights, {setup['engine']['dtype']}, {stack}"


def spread(figure: Mapping[str, Any], digits: int) -> str:
    low, high = figure["min"], figure["max"]
    return f"{figure['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _against(row: Mapping[str, Any], key: str, name: str, kinds: Mapping[str, str]) -> list[str]:
    """`name`'s figure as a ratio to plain decoding's and to stock's; empty cells where it is one of them itself."""
    cells = []
    for other in ("plain", "stock"):
        if kinds[name] != "ours" or other not in row[key]:
            cells.append("")
            continue
        mine, theirs = row[key][name]["median"], row[key][other]["median"]
        cells.append(f"{mine / theirs:.3f}")
    return cells


def _steps(result: Mapping[str, Any]) -> Table:
    kinds = {name: column["kind"] for name, column in result["setup"]["columns"].items()}
    table = Table("batch", "engine", "ms a step", "of plain's", "of stock's", "tokens/s", "acceptance", "differing")
    for batch, row in result["batches"].items():
        for name in row["step_ms"]:
            ratios = _against(row, "step_ms", name, kinds)
            cells = [spread(row["step_ms"][name], 3), *ratios, spread(row["tokens_per_s"][name], 1)]
            cells += [f"{row['acceptance_length'][name]:.2f}", _differing(row, name)]
            table.add_row(str(batch), name, *cells)
        table.add_section()
    return table


def _answers(result: Mapping[str, Any]) -> Table:
    kinds = {name: column["kind"] for name, column in result["setup"]["columns"].items()}
    table = Table("batch", "engine", "tokens/s", "x plain", "x stock", "acceptance", "by family", "differing")
    for batch, row in result["batches"].items():
        for name in row["tokens_per_s"]:
            evaluation = row["acceptance"].get(name)
            families = evaluation["families"] if evaluation else {}
            by_family = ", ".join(f"{family} {figures['length']:.2f}" for family, figures in families.items())
            length = f"{evaluation['overall']['length']:.2f}" if evaluation else ""
            cells = [spread(row["tokens_per_s"][name], 1)]
            cells += [*_against(row, "tokens_per_s", name, kinds), length, by_family]
            table.add_row(str(batch), name, *cells, _differing(row, name))
        table.add_section()
    return table


def _differing(row: Mapping[str, Any], name: str) -> str:
    """Fractions of requests that differ from plain decoding and from one repeat to the next."""
    rates = row.get("differing_requests")
    if rates is None:
        return "sampled"
    parts = [f"run to run {rates[f'{name} run to run']:.3f}"]
    if f"plain against {name}" in rates:
        parts.insert(0, f"from plain {rates[f'plain against {name}']:.3f}")
    return ", ".join(parts)


def _first_tokens(result: Mapping[str, Any]) -> Table:
    names = list(result["setup"]["columns"])
    table = Table("prompt tokens, not cached", *(f"{name}: ms to the first token" for name in names))
    for num_tokens, row in result["ttft_ms"].items():
        table.add_row(str(num_tokens), *(spread(row[name], 2) for name in names))
    return table


def rounds(result: Mapping[str, Any]) -> Group:
    """What `bench profile` measured: a table a batch size, a row a stage."""
    setup, floor = result["setup"], result["floor"]
    floors = {
        name: None if _reads_less(column, setup["engine"]) else floor["floor_ms"]
        for name, column in setup["columns"].items()
    }
    parts: list[Any] = [Text(title(setup), style="bold")]
    for batch, row in result["batches"].items():
        parts += [Text(f"batch {batch}: one decode round"), _stages(row, floors)]
        for name, breakdown in row["rounds"].items():
            parts += [Text(f"{name}: {note}") for note in breakdown["notes"]]
    sizes = ", ".join(f"{part} {size / 1e9:.3f} GB" for part, size in floor["weight_bytes"].items())
    parts.append(Text(f"floor: {sizes}, read at {floor['copy_gbytes_per_s']:.0f} GB/s, the rate of a large copy here"))
    parts.append(
        Text("busy: kernels' time; gaps and host: under the profiler, which slows the host; a gap is its kernel's")
    )
    if setup["forced_acceptance"] is not None:
        parts.append(Text(f"acceptance forced to {setup['forced_acceptance']}: no real answers"))
    return Group(*parts)


def _reads_less(column: Mapping[str, Any], everywhere: Mapping[str, Any]) -> bool:
    """Whether the column's drafter or draft head has fewer bytes than the floor counts."""
    engine = {**everywhere, **column["engine"]}
    smaller = any(engine.get(name) for name in ("speculative_draft_model_quantization", "speculative_token_map"))
    return smaller or column["settings"].get("draft_head", "dense") != "dense"


def _stages(row: Mapping[str, Any], floors: Mapping[str, float | None]) -> Table:
    breakdowns = row["rounds"]
    on_device = {name for name, b in breakdowns.items() if any(s["busy_ms"] is not None for s in b["stages"].values())}
    table = Table("stage")
    for name in breakdowns:
        headings = ("busy ms", "kernels", "gaps ms", "host ms") if name in on_device else ("host ms",)
        for heading in headings:
            table.add_column(f"{name} {heading}", justify="right")
    order = [stage for breakdown in breakdowns.values() for stage in breakdown["stages"]]
    totals = {name: _total(breakdown) for name, breakdown in breakdowns.items()}
    stages = {name: breakdown["stages"] | {"sum": totals[name]} for name, breakdown in breakdowns.items()}
    for stage in [*(s for s in trace.ROWS if s in order), "sum"]:
        cells = [cell for name in stages for cell in _cells(stages[name].get(stage), name in on_device)]
        table.add_row(stage, *cells, end_section=stage == "sum")
    for label, value in (("step, no profiler", "step"), ("idle", "idle"), ("floor", "floor")):
        cells = []
        for name in breakdowns:
            step_ms, busy_ms = row["step_ms"][name]["median"], totals[name]["busy_ms"]
            idle = None if busy_ms is None else step_ms - busy_ms
            figure = {"step": step_ms, "idle": idle, "floor": floors[name]}[value]
            width = 4 if name in on_device else 1
            cells += ["-" if figure is None else f"{figure:.3f}", *[""] * (width - 1)]
        table.add_row(label, *cells)
    return table


def _total(breakdown: Mapping[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for key in ("busy_ms", "gap_ms", "num_kernels", "host_ms"):
        values = [stage[key] for stage in breakdown["stages"].values() if stage[key] is not None]
        columns[key] = sum(values) if values else None
    return columns


def _cells(stage: Mapping[str, Any] | None, on_device: bool) -> list[str]:
    if stage is None:
        return ["-"] * (4 if on_device else 1)
    if not on_device:
        return [f"{stage['host_ms']:.3f}"]
    return [
        f"{stage['busy_ms']:.3f}",
        f"{stage['num_kernels']:.1f}",
        *(f"{stage[k]:.3f}" for k in ("gap_ms", "host_ms")),
    ]
