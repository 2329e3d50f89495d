"""The draft head: the target's language-model head, as it is or as a copy of 8 bits a weight; all of it or some rows.

Whatever the drafter says is verified, so copy and subset cost acceptance at most. FP8 halves the bytes that a round
reads for drafting's largest matrix; S rows of V leave S / V of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from sglang_dflash_kernels.contracts import FP8_MAX_ROWS

_FP8 = torch.float8_e4m3fn
_ROWS = 4096  # tokens of the head that are copied at once: 32 MiB in 16 bits at a hidden size of 4096


class Head(Protocol):
    """From hidden states to logits."""

    weight_VH: torch.Tensor  # the target's, whole
    tokens_S: torch.Tensor | None  # int64: the token of each logit; None where logit i is of token i

    def __call__(self, hidden_NH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (N, S) in the head's dtype; S is V without a subset."""

    def refresh(self) -> None:
        """Follow an update of the target's weights."""


class DenseHead:
    """The target's own weight, or a copy of the subset's rows."""

    def __init__(self, weight_VH: torch.Tensor, tokens_S: torch.Tensor | None = None) -> None:
        self.weight_VH = weight_VH
        self.tokens_S = tokens_S
        self._rows_SH = weight_VH if tokens_S is None else weight_VH[tokens_S]

    def __call__(self, hidden_NH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.matmul(hidden_NH.to(self._rows_SH.dtype), self._rows_SH.T, out=out)

    def refresh(self) -> None:
        """The target's weight needs nothing; a copy is written anew in place: captured graphs hold its address."""
        if self.tokens_S is not None:
            for rows, copy in zip(_parts(self.weight_VH, self.tokens_S), self._rows_SH.split(_ROWS), strict=True):
                copy.copy_(rows)


class FP8Head:
    """A copy in FP8 with a scale for each token; hidden states are rounded to FP8.

    A few rows are bound by the memory's rate, which a kernel of ours reads the copy at; for more, cuBLAS is faster.
    """

    def __init__(self, weight_VH: torch.Tensor, ops: Any, tokens_S: torch.Tensor | None = None) -> None:
        self.weight_VH = weight_VH
        self.tokens_S = tokens_S
        self._ops = ops
        num_rows = weight_VH.shape[0] if tokens_S is None else tokens_S.shape[0]
        self._copy_SH = weight_VH.new_empty((num_rows, weight_VH.shape[1]), dtype=_FP8)
        self._scale_S1 = weight_VH.new_empty((num_rows, 1), dtype=torch.float32)
        self.refresh()

    def __call__(self, hidden_NH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if hidden_NH.shape[0] <= FP8_MAX_ROWS:
            if out is None:
                out = hidden_NH.new_empty((hidden_NH.shape[0], self._copy_SH.shape[0]), dtype=torch.bfloat16)
            self._ops.fp8_logits(hidden_NH, self._copy_SH, self._scale_S1[:, 0], logits_NV=out)
            return out
        rounded_NH, scale_N1 = rounded(hidden_NH, self._ops)
        return torch._scaled_mm(
            rounded_NH,
            self._copy_SH.T,
            scale_a=scale_N1,
            scale_b=self._scale_S1.T,
            out_dtype=torch.bfloat16,
            out=out,
        )

    def refresh(self) -> None:
        """Copy the weight anew, in place: captured graphs hold the copy's address. By parts: it runs on a full card."""
        copies, scales = self._copy_SH.split(_ROWS), self._scale_S1.split(_ROWS)
        for weight, copy, scale in zip(_parts(self.weight_VH, self.tokens_S), copies, scales, strict=True):
            self._ops.round_fp8(weight, out_NH=copy, scale_N=scale[:, 0])


def rounded(x_NH: torch.Tensor, ops: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 rows and their float32 scales (N, 1): each row's largest magnitude becomes the largest that FP8 has."""
    rows_NH = torch.empty_like(x_NH, dtype=_FP8, memory_format=torch.contiguous_format)
    scale_N1 = x_NH.new_empty((x_NH.shape[0], 1), dtype=torch.float32)
    ops.round_fp8(x_NH, out_NH=rows_NH, scale_N=scale_N1[:, 0])
    return rows_NH, scale_N1


def _parts(weight_VH: torch.Tensor, tokens_S: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """The head's rows in its own order, `_ROWS` at a time."""
    if tokens_S is None:
        yield from weight_VH.split(_ROWS)
    else:
        yield from (weight_VH[tokens] for tokens in tokens_S.split(_ROWS))


def make(precision: str, weight_VH: torch.Tensor, ops: Any, tokens_S: torch.Tensor | None = None) -> Head:
    """The head of a config, over all tokens or over `tokens_S`, int64 ids of any device.

    Raises:
        ValueError: the target's head is not what FP8 products take.
    """
    if tokens_S is not None:
        tokens_S = tokens_S.to(weight_VH.device)
    if precision == "dense":
        return DenseHead(weight_VH, tokens_S)
    assert precision == "fp8", f"config accepted {precision}"
    num_tokens, hidden_size = weight_VH.shape[0] if tokens_S is None else tokens_S.shape[0], weight_VH.shape[1]
    if weight_VH.dtype != torch.bfloat16 or num_tokens % 16 or hidden_size % 16:
        raise ValueError(
            f"draft_head fp8: expected a bfloat16 head whose sides are multiples of 16, got {weight_VH.dtype} "
            f"[{num_tokens}, {hidden_size}]; leave draft_head at dense"
            + ("." if tokens_S is None else ", or map a multiple of 16 tokens.")
        )
    if weight_VH.is_cuda and (capability := torch.cuda.get_device_capability(weight_VH.device)) < (8, 9):
        raise ValueError(
            f"draft_head fp8: expected a GPU of compute capability 8.9 or more, which has FP8 products, got "
            f"{capability[0]}.{capability[1]}; leave draft_head at dense."
        )
    return FP8Head(weight_VH, ops, tokens_S)
