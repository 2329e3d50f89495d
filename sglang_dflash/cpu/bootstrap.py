"""Make `import sgl_kernel` work on a machine without a CUDA driver, in this process and in every child.

SGLang's wheel for x86 brings a CUDA build of sgl_kernel. Importing it loads a library that needs libcuda, and raises
where there is no driver. `sgl_kernel/__init__` takes its loader from `sgl_kernel.load_utils`; a module of that name
that stands in `sys.modules` already is used instead. Ours loads no library and registers PyTorch implementations of
the ops that SGLang calls on a CPU (`sglang_dflash.cpu.ops`), just when the library would have registered its own.

Why the environment carries this to the children. A spawned scheduler unpickles its target function before any code of
a plugin runs, and unpickling imports `sglang.srt.managers.scheduler`, which imports sgl_kernel. Code in the parent's
main module would run early enough, but a test runner, a notebook or `python -m sglang.launch_server` has no such main
module. So `install` puts the folder `site/` beside this file at the head of PYTHONPATH, and Python imports the
`sitecustomize` in it at the start of every child, spawned or started by command.

This module imports the standard library only (and torch inside `wanted`): it runs at the start of every child.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType

ENV_CPU = "SGLANG_DFLASH_CPU"  # "1": the CPU engine is on, "0": off, unset: on where there is no GPU
ENV_SGLANG_CPU = "SGLANG_USE_CPU_ENGINE"  # SGLang reads it: is_cpu() and the choice of its platform class
LOADER = "sgl_kernel.load_utils"
SITE_DIR = Path(__file__).resolve().parent / "site"


def wanted(device: str | None = None) -> bool:
    """Whether the CPU engine is to run: an explicit device decides, then SGLANG_DFLASH_CPU, then the absence of a GPU.

    `device` is the value of SGLang's --device; "auto" counts as absent.
    Raises ValueError where SGLANG_DFLASH_CPU is neither "0" nor "1".
    """
    if device not in (None, "auto"):
        return device == "cpu"
    asked = os.environ.get(ENV_CPU)
    if asked is not None:
        if asked not in ("0", "1"):
            raise ValueError(f"expected {ENV_CPU} to be 0 or 1, got {asked!r}; set it to 1 to serve on the CPU")
        return asked == "1"
    import torch

    return not torch.cuda.is_available()


def install() -> None:
    """Turn the CPU engine on for this process and its children. Call it before the first import of sglang; idempotent.

    Raises ValueError where SGLang was imported before without it (SGLang has then settled on no CPU), and where Python
    ignores the environment (`-E`, `-I`), so that children would not find the replacement.
    """
    if "sglang.srt.utils.common" in sys.modules and os.environ.get(ENV_SGLANG_CPU) != "1":
        raise ValueError("expected the CPU engine before SGLang, got it after; install it before `import sglang`")
    if sys.flags.ignore_environment:
        raise ValueError("expected Python to read its environment, got -E or -I; start Python without these flags")
    os.environ[ENV_CPU] = "1"
    os.environ[ENV_SGLANG_CPU] = "1"
    # By default OpenMP's threads spin while they wait, and so hold up the very thread they wait for where other
    # processes use the cores too. Two threads on two cores, one of them kept busy by others: a decode step of
    # SmolLM2-135M in float32 took 0.17 to 0.28 s spinning and 0.07 to 0.08 s sleeping. On idle cores products of 128
    # rows took 7 % longer sleeping. A value of the user's stays.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _prepend_python_path(os.environ, str(SITE_DIR))
    # A failed import of sgl_kernel leaves its own load_utils behind, so only a finished import counts as done.
    if "sgl_kernel" in sys.modules or not _is_cuda_build():
        return
    loader = ModuleType(LOADER)
    loader.__doc__ = "Stands in for sgl_kernel's loader of its CUDA library; see sglang_dflash.cpu.bootstrap."
    loader._load_architecture_specific_ops = _load_cpu_ops  # type: ignore[attr-defined]
    loader._preload_cuda_library = lambda: None  # type: ignore[attr-defined]
    sys.modules[LOADER] = loader


def _load_cpu_ops() -> None:
    """Called by `sgl_kernel/__init__` where it would load its library."""
    from sglang_dflash.cpu import ops

    ops.register_missing()


def _is_cuda_build() -> bool:
    """Whether the installed sgl_kernel is a CUDA build: it has one folder a GPU architecture, a CPU build has none."""
    spec = importlib.util.find_spec("sgl_kernel")
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / arch).is_dir() for folder in folders or () for arch in ("sm90", "sm100"))


def _prepend_python_path(environ: MutableMapping[str, str], folder: str) -> None:
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != folder]
    environ["PYTHONPATH"] = os.pathsep.join([folder, *entries])
