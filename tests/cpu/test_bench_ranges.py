"""The stages' marks: which functions get them, what the profiler sees, and that only a profiled engine has them."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from sglang_dflash import config, hooks
from sglang_dflash.bench import ranges
from sglang_dflash.draft import proposer

torch.set_num_threads(1)


class _Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_extend(self) -> bool:
        return self.name == "extend"

    def is_idle(self) -> bool:
        return self.name == "idle"


def _batch(mode: str) -> Any:
    return types.SimpleNamespace(forward_mode=_Mode(mode))


class _Worker:
    def step(self, batch: Any, number: int) -> int:
        """Doubles."""
        return self.stage(number)

    def stage(self, number: int) -> int:
        return 2 * number


class _Proposer:
    def score(self, number: int) -> int:
        return number + 1


def _seen(run: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    return [event.name for event in profiler.events() if event.name.startswith(ranges.PREFIX)]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a worker, marked."""
    module: Any = types.ModuleType("marked_worker")
    module.Worker = type("Worker", (_Worker,), dict(vars(_Worker)))
    monkeypatch.setitem(sys.modules, "marked_worker", module)
    paths = {"marked_worker.Worker.step": ranges.ROUND, "marked_worker.Worker.stage": ranges.VERIFY}
    monkeypatch.setitem(ranges.MARKED, "stock", paths)
    ranges.mark("stock")
    return module.Worker()


def test_stages_are_seen_nested_in_rounds_and_return_what_they_did(marked: Any) -> None:
    results: list[int] = []
    names = _seen(
        lambda: results.extend([marked.step(_batch("decode"), 4), marked.step(batch=_batch("decode"), number=5)])
    )
    assert results == [8, 10]
    assert sorted(names) == ["dflash.round", "dflash.round", "dflash.verify", "dflash.verify"]
    assert type(marked).step.__doc__ == "Doubles."


@pytest.mark.parametrize("mode", ["extend", "idle"])
def test_a_prefill_is_no_round(marked: Any, mode: str) -> None:
    assert _seen(lambda: marked.step(_batch(mode), 4)) == ["dflash.verify"]


def test_a_proposers_head_is_marked_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ranges.MARKED, "ours", {})
    monkeypatch.setattr(proposer, "make", lambda name: _Proposer())
    ranges.mark("ours")
    made: Any = proposer.make("argmax")
    assert _seen(lambda: made.score(1)) == ["dflash.head"]
    assert made.score(1) == 2


@pytest.mark.parametrize("worker", ["ours", "stock"])
def test_every_marked_function_exists(worker: ranges.Worker) -> None:
    import pkgutil

    for path in ranges.MARKED[worker]:
        assert callable(pkgutil.resolve_name(path)), path


def test_only_a_profiled_engine_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours marks when the worker is made; the built-in worker gets the one hook that marks it, and keeps its class."""
    marks: list[str] = []
    applied: list[dict[str, Any]] = []
    monkeypatch.setattr(ranges, "mark", marks.append)
    monkeypatch.setattr(hooks, "_apply", lambda targets: applied.append(targets) or [])
    monkeypatch.delenv(config.RANGES_VARIABLE, raising=False)
    hooks.install()
    assert len(applied[0]) == 3
    monkeypatch.setenv(config.RANGES_VARIABLE, "stock")
    hooks.install()
    [(target, hook)] = applied[1].items()
    assert target.endswith("SpeculativeAlgorithm.create_worker")
    assert marks == []
    assert hook(lambda self, arguments: (self, arguments), "dflash", "arguments") == ("dflash", "arguments")
    assert marks == ["stock"]


@pytest.mark.parametrize(("value", "expected"), [(None, []), ("ours", ["ours"])])
def test_our_worker_is_marked_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: list[str]
) -> None:
    from sglang_dflash import hostcheck
    from sglang_dflash.host import arguments

    marks: list[str] = []
    monkeypatch.setattr(ranges, "mark", marks.append)
    monkeypatch.setattr(arguments, "reasons_for_stock", lambda server_args: [])
    monkeypatch.setattr(hostcheck, "problems", lambda contracts: [])
    monkeypatch.setattr(hooks, "_apply", lambda targets: [])
    if value is None:
        monkeypatch.delenv(config.RANGES_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(config.RANGES_VARIABLE, value)
    algorithm = types.SimpleNamespace(is_dflash=lambda: True)
    server_args = types.SimpleNamespace(enable_deterministic_inference=False, grammar_backend=None)
    assert hooks._create_worker(None, algorithm, server_args).__name__ == "DFlashWorker"
    assert marks == expected
