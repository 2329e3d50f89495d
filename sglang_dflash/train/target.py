"""The frozen target of a training run: its features, its embedding and its head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


class FrozenTarget:
    """A causal language model of Transformers, evaluated only.

    Args:
        path: directory of the checkpoint that will be served: train on exactly these weights.
        taps: layers whose output is tapped; layer i's is Transformers' hidden_states[i + 1].
    """

    def __init__(self, path: Path, taps: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval().requires_grad_(False)
        self.taps = taps
        last = self.model.config.num_hidden_layers - 2
        if not taps or not all(0 <= tap <= last for tap in taps):
            raise ValueError(
                f"target_layer_ids: expected layers 0 to {last} of {path}, got {list(taps)}; the last layer's output "
                "comes out after the final norm"
            )

    @property
    def embedding(self) -> torch.nn.Module:
        return self.model.get_input_embeddings()

    @property
    def head_VH(self) -> torch.Tensor:
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def features(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Concatenated tapped hidden states (B, S, D) of sequences padded on the right."""
        # Causal attention: what follows a token does not change its features, so padding needs no mask.
        out = self.model.model(ids_BS, output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[tap + 1] for tap in self.taps], dim=-1)
