"""The bootstrap in fresh interpreters: what it sets, and that children of every kind get it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_dflash.cpu import bootstrap

ROOT = Path(__file__).resolve().parents[2]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="sgl_kernel loads its CUDA library here")
LOADED = "'sgl_kernel.load_utils' in sys.modules and sys.modules['sgl_kernel.load_utils'].__spec__ is None"


def python(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python in an environment without the CPU engine's variables."""
    ours = (bootstrap.ENV_CPU, bootstrap.ENV_SGLANG_CPU, "PYTHONPATH", "OMP_WAIT_POLICY")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    clean["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, *command], env={**clean, **environ}, capture_output=True, text=True, timeout=300, cwd="/"
    )


def output(*command: str, **environ: str) -> list[str]:
    done = python(*command, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [("cpu", None, True), ("cuda", "1", False), (None, "1", True), ("auto", "0", False), ("cpu", "0", True)],
)
def test_device_decides_before_the_environment(device, asked, expected, monkeypatch):
    monkeypatch.delenv(bootstrap.ENV_CPU, raising=False)
    if asked is not None:
        monkeypatch.setenv(bootstrap.ENV_CPU, asked)
    assert bootstrap.wanted(device) == expected


@pytest.mark.parametrize("gpu", [True, False])
def test_a_gpu_is_used_unless_asked_otherwise(gpu, monkeypatch):
    monkeypatch.delenv(bootstrap.ENV_CPU, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert bootstrap.wanted() is not gpu
    assert bootstrap.wanted("auto") is not gpu


def test_a_strange_request_is_refused(monkeypatch):
    monkeypatch.setenv(bootstrap.ENV_CPU, "yes")
    with pytest.raises(ValueError, match="to be 0 or 1, got 'yes'"):
        bootstrap.wanted()


@no_gpu
def test_children_by_spawn_and_by_command_get_the_loader(tmp_path):
    """The child that multiprocessing spawns has no main module to import, as under a test runner."""
    (tmp_path / "child.py").write_text(f"import sys\ndef show(): print({LOADED}, flush=True)\n")
    (tmp_path / "parent.py").write_text(
        "import multiprocessing, subprocess, sys, child\n"
        "from sglang_dflash.cpu import bootstrap\n"
        "bootstrap.install(); bootstrap.install()\n"
        "child.show()\n"
        "del sys.modules['__main__'].__file__\n"
        "process = multiprocessing.get_context('spawn').Process(target=child.show)\n"
        "process.start(); process.join()\n"
        "subprocess.run([sys.executable, '-c', 'import child; child.show()'], cwd=sys.path[0])\n"
    )
    assert output(str(tmp_path / "parent.py")) == ["True"] * 3


@no_gpu
def test_sgl_kernel_imports_and_holds_the_ops():
    assert output(
        "-c",
        "from sglang_dflash.cpu import bootstrap; bootstrap.install(); import sgl_kernel, torch\n"
        "from sglang_dflash.cpu.ops import OPS; print(all(hasattr(torch.ops.sgl_kernel, name) for name in OPS))",
    ) == ["True"]


@no_gpu
def test_sgl_kernel_imports_after_a_failed_import():
    assert output(
        "-c",
        "from sglang_dflash.cpu import bootstrap\n"
        "try: import sgl_kernel\n"
        "except ImportError: print('failed')\n"
        "bootstrap.install(); import sgl_kernel; print('imported')",
    ) == ["failed", "imported"]


def test_the_environment_of_children():
    names = f"{bootstrap.ENV_CPU} {bootstrap.ENV_SGLANG_CPU} OMP_WAIT_POLICY PYTHONPATH"
    show = f"import os\nfor name in '{names}'.split(): print(os.environ[name])"
    install = "from sglang_dflash.cpu import bootstrap; bootstrap.install(); bootstrap.install()\n"
    site = str(bootstrap.SITE_DIR)
    assert output("-c", install + show) == ["1", "1", "PASSIVE", site]
    path = f"{ROOT}:{site}:/elsewhere"
    assert output("-c", install + show, PYTHONPATH=path, OMP_WAIT_POLICY="ACTIVE") == [
        "1", "1", "ACTIVE", f"{site}:{ROOT}:/elsewhere",
    ]  # fmt: skip


def test_another_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    path = f"{bootstrap.SITE_DIR}:{tmp_path}"
    show = f"import sys; print({LOADED})"
    assert output("-c", show, PYTHONPATH=path, **{bootstrap.ENV_CPU: "0"}) == ["theirs", "False"]
    expected = str(not torch.cuda.is_available())
    assert output("-c", show, PYTHONPATH=path, **{bootstrap.ENV_CPU: "1"}) == ["theirs", expected]


def test_installing_after_sglang_is_refused():
    late = (
        "import sys, types; sys.modules['sglang.srt.utils.common'] = types.ModuleType('late')\n"
        "from sglang_dflash.cpu import bootstrap; bootstrap.install()"
    )
    assert "install it before `import sglang`" in python("-c", late).stderr


@pytest.mark.parametrize("flag", ["-E", "-I"])
def test_python_that_ignores_its_environment_is_refused(flag):
    late = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom sglang_dflash.cpu import bootstrap; bootstrap.install()"
    )
    assert "without these flags" in python(flag, "-c", late).stderr
