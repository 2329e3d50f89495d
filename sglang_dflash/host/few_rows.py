"""The linear layers of captured passes over a few rows by a kernel of this package.

A round's pass over one to four blocks of 16 reads every weight for at most 64 rows, so a layer takes the time that its
weight takes to stream. cuBLAS leaves part of the memory's rate unused there, more so in small weights, for which it
launches a second kernel to add up sums. Eager passes stay with it: a launch of Triton's costs the host more.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod, get_bf16_gemm_backend
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
from sglang.srt.runtime_context import get_exec

from sglang_dflash_kernels import SKINNY_MAX_ROWS, SKINNY_TILE, skinny_splits


def serve(runner: Any, ops: Any) -> int:
    """Let what is captured next of a model's dense layers multiply few rows so; the number of these layers.

    None on another card than Hopper's, for which the kernel is tuned, where kernels have to be deterministic over batch
    sizes, and where --bf16-gemm-backend names one.
    """
    deterministic, device = get_exec().deterministic, next(runner.model.parameters()).device
    if (
        not _is_hopper(device)
        or not get_bf16_gemm_backend().is_auto()
        or deterministic.enable_deterministic_inference
        or deterministic.rl_on_policy_target is not None
    ):
        return 0
    layers = [module for module in runner.model.modules() if isinstance(module, LinearBase) and _takes(module, device)]
    for layer in layers:
        layer.quant_method = FewRowsMethod(layer.weight, ops)
    return len(layers)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _takes(layer: Any, device: torch.device) -> bool:
    # Offloaded weights come to the card layer by layer.
    if type(layer.quant_method) is not UnquantizedLinearMethod or layer.weight.device != device:
        return False
    weight = layer.weight
    tiled = all(size % SKINNY_TILE == 0 for size in weight.shape)
    return weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous() and tiled


class FewRowsMethod(UnquantizedLinearMethod):
    """SGLang's dense product, of captured few rows by `skinny_linear`."""

    def __init__(self, weight_OI: torch.Tensor, ops: Any) -> None:
        outputs, inputs = weight_OI.shape
        self._linear = ops.skinny_linear
        self._splits = skinny_splits(outputs, inputs)
        # A layer's own: layers may run on several streams.
        self._arrived_T = torch.zeros(outputs // SKINNY_TILE, dtype=torch.int32, device=weight_OI.device)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight_OI = layer.weight
        if (
            torch.compiler.is_compiling()
            or not get_is_capture_mode()
            or x.dim() != 2
            or x.dtype != weight_OI.dtype
            or x.stride(1) != 1
            or not 1 < x.shape[0] <= SKINNY_MAX_ROWS
        ):
            return super().apply(layer, x, bias)
        out_NO = x.new_empty((x.shape[0], weight_OI.shape[0]))
        partial_SNO = x.new_empty((self._splits, *out_NO.shape), dtype=torch.float32)
        self._linear(x, weight_OI, bias, out_NO=out_NO, partial_SNO=partial_SNO, arrived_T=self._arrived_T)
        return out_NO
