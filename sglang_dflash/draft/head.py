"""The draft head: the target's language-model head, as it is or as a copy of 8 bits a weight.

Whatever the drafter says is verified, so the copy costs acceptance at most. It halves the bytes that a round reads for
drafting's largest matrix.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sglang_dflash_kernels.contracts import FP8_MAX_ROWS

_FP8 = torch.float8_e4m3fn
_ROWS = 4096  # tokens of the head that are rounded at once: their float32 form is 64 MiB at a hidden size of 4096


class Head(Protocol):
    """From hidden states to logits."""

    weight_VH: torch.Tensor

    def __call__(self, hidden_NH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (N, V) in the head's dtype."""

    def refresh(self) -> None:
        """Follow an update of the target's weights."""


class DenseHead:
    """The target's own weight."""

    def __init__(self, weight_VH: torch.Tensor) -> None:
        self.weight_VH = weight_VH

    def __call__(self, hidden_NH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.matmul(hidden_NH.to(self.weight_VH.dtype), self.weight_VH.T, out=out)

    def refresh(self) -> None:
        """The weight is the target's own."""


class FP8Head:
    """A copy in FP8 with a scale for each token; hidden states are rounded to FP8.

    A few rows are bound by the memory's rate, which a kernel of ours reads the copy at; for more, cuBLAS is faster.
    """

    def __init__(self, weight_VH: torch.Tensor, ops: Any) -> None:
        self.weight_VH = weight_VH
        self._fp8_logits = ops.fp8_logits
        self._copy_VH = torch.empty_like(weight_VH, dtype=_FP8)
        self._scale_V1 = weight_VH.new_empty((weight_VH.shape[0], 1), dtype=torch.float32)
        self.refresh()

    def __call__(self, hidden_NH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if hidden_NH.shape[0] <= FP8_MAX_ROWS:
            if out is None:
                out = hidden_NH.new_empty((hidden_NH.shape[0], self._copy_VH.shape[0]), dtype=torch.bfloat16)
            self._fp8_logits(hidden_NH, self._copy_VH, self._scale_V1[:, 0], logits_NV=out)
            return out
        rounded_NH, scale_N1 = _rounded(hidden_NH)
        return torch._scaled_mm(
            rounded_NH,
            self._copy_VH.T,
            scale_a=scale_N1,
            scale_b=self._scale_V1.T,
            out_dtype=torch.bfloat16,
            out=out,
        )

    def refresh(self) -> None:
        """Copy the weight anew, in place: captured graphs hold the copy's address. By parts: it runs on a full card."""
        parts = (tensor.split(_ROWS) for tensor in (self.weight_VH, self._copy_VH, self._scale_V1))
        for weight, copy, scale in zip(*parts, strict=True):
            rounded, part_scale = _rounded(weight)
            copy.copy_(rounded)
            scale.copy_(part_scale)


def _rounded(x_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 rows and their float32 scales (N, 1): each row's largest magnitude becomes the largest that FP8 has."""
    scale_N1 = x_NH.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / torch.finfo(_FP8).max
    return (x_NH / scale_N1).to(_FP8), scale_N1


def make(precision: str, weight_VH: torch.Tensor, ops: Any) -> Head:
    """The head of a config.

    Raises:
        ValueError: the target's head is not what FP8 products take.
    """
    if precision == "dense":
        return DenseHead(weight_VH)
    assert precision == "fp8", f"config accepted {precision}"
    num_tokens, hidden_size = weight_VH.shape
    if weight_VH.dtype != torch.bfloat16 or num_tokens % 16 or hidden_size % 16:
        raise ValueError(
            f"draft_head fp8: expected a bfloat16 head whose sides are multiples of 16, got {weight_VH.dtype} "
            f"{list(weight_VH.shape)}; leave draft_head at dense."
        )
    return FP8Head(weight_VH, ops)
