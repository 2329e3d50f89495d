"""A drafter whose layers SGLang stores in FP8: what it leaves in 16 bits follows, and less is launched.

SGLang rounds the weights of the layers' four products. `fc` is rounded here in the same way, injection's key and value
projections are those rounded rows in one piece, and norms and SwiGLU hand their rows to the product after them already
rounded, where SGLang launches a kernel that rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.fp8_utils import apply_fp8_linear

from sglang_dflash.draft.head import rounded

# What SGLang's FP8 products take in place of a tensor: rows in FP8, their scales (N, 1), the dtype of the result.
Rounded = tuple[torch.Tensor, torch.Tensor, torch.dtype]


def is_fp8(model: Any) -> bool:
    return model.layers[0].self_attn.qkv_proj.weight.dtype == torch.float8_e4m3fn


def refit(model: Any, ops: Any) -> FP8Linear:
    """Round what is left of SGLang's draft model; returns the stacked key and value projections, (N, H) to (N, L * E).

    Raises:
        ValueError: weights in FP8 by another rule than a scale for each output.
    """
    attention = [layer.self_attn for layer in model.layers]
    products = [p for a in attention for p in (a.qkv_proj, a.o_proj)]
    products += [p for layer in model.layers for p in (layer.mlp.gate_up_proj, layer.mlp.down_proj)]
    if not all(map(_rounds_by_row, products)):
        raise ValueError(
            "the drafter: expected all of its layers' weights in FP8 with a scale for each output, and inputs rounded "
            "as they come, got others; start the server without --speculative-draft-model-quantization."
        )
    model.fc = FP8Linear(*rounded(model.fc.weight.detach(), ops))
    for layer in model.layers:
        layer.input_layernorm = RoundedNorm(layer.input_layernorm, ops)
        layer.post_attention_layernorm = RoundedNorm(layer.post_attention_layernorm, ops)
        if isinstance(layer.mlp.act_fn, SiluAndMul):
            layer.mlp.act_fn = RoundedSiluMul(ops)
    # SGLang keeps an (H, E) view of each weight's rows, and scales (1, E).
    biases = [a.qkv_proj.bias for a in attention]
    return FP8Linear(
        torch.cat([a.qkv_proj.weight.T[a.q_size :] for a in attention]),
        torch.cat([a.qkv_proj.weight_scale.view(-1, 1)[a.q_size :] for a in attention]),
        None if biases[0] is None else torch.cat([bias[a.q_size :] for bias, a in zip(biases, attention, strict=True)]),
    )


def _rounds_by_row(product: Any) -> bool:
    return (
        isinstance(product.quant_method, Fp8LinearMethod)
        and not product.quant_method.block_quant
        and product.weight_scale.numel() == product.weight.shape[1]
        and product.input_scale is None
    )


class FP8Linear(torch.nn.Module):
    """x @ weight.T, as SGLang multiplies: rows of x are rounded with a scale each."""

    def __init__(self, weight_EH: torch.Tensor, scale_E1: torch.Tensor, bias_E: torch.Tensor | None = None) -> None:
        super().__init__()
        self.in_features = weight_EH.shape[1]
        self.register_buffer("weight", weight_EH.T)
        self.register_buffer("scale", scale_E1.T.contiguous())
        self.register_buffer("bias", bias_E)

    def forward(self, x_NH: torch.Tensor) -> torch.Tensor:
        return apply_fp8_linear(x_NH, self.weight, self.scale, bias=self.bias)


class RoundedNorm(torch.nn.Module):
    """SGLang's RMSNorm, for a product in FP8."""

    def __init__(self, norm: Any, ops: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._eps = norm.variance_epsilon
        self._norm = ops.rms_norm_fp8

    def forward(self, x_NH: torch.Tensor, residual_NH: torch.Tensor | None = None) -> Any:
        """The norm of x, or of the sum that is then the residual, and that residual."""
        out_NH = torch.empty_like(x_NH, dtype=torch.float8_e4m3fn)
        scale_N1 = x_NH.new_empty((x_NH.shape[0], 1), dtype=torch.float32)
        self._norm(x_NH, residual_NH, self.weight, self._eps, out_NH=out_NH, scale_N=scale_N1[:, 0])
        rows: Rounded = (out_NH, scale_N1, x_NH.dtype)
        return rows if residual_NH is None else (rows, residual_NH)


class RoundedSiluMul(torch.nn.Module):
    """SGLang's SiluAndMul, for a product in FP8."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self._silu_mul = ops.silu_mul_fp8

    def forward(self, gate_up_NI: torch.Tensor) -> Rounded:
        num_rows, columns = gate_up_NI.shape[0], gate_up_NI.shape[1] // 2
        out_NI = gate_up_NI.new_empty((num_rows, columns), dtype=torch.float8_e4m3fn)
        scale_N1 = gate_up_NI.new_empty((num_rows, 1), dtype=torch.float32)
        self._silu_mul(gate_up_NI, out_NI=out_NI, scale_N=scale_N1[:, 0])
        return out_NI, scale_N1, gate_up_NI.dtype
