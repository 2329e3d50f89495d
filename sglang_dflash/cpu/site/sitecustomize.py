"""Runs at the start of every child of a process that called `sglang_dflash.cpu.bootstrap.install`; see there.

It installs the bootstrap and then hands on to the `sitecustomize` that Python would have imported without us. The
bootstrap is loaded from its file: in a child that finds the package only through its parent's `sys.path`,
`sglang_dflash` cannot be imported yet.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run(spec: ModuleSpec | None) -> None:
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if spec.name == "bootstrap_of_sglang_dflash":
            module.install()


if os.environ.get("SGLANG_DFLASH_CPU") == "1":
    _bootstrap = os.path.join(os.path.dirname(_HERE), "bootstrap.py")
    _run(importlib.util.spec_from_file_location("bootstrap_of_sglang_dflash", _bootstrap))

_run(PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) != _HERE]))
