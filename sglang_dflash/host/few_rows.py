"""The linear layers of captured passes over a few rows by a kernel of this package.

A round's pass over one to four blocks of 16 reads every weight for at most 64 rows, so a layer takes the time that its
weight takes to stream. cuBLAS leaves part of the memory's rate unused there, more so in small weights, for which it
launches a second kernel to add up sums. Eager passes stay with it: a launch of Triton's costs the host more.

cuBLAS chooses by the number of rows in how many parts it sums, so that a row of a block may be rounded otherwise than
the same token decoded alone, and a close call fall otherwise. The kernel sums in any number of parts: the products of
the target's layers are summed as decoding sums them, bit for bit, or left to cuBLAS.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod, get_bf16_gemm_backend
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
from sglang.srt.runtime_context import get_exec, get_flags

from sglang_dflash_kernels import SKINNY_MAX_ROWS, SKINNY_MAX_SPLITS, SKINNY_TILE, skinny_splits

logger = logging.getLogger(__name__)


def serve(runner: Any, ops: Any, *, decoded: Sequence[int] | None = None) -> int:
    """Let what is captured next of a model's dense layers multiply few rows so; the number of these layers.

    None on another card than Hopper's, for which the kernel is tuned, where kernels have to be deterministic over batch
    sizes, and where --bf16-gemm-backend names one.

    Args:
        decoded: numbers of rows that have to have the bits of a token decoded alone, and the only ones that are
            multiplied here; None: any number, summed as is fastest.
    """
    deterministic, device = get_exec().deterministic, next(runner.model.parameters()).device
    if (
        not _is_hopper(device)
        or not get_bf16_gemm_backend().is_auto()
        or deterministic.enable_deterministic_inference
        or deterministic.rl_on_policy_target is not None
    ):
        return 0
    chosen: dict[str, Parts | None] = {}
    layers = [module for module in runner.model.modules() if isinstance(module, LinearBase) and _takes(module, device)]
    for layer in layers:
        outputs, inputs = layer.weight.shape
        shape = f"{outputs}x{inputs} {layer.weight.dtype}{'' if _bias(layer) is None else ' with bias'}"
        if shape not in chosen:
            chosen[shape] = (
                Parts(skinny_splits(outputs, inputs), range(2, SKINNY_MAX_ROWS + 1))
                if decoded is None
                else parts_of_decoding(layer, ops, decoded)
            )
        if parts := chosen[shape]:
            layer.quant_method = FewRowsMethod(layer.weight, parts, ops)
    if decoded is not None:
        said = (f"{shape} in {parts.count if parts else 'those of cuBLAS'}" for shape, parts in chosen.items())
        logger.info("Parts in which products of few rows are summed: %s.", ", ".join(said) or "no dense layer")
    return sum(isinstance(layer.quant_method, FewRowsMethod) for layer in layers)


@dataclasses.dataclass(frozen=True)
class Parts:
    """In how many parts a layer's sums are made, and for which numbers of rows."""

    count: int
    rows: Sequence[int]


def parts_of_decoding(layer: Any, ops: Any, decoded: Sequence[int]) -> Parts | None:
    """The parts whose sums of `decoded` rows are, bit for bit, SGLang's of each row alone.

    None where no number of parts gives these bits, or SGLang's own do for every number of rows and another number
    of parts is the fastest here. (A layer of zeros would tell nothing: it has the same bits in any parts.)
    """
    weight_OI, bias_O = layer.weight, _bias(layer)
    generator = torch.Generator(weight_OI.device).manual_seed(0)
    x_NI = torch.randn(SKINNY_MAX_ROWS, weight_OI.shape[1], generator=generator, device=weight_OI.device)
    x_NI = x_NI.to(weight_OI.dtype)

    def sglang(num_rows: int) -> torch.Tensor:
        return torch.cat([layer.quant_method.apply(layer, rows, bias_O) for rows in x_NI.split(num_rows)])

    def ours(num_rows: int, count: int) -> torch.Tensor:
        method = FewRowsMethod(weight_OI, Parts(count, decoded), ops)
        return torch.cat([method.multiply(rows, weight_OI, bias_O) for rows in x_NI.split(num_rows)])

    alone_NO = sglang(1)
    for count in range(1, SKINNY_MAX_SPLITS + 1):
        if all(torch.equal(ours(num_rows, count), alone_NO) for num_rows in decoded):
            fastest = count == skinny_splits(*weight_OI.shape)
            rows = [n for n in decoded if fastest or not torch.equal(sglang(n), alone_NO)]
            return Parts(count, rows) if rows else None
    return None


def _bias(layer: Any) -> torch.Tensor | None:
    return None if layer.skip_bias_add else getattr(layer, "bias", None)


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

    def __init__(self, weight_OI: torch.Tensor, parts: Parts, ops: Any) -> None:
        self._linear, self._parts = ops.skinny_linear, parts
        # A layer's own: layers may run on several streams.
        self._arrived_T = torch.zeros(len(weight_OI) // SKINNY_TILE, dtype=torch.int32, device=weight_OI.device)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight_OI = layer.weight
        if (
            torch.compiler.is_compiling()
            or not get_is_capture_mode()
            or get_flags().dp.capturing_prefill_graph
            or x.dim() != 2
            or x.dtype != weight_OI.dtype
            or x.stride(1) != 1
            or x.shape[0] not in self._parts.rows
        ):
            return super().apply(layer, x, bias)
        return self.multiply(x, weight_OI, bias)

    def multiply(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        out_NO = x_NI.new_empty((len(x_NI), len(weight_OI)))
        partial_SNO = x_NI.new_empty((self._parts.count, *out_NO.shape), dtype=torch.float32)
        self._linear(x_NI, weight_OI, bias_O, out_NO=out_NO, partial_SNO=partial_SNO, arrived_T=self._arrived_T)
        return out_NO
