"""The optimisers of a training run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sglang_dflash.train.settings import Settings


def make(drafter: torch.nn.Module, settings: Settings, fused: bool) -> list[torch.optim.Optimizer]:
    """AdamW for all weights, or Muon for the matrices and AdamW for the rest; no weight decay.

    Muon's updates are scaled to the size of AdamW's (Moonlight, arXiv 2502.16982), so that one learning rate does for
    both.
    """
    parameters = list(drafter.parameters())
    chosen: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon":
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        parameters = [parameter for parameter in parameters if parameter.ndim != 2]
        chosen.append(BatchedMuon(matrices, settings.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    adamw = torch.optim.AdamW(parameters, settings.learning_rate, settings.betas, weight_decay=0.0, fused=fused)
    return [*chosen, adamw]


def describe(settings: Settings) -> str:
    """For people."""
    adamw = f"AdamW, betas {settings.betas}"
    return f"Muon for matrices; {adamw} for norms" if settings.optimizer == "muon" else adamw


class BatchedMuon(torch.optim.Muon):
    """PyTorch's Muon without weight decay, all matrices of a shape at once: a drafter's are few shapes, many matrices.

    A step of SmolLM2's drafter takes 31.4 ms so, 51.3 ms with one matrix after the other (one H200, docs/training.md).
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix."""
        assert closure is None, "no closure"
        for group in self.param_groups:
            assert group["weight_decay"] == 0, "as `make` asks for it"
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for matrix in group["params"]:
                by_shape.setdefault(matrix.shape, []).append(matrix)
            for matrices in by_shape.values():
                self._update(matrices, group)

    def _update(self, matrices: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        assert len(gradients) == len(matrices), "every weight takes part in every step"
        momenta = [self.state[m].setdefault("momentum_buffer", torch.zeros_like(m)) for m in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
        directions = orthogonalize(torch.stack(ahead), group["ns_coefficients"], group["ns_steps"], group["eps"])
        scale = 0.2 * math.sqrt(max(matrices[0].shape))
        torch._foreach_add_(list(matrices), list(directions.to(matrices[0].dtype)), alpha=-group["lr"] * scale)


def orthogonalize(
    updates_NRC: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix of each of N matrices, in bfloat16 (N, R, C)."""
    a, b, c = coefficients
    tall = updates_NRC.shape[1] > updates_NRC.shape[2]
    x = updates_NRC.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
