"""A measure for a round's time: every weight is read once, at the rate at which this machine copies memory.

A round reads the target's layers and head, the drafter's layers, and the head once more for the drafts. Of an embedding
that is not the head it reads single rows, which do not count.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sglang_dflash import checkpoint, drafter_config

COPY_BYTES = 1 << 30  # far more than any cache holds; a quarter of it on a CPU
NUM_COPIES = 20


def measure(args: argparse.Namespace, drafter: Path, dtype: str) -> dict[str, Any]:
    """Bytes of the weights by part, the machine's copy rate in GB/s, and the floor in milliseconds.

    Args:
        args: of the command; the target is read from its config.json.
        drafter: directory of the drafter's config.json.
        dtype: float32 or bfloat16, that the engines run in.

    Raises ValueError for a quantized target, whose bytes are not those of its shapes.
    """
    config = json.loads((Path(args.shapes or args.target) / "config.json").read_text())
    sizes = weight_bytes(config, drafter_config.read_config(drafter), dtype)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its memory on the device goes with it
        gbytes_per_s = pool.apply(copy_rate)
    return {
        "weight_bytes": sizes,
        "copy_gbytes_per_s": gbytes_per_s,
        "floor_ms": sum(sizes.values()) / gbytes_per_s / 1e6,
    }


def weight_bytes(target: Mapping[str, Any], drafter: drafter_config.DrafterConfig, dtype: str) -> dict[str, int]:
    """Bytes that a round reads of each part: `target`, `drafter`, and `draft_head`, the target's head read again."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if "quantization_config" in target:
        raise ValueError("expected a target with dense weights, got a quantized one, whose floor is not known here")
    config = AutoConfig.for_model(**{key: value for key, value in target.items() if key != "transformers_version"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    # Shared tensors are counted once.
    num_target = sum(parameter.numel() for parameter in model.parameters())
    if embedding is not head:
        num_target -= embedding.numel()
    num_drafter = sum(math.prod(shape) for shape in checkpoint.expected_tensors(drafter).values())
    item = getattr(torch, dtype).itemsize
    return {"target": num_target * item, "drafter": num_drafter * item, "draft_head": head.numel() * item}


def copy_rate() -> float:
    """GB/s of a large copy on the device, bytes read and bytes written together; median of NUM_COPIES."""
    cuda = torch.cuda.is_available()
    source = torch.ones(COPY_BYTES if cuda else COPY_BYTES // 4, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    target = torch.empty_like(source)
    seconds = []
    for number in range(NUM_COPIES + 1):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        if cuda:
            torch.cuda.synchronize()
        if number:  # the first one warms up
            seconds.append(time.perf_counter() - start)
    return 2 * source.numel() / statistics.median(seconds) / 1e9
