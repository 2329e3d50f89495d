"""The frozen target of a training run: its features, its embedding and its head."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.train.dataset import Batch, Batches

GIGABYTE = 1e9
FINGERPRINT_VALUES = 4096  # of each weight


def load(path: Path | str, kind: str, **options: Any) -> Any:
    """What Transformers' class `kind` loads of a target. Raises ValueError where it cannot."""
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(str(path), **options)
    except OSError as error:
        raise ValueError(
            f"expected a target that Transformers loads, got {path} ({error}); correct the path"
        ) from error


def fingerprint(model: Any) -> str:
    """A name for the weights: the start of each of them, hashed. Another dtype or fine-tune has another."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        start = weight.flatten()[:FINGERPRINT_VALUES].contiguous().cpu().view(torch.uint8)
        digest.update(f"{name}{tuple(weight.shape)}".encode() + start.numpy().tobytes())
    return digest.hexdigest()[:24]


class FrozenTarget:
    """A causal language model of Transformers, evaluated only.

    Args:
        path: directory of the checkpoint that will be served: train on exactly these weights.
        taps: layers whose output is tapped; layer i's is Transformers' hidden_states[i + 1].
    """

    def __init__(self, path: Path, taps: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        model = load(path, "AutoModelForCausalLM", dtype=dtype)
        self.model = model.to(device).eval().requires_grad_(False)
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
    def features(self, batch: Batch, device: torch.device) -> torch.Tensor:
        """Concatenated tapped hidden states (B, S, D) of a batch."""
        # Causal attention: what follows a token does not change its features, so padding needs no mask.
        out = self.model.model(batch.ids_BS.to(device), output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[tap + 1] for tap in self.taps], dim=-1)


class FeatureCache:
    """Features of every training token on the device, laid end to end: computed once, read in every epoch."""

    def __init__(self, target: FrozenTarget, batches: Batches, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ValueError where the device has no room for them."""
        num_features = len(target.taps) * target.head_VH.shape[1]
        num_bytes = batches.num_tokens * num_features * dtype.itemsize
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else num_bytes
        if num_bytes > free:
            raise ValueError(
                f"cache_features: expected {num_bytes / GIGABYTE:.0f} GB free for {batches.num_tokens} tokens, got "
                f"{free / GIGABYTE:.0f} GB; set it to false or train on less data"
            )
        self._features_TD = torch.empty(batches.num_tokens, num_features, dtype=dtype, device=device)
        for rows in batches.by_length():
            batch = batches.batch_of(rows, narrow=True)
            features_BSD = target.features(batch, device)
            for start, length, features_SD in zip(batch.starts_B.tolist(), batch.lengths_B.tolist(), features_BSD):
                self._features_TD[start : start + length] = features_SD[:length]

    def features(self, batch: Batch, device: torch.device) -> torch.Tensor:
        """Features (B, S, D) of a batch. Those of padding are some other token's: no block sees them."""
        num_tokens = self._features_TD.shape[0]
        at_BS = batch.starts_B[:, None] + torch.arange(batch.ids_BS.shape[1])
        return self._features_TD[at_BS.clamp(max=num_tokens - 1).to(device)]
