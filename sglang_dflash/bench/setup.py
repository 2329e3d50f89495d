"""Arguments that all engines of a measurement share, and what its result says of machine, models and command."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dflash import __version__, drafter_config
from sglang_dflash.bench.columns import Column
from sglang_dflash.cpu import bootstrap
from sglang_dflash.offline import precision

SEED = 0
# Of a request's KV slots, over its prompt and answer: a verified block may pass its end.
SPARE_TOKENS = 64
RANDOM_DRAFTER_LAYERS, RANDOM_DRAFTER_BLOCK = 5, 16  # as z-lab's drafters


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that starts engines on a target and a drafter."""
    parser.add_argument("--target", metavar="DIR", help="the target; the demo's models where none are given")
    parser.add_argument("--drafter", metavar="DIR", help="its drafter")
    parser.add_argument("--shapes", metavar="DIR", help="a target's config.json: random weights, drafter of 5 layers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, else float32")
    parser.add_argument("--batches", type=integers, default=[1, 8, 32], metavar="N,N", help="requests at once")
    parser.add_argument("--engine", action="append", default=[], metavar="KEY=JSON", help="argument of sglang.Engine")
    parser.add_argument(
        "--forced-acceptance", type=float, metavar="TOKENS", help="tokens a round commits, whatever the target says"
    )
    parser.add_argument("--logs", type=Path, default=Path("bench-logs"), help="folder of the engines' output")
    parser.add_argument("--commit", help="of the code, where it is not a git checkout")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")


def integers(text: str) -> list[int]:
    """Comma-separated positive integers; ValueError otherwise, which argparse tells."""
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError
    return numbers


def check_model_arguments(args: argparse.Namespace) -> None:
    """Fill in the demo's models; ValueError for a combination that says nothing."""
    if args.shapes and (args.target or args.drafter):
        raise ValueError("expected --target and --drafter, or --shapes, got both; give one")
    if bool(args.target) != bool(args.drafter):
        raise ValueError("expected --target and --drafter, got one of them; give both")
    if args.forced_acceptance is not None and args.forced_acceptance < 1:
        raise ValueError(f"--forced-acceptance: expected at least 1, got {args.forced_acceptance}; raise it")
    if not args.shapes and not args.target:
        from sglang_dflash import demo

        models = demo.prepare()
        args.target, args.drafter = str(models.target), str(models.drafter)


def engine_arguments(
    args: argparse.Namespace, scratch: Path, num_tokens: int, longest_prompt: int = 0
) -> dict[str, Any]:
    """Arguments of `sglang.Engine` for all columns.

    Args:
        scratch: folder for the config of a random drafter.
        num_tokens: of a request's prompt and answer together. The KV pool holds two of them for every request that runs
            at once: SGLang must admit a whole batch together, or its rounds could not be counted.
        longest_prompt: tokens of the longest prompt that runs alone.
    """
    arguments: dict[str, Any] = {
        "random_seed": SEED,
        "max_running_requests": max(args.batches),
        "max_total_tokens": max(
            2 * max(args.batches) * (num_tokens + SPARE_TOKENS), 2 * (longest_prompt + SPARE_TOKENS)
        ),
        "skip_tokenizer_init": True,
        **precision(args.dtype),
    }
    if bootstrap.wanted():
        arguments["sleep_on_idle"] = True  # an idle engine would poll on a core that the measured one needs
    else:
        arguments |= {
            "cuda_graph_bs_decode": sorted({*args.batches}),
            "mem_fraction_static": 0.8,
            "disable_prefill_cuda_graph": True,
        }
    if args.shapes:
        target = model_config(args)
        config = drafter_config.config_for_target(
            target, RANDOM_DRAFTER_LAYERS, RANDOM_DRAFTER_BLOCK, target["vocab_size"] - 1, None
        )
        (scratch / "config.json").write_text(json.dumps(drafter_config.config_json(config, "bfloat16")))
        arguments |= {"model_path": args.shapes, "speculative_draft_model_path": str(scratch), "load_format": "dummy"}
    else:
        arguments |= {"model_path": args.target, "speculative_draft_model_path": args.drafter}
    return arguments


def user_arguments(items: Sequence[str]) -> dict[str, Any]:
    """The values of --engine; ValueError for one that is not KEY=JSON."""
    arguments = {}
    for item in items:
        key, separator, value = item.partition("=")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"--engine: expected KEY=JSON, got {item!r} ({error}); correct it") from None
        if not separator or not key:
            raise ValueError(f"--engine: expected KEY=JSON, got {item!r}; name the argument")
    return arguments


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    """The target's config.json. Raises FileNotFoundError without one."""
    config: dict[str, Any] = json.loads((Path(args.shapes or args.target) / "config.json").read_text())
    return config


def describe(args: argparse.Namespace, columns: Sequence[Column], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Card, versions, driver, shapes, engine arguments and command of a result; models without their folder."""
    model = model_config(args)
    paths = ("model_path", "speculative_draft_model_path")
    named = {key: Path(value).name if key in paths else value for key, value in arguments.items()}
    if args.shapes:
        named["speculative_draft_model_path"] = "random"
    return {
        "card": card(),
        "driver": _driver(),
        "versions": _versions(args.commit),
        "shapes": {key: model[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")},
        "weights": "random" if args.shapes else Path(args.target).name,
        "engine": named,
        "columns": {c.name: {"kind": c.kind, "settings": dict(c.settings), "engine": dict(c.engine)} for c in columns},
        "forced_acceptance": args.forced_acceptance,
        "command": shlex.join(["sglang-dflash", *sys.argv[1:]]),
    }


def card() -> str:
    """The GPU's name, or the CPU's with its number of cores."""
    import torch

    if not bootstrap.wanted():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"CPU {name}, {os.cpu_count()} cores"


def _driver() -> str | None:
    """Version of NVIDIA's driver, None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.partition("\n")[0].strip() or None


def _versions(commit: str | None) -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("sglang", "torch", "triton")}
    versions |= {"python": platform.python_version(), "sglang-dflash": __version__}
    if commit is None and shutil.which("git"):
        asked = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(asked, capture_output=True, text=True, cwd=Path(__file__).parent)
        commit = done.stdout.strip() if done.returncode == 0 else None
    return versions | {"commit": commit or "unknown"}


def write(path: Path, result: Mapping[str, Any]) -> None:
    """The result as JSON; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
