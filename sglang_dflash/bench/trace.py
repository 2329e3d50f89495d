"""A decode round by stage, from the file that PyTorch's profiler wrote (Chrome's trace format, times in microseconds).

On a GPU a kernel belongs to the stage that launched it: the profiler gives a kernel and its launch one correlation, and
the launch stands inside a range of `ranges` on the host. All kernels of a CUDA graph share the graph's launch; so what
ends a graph is told apart by name. The draft head starts at the last matrix product before the argmax in the drafter's
graph. In the target's, injection starts at the second last before features are stored, and the argmax before it belongs
to acceptance. Where kernels overlap, the one that started first has the time. A gap is charged to the kernel that ends
it.

On a CPU there are no kernels, and a stage's time is that of its ranges.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import gzip
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_dflash.bench import ranges

GLUE = "glue"  # in a round, outside of its stages
SCHEDULER = "scheduler"  # outside of the worker: SGLang's scheduler, its copies and its bookkeeping
UNATTRIBUTED = "unattributed"  # kernels whose launch the profiler did not see
ROWS = (*ranges.STAGES, GLUE, SCHEDULER, UNATTRIBUTED)
SKIPPED_ROUNDS = 2  # at the start, where the profiler itself is still warming up

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ARGMAX = re.compile(r"argmax|_split_kernel|_combine_kernel|top1", re.IGNORECASE)
# Norms in CUTLASS's own language have its name too.
_PRODUCT = re.compile(
    r"^(?!.*norm).*(gemm|gemv|cutlass|nvjet|xmma|cublas|splitk|fp8_logits|skinny_linear)", re.IGNORECASE
)
_TOP1 = re.compile(r"^_(split|combine)_kernel$")  # this package's argmax
_STORE = re.compile(r"store_features")
_SPLIT_SUM = re.compile(r"splitkreduce", re.IGNORECASE)  # the second kernel of a product split over its inner dimension


@dataclasses.dataclass(frozen=True)
class Span:
    """A named range on one host thread."""

    name: str
    start_us: float
    end_us: float
    thread: Any


class _Spans:
    """Ranges that do not overlap, searched by time: the worker runs on one thread."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: span.start_us)
        self._starts = [span.start_us for span in self.spans]

    def at(self, time_us: float, thread: Any) -> Span | None:
        number = bisect.bisect_right(self._starts, time_us) - 1
        span = self.spans[number] if number >= 0 else None
        return span if span is not None and span.thread == thread and time_us < span.end_us else None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, copy or fill on the device, and its launch; `launch_us` is None where no launch was seen."""

    name: str
    start_us: float
    end_us: float
    correlation: int | None
    launch_us: float | None
    thread: Any


@dataclasses.dataclass
class Stage:
    """A row of the table; everything is of one round, on average.

    Attributes:
        busy_ms: time the device worked on it; None on a CPU.
        gap_ms: time the device waited for its kernels, under the profiler; None on a CPU.
        num_kernels: kernels, copies and fills.
        host_ms: time of its ranges on the host, under the profiler.
    """

    busy_ms: float | None = None
    gap_ms: float | None = None
    num_kernels: float = 0.0
    host_ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """A decode round.

    Attributes:
        num_rounds: rounds behind the averages.
        round_ms: from the start of a round to the start of the next, on the host and under the profiler.
        stages: by name, in ROWS' order; those that never occurred are left out.
        notes: what could not be told, a sentence each.
    """

    num_rounds: int
    round_ms: float
    stages: dict[str, Stage]
    notes: tuple[str, ...]

    @property
    def busy_ms(self) -> float | None:
        """Time the device worked; None on a CPU."""
        times = [stage.busy_ms for stage in self.stages.values() if stage.busy_ms is not None]
        return sum(times) if times else None


def read(path: Path) -> Breakdown:
    """The breakdown of a trace file, compressed or not. Raises ValueError where it holds too few rounds."""
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    spans, kernels = _spans(events), _kernels(events)
    every = sorted((s for s in spans if s.name == ranges.ROUND), key=lambda span: span.start_us)
    if len(every) < SKIPPED_ROUNDS + 2:
        raise ValueError(f"{path}: expected {SKIPPED_ROUNDS + 2} rounds or more, got {len(every)}; raise --new-tokens")
    window = (every[SKIPPED_ROUNDS].start_us, every[-1].start_us)
    rounds = _Spans(every[SKIPPED_ROUNDS:-1])
    num_rounds = len(rounds.spans)
    inside = [span for span in spans if span.name != ranges.ROUND and rounds.at(span.start_us, span.thread)]
    heads = _Spans(span for span in inside if span.name == ranges.HEAD)
    outer = _Spans(_outermost(span for span in inside if span.name != ranges.HEAD))
    stages = _host_times(rounds, outer, heads, window)
    notes = _device_times(stages, rounds, outer, heads, kernels, window) if kernels else []
    kept = {name: stages[name] for name in ROWS if stages[name] not in (Stage(), Stage(0.0, 0.0))}
    return Breakdown(num_rounds, (window[1] - window[0]) / num_rounds / 1000, kept, tuple(notes))


def _spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    return [
        Span(event["name"].removeprefix(ranges.PREFIX), event["ts"], event["ts"] + event["dur"], event["tid"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(ranges.PREFIX)
    ]


def _kernels(events: Sequence[dict[str, Any]]) -> list[Kernel]:
    """In the order of their start on the device."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    kernels = []
    for event in events:
        if event.get("cat") in _DEVICE_WORK:
            correlation = event.get("args", {}).get("correlation")
            launch = launches.get(correlation)
            at = (None, None) if launch is None else (launch["ts"], launch["tid"])
            kernels.append(Kernel(event["name"], event["ts"], event["ts"] + event["dur"], correlation, *at))
    return sorted(kernels, key=lambda kernel: kernel.start_us)


def _outermost(spans: Iterable[Span]) -> list[Span]:
    """Of nested ranges the outer one."""
    outer: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start_us, -span.end_us)):
        if not outer or span.start_us >= outer[-1].end_us:
            outer.append(span)
    return outer


def _host_times(rounds: _Spans, outer: _Spans, heads: _Spans, window: tuple[float, float]) -> dict[str, Stage]:
    """All rows with the host's time; the time of a head is taken from the stage around it."""
    total_us: dict[str, float] = collections.defaultdict(float)
    for span in [*outer.spans, *heads.spans]:
        total_us[span.name] += span.end_us - span.start_us
    for head in heads.spans:
        if around := outer.at(head.start_us, head.thread):
            total_us[around.name] -= head.end_us - head.start_us
    in_rounds = sum(span.end_us - span.start_us for span in rounds.spans)
    glue = in_rounds - sum(total_us.values())
    total_us |= {GLUE: glue, SCHEDULER: window[1] - window[0] - in_rounds}
    return {name: Stage(host_ms=total_us.get(name, 0.0) / len(rounds.spans) / 1000) for name in ROWS}


def _device_times(
    stages: dict[str, Stage],
    rounds: _Spans,
    outer: _Spans,
    heads: _Spans,
    kernels: Sequence[Kernel],
    window: tuple[float, float],
) -> list[str]:
    """Fill in the device's columns; what could not be told."""
    # A kernel without a launch is placed by its own time.
    chosen = [k for k in kernels if window[0] <= (k.start_us if k.launch_us is None else k.launch_us) < window[1]]
    if not chosen:
        return ["no kernel was launched inside a round: nothing of the device is known"]
    names = [_stage_of(kernel, rounds, outer, heads) for kernel in chosen]
    notes = []
    head = _split_tail(chosen, names, ranges.DRAFT, ranges.HEAD, _ARGMAX, 1)
    # The projection of the features, then keys and values of all layers.
    _split_tail(chosen, names, ranges.VERIFY, ranges.INJECT, _STORE, 2)
    for number, kernel in enumerate(chosen):
        if names[number] == ranges.VERIFY and _TOP1.search(kernel.name):
            names[number] = ranges.ACCEPT
    if not head and ranges.HEAD not in names:
        notes.append("the draft head could not be told from the drafter's layers by its kernels: draft holds both")
    if num := names.count(UNATTRIBUTED):
        notes.append(f"{num} of {len(names)} kernels have no launch in the trace")
    busy_us: dict[str, float] = collections.defaultdict(float)
    gap_us: dict[str, float] = collections.defaultdict(float)
    cursor = chosen[0].start_us
    for kernel, name in zip(chosen, names, strict=True):
        gap_us[name] += max(0.0, kernel.start_us - cursor)
        busy_us[name] += max(0.0, kernel.end_us - max(kernel.start_us, cursor))
        cursor = max(cursor, kernel.end_us)
    num_rounds = len(rounds.spans)
    for name, stage in stages.items():
        stage.busy_ms = busy_us.get(name, 0.0) / num_rounds / 1000
        stage.gap_ms = gap_us.get(name, 0.0) / num_rounds / 1000
        stage.num_kernels = names.count(name) / num_rounds
    return notes


def _stage_of(kernel: Kernel, rounds: _Spans, outer: _Spans, heads: _Spans) -> str:
    if kernel.launch_us is None:
        return UNATTRIBUTED
    at = (kernel.launch_us, kernel.thread)
    if heads.at(*at):
        return ranges.HEAD
    if stage := outer.at(*at):
        return stage.name
    return GLUE if rounds.at(*at) else SCHEDULER


def _split_tail(
    kernels: Sequence[Kernel], names: list[str], graph: str, stage: str, last: re.Pattern[str], num_products: int
) -> bool:
    """Give the end of every graph of one stage to another stage; whether there was one to give.

    Args:
        names: of the kernels' stages, changed here.
        graph: stage whose graphs are split.
        stage: what their ends are.
        last: a kernel of the end; the last one counts, since attention over split keys has such names too.
        num_products: the end begins at this many matrix products before it.
    """
    launches: dict[int, list[int]] = {}
    for number, (kernel, name) in enumerate(zip(kernels, names, strict=True)):
        if name == graph and kernel.correlation is not None:
            launches.setdefault(kernel.correlation, []).append(number)
    found = False
    for numbers in launches.values():
        matches = [i for i, n in enumerate(numbers) if last.search(kernels[n].name)]
        if not matches:
            continue
        first, missing = matches[-1], num_products
        for i in reversed(range(first)):
            name = kernels[numbers[i]].name
            if _PRODUCT.search(name):
                # A product over split columns has a second kernel, which adds them up.
                first, missing = i, missing - (not _SPLIT_SUM.search(name))
            if not missing:
                break
        for number in numbers[first:]:
            names[number] = stage
        found = True
    return found
