from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_dflash_kernels import select

REPOSITORY = Path(__file__).parents[2]


def run_python(arguments: list[str], **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(REPOSITORY / "kernels"), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_every_kernel_compiles_for_hopper(tmp_path):
    script = Path(__file__).with_name("compile_for_hopper.py")
    stores = json.loads(run_python([str(script)], TRITON_CACHE_DIR=str(tmp_path)))
    assert set(stores) == {
        "_prepare_block_kernel",
        "_accept_greedy_kernel",
        "_store_features_kernel",
        "_split_kernel",
        "_combine_kernel",
        "_fp8_logits_kernel",
        "_fp8_rows_kernel",
        "_skinny_linear_kernel",
    }
    # 16 bytes at a time: without the alignment hint on the caches' addresses each element would be stored alone.
    assert [set(kinds) for kinds in stores["_store_features_kernel"]] == [{"st.global.v4.b32"}] * 6
    # A thread's 16 numbers of a row at once, 32 in a long one; where a residual is added its sums too. Of each width:
    # norm without and with a residual, rounding alone, SwiGLU.
    assert [kinds["st.global.v4.b32"] for kinds in stores["_fp8_rows_kernel"]] == [1, 3, 1, 1] * 2 + [2, 6, 2, 2]
    # Waits for the kernel before it, and only then lets the one after it start.
    for kinds in stores["_skinny_linear_kernel"]:
        waits = [kind for kind in kinds if kind.startswith("griddepcontrol")]
        assert waits == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]


@pytest.mark.parametrize(("device", "name"), [("cpu", "reference"), ("meta", "reference"), ("cuda", "triton")])
def test_select_follows_the_device(device, name):
    ops = select(torch.device(device))
    assert ops.name == name
    package = "sglang_dflash_kernels" + (".reference" if name == "reference" else "")
    for op in vars(ops):
        if op != "name":
            assert getattr(ops, op).__module__ == f"{package}.{op}"


def test_cpu_path_imports_neither_triton_nor_sglang():
    code = (
        "import sys, torch, sglang_dflash_kernels as kernels; kernels.select(torch.device('cpu'));"
        "print([name for name in ('triton', 'sglang', 'sglang_dflash') if name in sys.modules])"
    )
    assert run_python(["-c", code]).strip() == "[]"
