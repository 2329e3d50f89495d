"""Time each op on this machine's GPU: `python kernels/bench_kernels.py [--out FILE.json]`.

Every case is checked against the reference first, then timed as it is served: captured in a CUDA graph, whose calls
rotate over enough input sets to exceed the L2 cache twice. `us` is the median over replays, divided by the calls of a
graph; `eager us` is wall time per call outside of a graph, the cost of the launch included. `of copy` compares the
bytes that the op must move with what a large device-to-device copy moves in the same time on the same card.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from bench_cases import BASELINES, CUDA, MODELS, Call, Case, cases_of

COPY_BYTES = 1 << 30
MIN_CALLS = 32  # in one graph
MAX_INPUT_SETS = 256
REPLAYS = 50
EAGER_CALLS = 200


@dataclass(frozen=True)
class Row:
    op: str
    model: str
    shape: str
    graph_us: float
    eager_us: float
    bytes_moved: int
    gbytes_per_s: float
    of_copy: float
    input_sets: int


# --- timing ---------------------------------------------------------------------------------------------------------


def graph_us(calls: list[Call]) -> float:
    """Median device time of one call, in microseconds, over graph replays."""
    repeats = math.ceil(MIN_CALLS / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times_ms = []
    for replay in range(REPLAYS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 3:  # the first replays warm the card up
            times_ms.append(start.elapsed_time(end))
    return statistics.median(times_ms) * 1e3 / (repeats * len(calls))


def eager_us(calls: list[Call]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for index in range(EAGER_CALLS):
        calls[index % len(calls)]()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / EAGER_CALLS


def copy_bytes_per_s() -> float:
    """Bytes read and written by a second of copying 1 GiB."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * COPY_BYTES / (graph_us([lambda: target.copy_(source)]) * 1e-6)


def measure(case: Case, l2_bytes: int, copy_rate: float) -> Row:
    case.check()
    input_sets = max(2, min(MAX_INPUT_SETS, math.ceil(2 * l2_bytes / case.bytes_moved)))
    calls = [case.make() for _ in range(input_sets)]
    for call in calls:  # compiles; a graph capture may not
        call()
    torch.cuda.synchronize()
    in_graph = graph_us(calls)
    rate = case.bytes_moved / (in_graph * 1e-6)
    return Row(
        op=case.op,
        model=case.model,
        shape=case.shape,
        graph_us=in_graph,
        eager_us=eager_us(calls),
        bytes_moved=case.bytes_moved,
        gbytes_per_s=rate / 1e9,
        of_copy=rate / copy_rate,
        input_sets=input_sets,
    )


def print_table(rows: list[Row]) -> None:
    print(f"{'op':15} {'model':13} {'shape':24} {'us':>9} {'eager us':>9} {'MB':>9} {'GB/s':>7} {'of copy':>8}")
    for row in sorted(rows, key=lambda row: (BASELINES.get(row.op, row.op), row.model)):
        print(
            f"{row.op:15} {row.model:13} {row.shape:24} {row.graph_us:9.2f} {row.eager_us:9.2f} "
            f"{row.bytes_moved / 1e6:9.3f} {row.gbytes_per_s:7.0f} {row.of_copy:8.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--models", nargs="+", default=[m.name for m in MODELS], choices=[m.name for m in MODELS])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()

    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(CUDA)
    copy_rate = copy_bytes_per_s()
    report = {
        "command": " ".join(["python", *sys.argv]),
        "card": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gbytes_per_s": copy_rate / 1e9,
    }
    for name, value in report.items():
        print(f"{name}: {value}")
    rows = []
    for model in MODELS:
        if model.name in options.models:
            for case in cases_of(model, options.batches):
                rows.append(measure(case, properties.L2_cache_size, copy_rate))
                torch.cuda.empty_cache()
    print_table(rows)
    if options.out:
        options.out.write_text(json.dumps(report | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
