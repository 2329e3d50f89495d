"""The models and engines of these tests.

DFLASH_LOSSLESS=full runs all prompts and engines (hours on two cores).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from sglang_dflash import demo
from sglang_dflash.offline import EngineProcess

FULL = os.environ.get("DFLASH_LOSSLESS") == "full"
NUM_PROMPTS = 64 if FULL else 12
NUM_NEW_TOKENS = 128 if FULL else 40
HAS_CUDA = torch.cuda.is_available()
ROOT = Path(__file__).parents[2]
# Where an engine's processes find this package's tests, whose proposers they run.
PYTHONPATH = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"


def engine_args(models: demo.Models) -> dict[str, Any]:
    """Arguments of `sglang.Engine`."""
    args = {
        "model_path": str(models.target),
        "speculative_draft_model_path": str(models.drafter),
        "dtype": "bfloat16" if HAS_CUDA else "float32",
        "max_total_tokens": 24576,
        "max_running_requests": 24,
        "random_seed": 0,
        "log_level": "warning",
    }
    if HAS_CUDA:
        # All others up to 24 are padded to a captured size; the dense layers of the first two are multiplied by
        # `host.few_rows`.
        args |= {"cuda_graph_bs_decode": [1, 4, 8, 24], "mem_fraction_static": 0.3, "disable_prefill_cuda_graph": True}
    return args


def engine(kind: Any, models: demo.Models, log: Path, env: dict[str, str] | None = None, **args: Any) -> EngineProcess:
    """An engine of the models."""
    return EngineProcess(kind, log, {"PYTHONPATH": PYTHONPATH, **(env or {})}, **{**engine_args(models), **args})
