"""What every test needs before SGLang or Triton is imported. Strict mode is on: no test passes on the stock worker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("SGLANG_DFLASH_STRICT", "1")

import torch

from sglang_dflash.cpu import bootstrap

KERNEL_TESTS = Path(__file__).parent / "kernels"
INTERPRET = "TRITON_INTERPRET"
HAS_CUDA = torch.cuda.is_available()

if bootstrap.wanted():
    bootstrap.install()
if not HAS_CUDA:
    # Triton decides when it decorates a function, its own at its import, whether a CPU interprets it.
    os.environ[INTERPRET] = "1"


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The demo's target with a drafter of random weights, whose drafts are almost always rejected: a `demo.Models`."""
    from sglang_dflash import checkpoint, demo

    target = demo.prepare_target()
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    folder = tmp_path_factory.mktemp("models") / "random-drafter"
    return demo.Models(target, checkpoint.random_drafter(folder, config, seed=0, mask_token_id=16))


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in the place of the demo's packaged drafter. The SHA-256 of its content, `abc`, starts with ba7816bf."""
    from sglang_dflash import demo

    path = tmp_path_factory.mktemp("packaged") / "drafter.safetensors"
    path.write_bytes(b"abc")
    monkeypatch.setattr(demo, "PACKAGED_DRAFTER", path)
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Kernel tests alone run in Triton's interpreter: an engine that a test starts must not inherit the variable."""
    if HAS_CUDA:
        return
    if KERNEL_TESTS in item.path.parents:
        os.environ[INTERPRET] = "1"
    else:
        os.environ.pop(INTERPRET, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run where there is one."""
    if not HAS_CUDA:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))
