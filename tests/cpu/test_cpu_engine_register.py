"""What the plugin registers where the CPU engine runs, in fresh interpreters: SGLang's registries are global."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch

from sglang_dflash.cpu import bootstrap, engine_arguments, hooks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang runs on the GPU here")


def run(code: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != bootstrap.ENV_CPU}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_the_backend_can_be_chosen_for_target_and_drafter():
    name = engine_arguments()["attention_backend"]
    assert run(
        "from sglang_dflash import cpu; from sglang_dflash.cpu import bootstrap; bootstrap.install()\n"
        "cpu.register(); cpu.register()\n"
        "from sglang.srt.arg_groups import choices\n"
        "from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS\n"
        f"print(choices.ATTENTION_BACKEND_CHOICES.count({name!r}), "
        f"choices.DRAFT_ATTENTION_BACKEND_CHOICES.count({name!r}), {name!r} in ATTENTION_BACKENDS)"
    ) == "1 1 True"  # fmt: skip


def test_whole_pages_are_allocated_after_the_right_slot():
    """`get_last_loc` under SGLang's own hook registry; stock launches a Triton kernel here."""
    assert run(
        "from sglang_dflash import cpu; from sglang_dflash.cpu import bootstrap; bootstrap.install()\n"
        "cpu.register()\n"
        "import torch\n"
        "from sglang.srt.mem_cache import allocation\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "HookRegistry.apply_hooks()\n"
        "table = torch.arange(40, dtype=torch.int32).view(4, 10)\n"
        "print(allocation.get_last_loc(table, torch.tensor([3, 1, 2]), torch.tensor([1, 0, 10])).tolist())"
    ) == "[30, -1, 29]"  # fmt: skip


def test_nothing_is_registered_without_the_cpu_engine():
    assert run("import sys; from sglang_dflash import cpu; cpu.register(); print('sglang' in sys.modules)") == "False"


def test_batch_invariance_that_is_asked_for_and_not_had_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deterministic = types.SimpleNamespace(enable_deterministic_inference=False)
    context = types.SimpleNamespace(get_exec=lambda: types.SimpleNamespace(deterministic=deterministic))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    hooks._warn_of_rounding.cache_clear()
    hooks.no_batch_invariant_kernels(None)
    assert not caplog.records
    deterministic.enable_deterministic_inference = True
    for _ in range(2):  # target and drafter
        hooks.no_batch_invariant_kernels(None)
    [record] = caplog.records
    assert "no batch-invariant products" in record.message
