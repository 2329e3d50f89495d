"""What is compared: every column of a table is an engine of one kind with one configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_dflash import config
from sglang_dflash.cpu import bootstrap
from sglang_dflash.offline import EngineProcess, Kind

KINDS: tuple[Kind, ...] = ("plain", "stock", "ours")
# Key of a variant's JSON that holds arguments of sglang.Engine; the others are the plugin's settings.
ENGINE_KEY = "engine"


@dataclasses.dataclass(frozen=True)
class Column:
    """One engine of a comparison.

    Attributes:
        name: the column's heading.
        kind: plain decoding, SGLang's built-in worker (stock), or ours.
        settings: of the plugin, as SGLANG_DFLASH_CONFIG takes them; of ours alone.
        engine: arguments of `sglang.Engine` that this column has for itself.
    """

    name: str
    kind: Kind
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def of(kinds: str | None, settings: str | None, variants: Sequence[str]) -> list[Column]:
    """The columns that the options ask for, in the table's order.

    Args:
        kinds: comma-separated; None for all, without stock on a CPU, where SGLang's own worker does not run.
        settings: the plugin's settings for `ours`, a JSON object.
        variants: `NAME=JSON` each: another engine of ours, with these settings.

    Raises ValueError for an option of the wrong form.
    """
    everywhere = [kind for kind in KINDS if kind != "stock" or not bootstrap.wanted()]
    names = kinds.split(",") if kinds is not None else everywhere
    if unknown := [name for name in names if name not in KINDS]:
        raise ValueError(f"--kinds: expected some of {', '.join(KINDS)}, got {', '.join(unknown)}; correct it")
    if "stock" in names and bootstrap.wanted():
        raise ValueError("--kinds: expected plain and ours on a CPU, got stock, which needs a GPU; leave it out")
    columns = [
        _column(kind, kind, settings if kind == "ours" and settings is not None else "{}", "--config")
        for kind in KINDS
        if kind in names
    ]
    for variant in variants:
        name, separator, text = variant.partition("=")
        if not separator or not name:
            raise ValueError(f"--ours: expected NAME=JSON, got {variant!r}; name the variant")
        columns.append(_column(name, "ours", text, f"--ours {name}"))
    doubled = sorted({c.name for c in columns if sum(other.name == c.name for other in columns) > 1})
    if doubled:
        raise ValueError(f"expected names that differ, got {', '.join(doubled)} twice; name the variants otherwise")
    return columns


def _column(name: str, kind: Kind, text: str, option: str) -> Column:
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: expected a JSON object, got {text!r} ({error}); correct it") from None
    if not isinstance(settings, dict) or not isinstance(settings.get(ENGINE_KEY, {}), dict):
        raise ValueError(f"{option}: expected a JSON object, {ENGINE_KEY} in it another, got {text!r}; correct it")
    engine = settings.pop(ENGINE_KEY, {})
    if settings:
        config.load({config.CONFIG_VARIABLE: json.dumps(settings)})  # a mistake is told before an engine starts
    return Column(name, kind, settings, engine)


def environment(column: Column, forced_acceptance: float | None) -> dict[str, str]:
    """Variables of the column's engine."""
    variables = {}
    if column.kind == "ours":
        # Also where it is empty: what the user's own shell sets must not reach only this column unseen.
        variables[config.CONFIG_VARIABLE] = json.dumps(dict(column.settings)) if column.settings else ""
    if column.kind != "plain" and forced_acceptance is not None:
        variables["SGLANG_SIMULATE_ACC_LEN"] = str(forced_acceptance)
    return variables


@contextlib.contextmanager
def engines(
    columns: Sequence[Column],
    logs: Path,
    arguments: Mapping[str, Any],
    *,
    forced_acceptance: float | None = None,
    variables: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[dict[str, EngineProcess]]:
    """The columns' engines by name, all at once, so that the card's state is the same for all.

    They start together: each takes a minute on its own, most of it on one core.

    Args:
        logs: folder of their output, made where it is not there.
        arguments: of `sglang.Engine`; a column's own win.
        forced_acceptance: tokens a round commits whatever the target says; plain decoding has none.
        variables: more environment variables, by column name.
    """
    logs.mkdir(parents=True, exist_ok=True)

    def start(column: Column) -> EngineProcess:
        env = environment(column, forced_acceptance) | dict((variables or {}).get(column.name, {}))
        log = logs / f"{column.name}.log"
        return EngineProcess(column.kind, log, env=env, **{**arguments, **dict(column.engine)})

    print(f"starting {', '.join(column.name for column in columns)}", file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(columns)) as pool:
            starts = [pool.submit(start, column) for column in columns]
        for begun in starts:
            if begun.exception() is None:
                stack.enter_context(begun.result())
        yield {column.name: begun.result() for column, begun in zip(columns, starts, strict=True)}
