"""`sglang-dflash bench cpu-products`: the matrix products of one step of a target, by MKL and by oneDNN.

The comparison behind `sglang_dflash.cpu.products`: float32, every linear layer's weight once, the head among them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sglang_dflash.bench import figures, setup
from sglang_dflash.cpu import products

ROWS = (1, 4, 16, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, help="directory with a config.json; the demo's target otherwise")
    parser.add_argument("--rows", type=setup.integers, default=list(ROWS), metavar="N,N", help="rows of a product")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, help="PyTorch's threads; its own choice otherwise")


def main(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.repeats < 1:
        raise ValueError(f"--repeats: expected at least 1, got {args.repeats}; raise it")
    if not torch.backends.mkldnn.is_available():
        raise ValueError("expected PyTorch with oneDNN, got one without; there is nothing to compare")
    if args.target is None:
        from sglang_dflash import demo

        args.target = demo.prepare_target()
    shapes = product_shapes(json.loads((args.target / "config.json").read_text()))
    # As in the engine (see cpu.bootstrap). OpenMP reads it as it starts, so that it takes a process of its own.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    threads = args.threads or torch.get_num_threads()
    with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (threads,)) as pool:
        rows = pool.apply(measure, (shapes, args.rows, args.repeats))
    table = Table("rows", "MKL ms", "oneDNN ms", "oneDNN / MKL")
    for num_rows, times in rows.items():
        ratio = times["oneDNN"] / times["MKL"]
        table.add_row(str(num_rows), f"{times['MKL']:.1f}", f"{times['oneDNN']:.1f}", f"{ratio:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"{args.target.name}, {len(shapes)} products a step, float32, {threads} threads, "
        f"{setup.card()}, torch {torch.__version__}, median of {args.repeats} repeats in turn",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def product_shapes(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(outputs, inputs) of a step's products, fused as SGLang fuses them: four a layer, and the head."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads, inner = config.get("num_key_value_heads") or heads, config["intermediate_size"]
    layer = [
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    return layer * config["num_hidden_layers"] + [(config["vocab_size"], hidden)]


def measure(shapes: Sequence[tuple[int, int]], rows: Sequence[int], repeats: int) -> dict[int, dict[str, float]]:
    """Median milliseconds of all products of a step, by number of rows and by library; every weight is its own."""
    weights = [torch.randn(shape) for shape in shapes]
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"MKL": _mkl, "oneDNN": products.mm}
    result = {}
    for num_rows in rows:
        inputs = {size: torch.randn(num_rows, size) for size in {weight.shape[1] for weight in weights}}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(repeats + 1):
            for name in figures.turn(list(ways), repeat):
                start = time.perf_counter()
                for weight in weights:
                    ways[name](inputs[weight.shape[1]], weight.T)
                if repeat:  # the first one warms up
                    seconds[name].append(time.perf_counter() - start)
        result[num_rows] = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    return result


def _mkl(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """PyTorch's own product: the variant with an output stays with it also where ours is registered."""
    return torch.ops.aten.mm.out(a_MK, b_KN, out=a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]))
