"""The linear layers of captured passes over a few rows by a kernel of this package.

A round's pass over one to four blocks of 16 reads every weight for at most 64 rows, so a layer takes the time that its
weight takes to stream. cuBLAS leaves part of the memory's rate unused there, more so in small weights, for which it
launches a second kernel to add up sums. Eager passes stay with it: a launch of Triton's costs the host more.

cuBLAS chooses by the number of rows in how many parts it sums, so that a row of a block may be rounded otherwise than
the same token decoded alone, and a close call fall otherwise. The kernel sums in any number of parts: of the target it
takes the layers for which one of these numbers gives the bits of decoding, and in that number.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod, get_bf16_gemm_backend
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
from sglang.srt.runtime_context import get_exec

from sglang_dflash_kernels import SKINNY_MAX_ROWS, SKINNY_MAX_SPLITS, SKINNY_TILE, skinny_splits

logger = logging.getLogger(__name__)


def serve(runner: Any, ops: Any, *, as_decoded: bool) -> int:
    """Let what is captured next of a model's dense layers multiply few rows so; the number of these layers.

    None on another card than Hopper's, for which the kernel is tuned, where kernels have to be deterministic over batch
    sizes, and where --bf16-gemm-backend names one.

    Args:
        as_decoded: leave the layers to SGLang whose numbers for a token decoded alone the kernel cannot give.
    """
    deterministic, device = get_exec().deterministic, next(runner.model.parameters()).device
    if (
        not _is_hopper(device)
        or not get_bf16_gemm_backend().is_auto()
        or deterministic.enable_deterministic_inference
        or deterministic.rl_on_policy_target is not None
    ):
        return 0
    splits: dict[Any, int | None] = {}
    layers = [module for module in runner.model.modules() if isinstance(module, LinearBase) and _takes(module, device)]
    for layer in layers:
        shape = (*layer.weight.shape, layer.weight.dtype, _bias(layer) is not None)
        if shape not in splits:
            splits[shape] = splits_of_decoding(layer, ops) if as_decoded else skinny_splits(*layer.weight.shape)
        if count := splits[shape]:
            layer.quant_method = FewRowsMethod(layer.weight, count, ops)
    if as_decoded:
        parts = (f"{outputs}x{inputs}: {count or 'unknown'}" for (outputs, inputs, *_), count in splits.items())
        logger.info("Parts in which a decoded token's products are summed: %s.", ", ".join(parts) or "no dense layer")
    return sum(isinstance(layer.quant_method, FewRowsMethod) for layer in layers)


def splits_of_decoding(layer: Any, ops: Any) -> int | None:
    """The number of parts in which sums of any number of rows are, bit for bit, SGLang's of one, two and four rows."""
    weight_OI, bias_O = layer.weight, _bias(layer)
    generator = torch.Generator(weight_OI.device).manual_seed(0)
    x_NI = torch.randn(SKINNY_MAX_ROWS, weight_OI.shape[1], generator=generator, device=weight_OI.device)
    x_NI = x_NI.to(weight_OI.dtype)

    def sglang(num_rows: int) -> torch.Tensor:
        return torch.cat([layer.quant_method.apply(layer, rows, bias_O) for rows in x_NI.split(num_rows)])

    def ours(num_rows: int, splits: int) -> torch.Tensor:
        method = FewRowsMethod(weight_OI, splits, ops)
        return torch.cat([method.multiply(rows, weight_OI, bias_O) for rows in x_NI.split(num_rows)])

    decoded_NO = sglang(1)
    if not all(torch.equal(sglang(num_rows), decoded_NO) for num_rows in (2, 4)):
        return None
    for splits in range(1, SKINNY_MAX_SPLITS + 1):
        if all(torch.equal(ours(num_rows, splits), decoded_NO) for num_rows in (16, 32, 64)):
            return splits
    return None


def _bias(layer: Any) -> torch.Tensor | None:
    return None if layer.skip_bias_add else layer.bias


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

    def __init__(self, weight_OI: torch.Tensor, splits: int, ops: Any) -> None:
        self._linear, self._splits = ops.skinny_linear, splits
        # A layer's own: layers may run on several streams.
        self._arrived_T = torch.zeros(len(weight_OI) // SKINNY_TILE, dtype=torch.int32, device=weight_OI.device)

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
        return self.multiply(x, weight_OI, bias)

    def multiply(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        out_NO = x_NI.new_empty((len(x_NI), len(weight_OI)))
        partial_SNO = x_NI.new_empty((self._splits, *out_NO.shape), dtype=torch.float32)
        self._linear(x_NI, weight_OI, bias_O, out_NO=out_NO, partial_SNO=partial_SNO, arrived_T=self._arrived_T)
        return out_NO
