"""Compile every kernel for an H100 on a machine that need not have one; prints its global stores and waits as JSON.

Run by test_compiles.py, in a process without Triton's interpreter. The ops are called as ever, on CPU tensors, with a
driver that names the card and a launch that ends after compilation.
"""

from __future__ import annotations

import collections
import json
import re
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sglang_dflash_kernels import SKINNY_TILE, CachePointers, select, skinny_splits, top1_workspace

STORES: dict[str, list[dict[str, int]]] = collections.defaultdict(list)


def compile_only() -> None:
    compile_and_launch = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        if "DEPENDENT" in kwargs:
            kwargs |= {"DEPENDENT": True, "launch_pdl": True}  # as on a card
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **kwargs)
        stores = collections.Counter(re.findall(r"st\.global\.(?:v\d\.)?b\d+|griddepcontrol\.\w+", kernel.asm["ptx"]))
        STORES[self.fn.__name__].append(dict(stores))

    JITFunction.run = run
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )


def main() -> None:
    compile_only()
    ops = select(torch.device("cuda"))
    vector, block = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 16, dtype=torch.int64)
    for table_dtype in (torch.int32, torch.int64):
        table = torch.zeros(3, 64, dtype=table_dtype)
        ops.prepare_block(vector, vector, vector, table, 7, ids_BK=block, positions_BK=block, slots_BK=block)
    for widths_B in (None, vector.int()):
        ops.accept_greedy(
            block, block, vector, widths_B, commit_B=vector.int(), bonus_B=vector, tokens_BW=block, new_lens_B=vector
        )
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ops.top1(
            torch.zeros(3, 49_152, dtype=dtype),
            tokens_N=vector,
            confidence_N=torch.zeros(3),
            workspace=top1_workspace(3, torch.device("cpu")),
        )
    for kv_heads, head_dim, rotary_dim in ((8, 128, 128), (3, 64, 64), (2, 80, 32)):
        for num_tokens in (6, 4096):
            compile_store_features(ops, num_tokens, kv_heads, head_dim, rotary_dim)
    ops.fp8_logits(
        torch.zeros(15, 4096, dtype=torch.bfloat16),
        torch.zeros(4096, 4096, dtype=torch.float8_e4m3fn),
        torch.ones(4096),
        logits_NV=torch.zeros(15, 4096, dtype=torch.bfloat16),
    )
    for columns in (576, 4096, 12_288):
        x, weight = torch.zeros(15, 2 * columns, dtype=torch.bfloat16), torch.ones(columns, dtype=torch.bfloat16)
        out, scale = torch.zeros(15, columns, dtype=torch.float8_e4m3fn), torch.zeros(15)
        for residual in (None, x[:, columns:]):
            ops.rms_norm_fp8(x[:, :columns], residual, weight, 1e-6, out_NH=out, scale_N=scale)
        ops.round_fp8(x[:, :columns], out_NH=out, scale_N=scale)
        ops.silu_mul_fp8(x, out_NI=out, scale_N=scale)
    for num_rows in (16, 64):
        for outputs, inputs in ((4096, 12_288), (24_576, 4096)):
            compile_skinny_linear(ops, num_rows, outputs, inputs)
    print(json.dumps(STORES))


def compile_skinny_linear(ops, num_rows, outputs, inputs) -> None:
    ops.skinny_linear(
        torch.zeros(num_rows, inputs, dtype=torch.bfloat16),
        torch.zeros(outputs, inputs, dtype=torch.bfloat16),
        torch.zeros(outputs, dtype=torch.bfloat16),
        out_NO=torch.zeros(num_rows, outputs, dtype=torch.bfloat16),
        partial_SNO=torch.zeros(skinny_splits(outputs, inputs), num_rows, outputs),
        arrived_T=torch.zeros(outputs // SKINNY_TILE, dtype=torch.int32),
    )


def compile_store_features(ops, num_tokens, kv_heads, head_dim, rotary_dim, layers=5) -> None:
    caches = [torch.zeros(16, kv_heads, head_dim, dtype=torch.bfloat16) for _ in range(layers)]
    ops.store_features(
        torch.zeros(num_tokens, layers, 2 * kv_heads * head_dim, dtype=torch.bfloat16),
        torch.zeros(num_tokens, dtype=torch.int64),
        torch.zeros(num_tokens, dtype=torch.int64),
        k_norm_LD=torch.ones(layers, head_dim, dtype=torch.bfloat16),
        eps_L=torch.ones(layers),
        cos_sin_PR=torch.zeros(8, rotary_dim),
        value_scale=1.0,
        caches=CachePointers(caches, caches),
    )


if __name__ == "__main__":
    main()
