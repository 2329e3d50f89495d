"""The optimisers of a training run."""

from __future__ import annotations

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
        chosen.append(
            torch.optim.Muon(matrices, settings.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        )
    adamw = torch.optim.AdamW(parameters, settings.learning_rate, settings.betas, weight_decay=0.0, fused=fused)
    return [*chosen, adamw]


def describe(settings: Settings) -> str:
    """For people."""
    adamw = f"AdamW, betas {settings.betas}"
    return f"Muon for matrices; {adamw} for norms" if settings.optimizer == "muon" else adamw
