"""Weight updates of a running server: the target's stay the target's, and the drafter takes only what is its own.

SGLang sends an update that names no model to both. A drafter's tensors have the names, and often the shapes, of its
target's (`model.layers.0.mlp.down_proj.weight`), and SGLang's draft model skips what it does not know: a new target
would be written over the drafter without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sglang_dflash.checkpoint import expected_tensors, standard_name
from sglang_dflash.drafter_config import DrafterConfig, read_config

_KEPT = "Succeeded to update the target's weights; the drafter keeps its own."


class _Misfit(ValueError):
    """Tensors that are not the drafter's."""


class DrafterWeights:
    """Stands for the drafter where SGLang updates or checks weights: the runner that it looks for, and its updater.

    An update is taken whole or not at all. What is refused is told as SGLang tells it: (success, message).
    """

    def __init__(self, runner: Any, config: DrafterConfig, quantized: bool) -> None:
        self.weight_updater = self
        self.check_weights = runner.check_weights
        # A quantized drafter takes no update, and SGLang would quantize it a second time at the end of one.
        nothing = lambda **options: None  # noqa: E731
        self.begin_weight_update = nothing if quantized else runner.weight_updater.begin_weight_update
        self.end_weight_update = nothing if quantized else runner.weight_updater.end_weight_update
        self._updater = runner.weight_updater
        self._quantized = quantized
        self._shapes = expected_tensors(config)
        # Where tensors of every form arrive unpacked, before the first is written.
        self._load_weights = runner.model.load_weights
        runner.model.load_weights = self._load

    def update_weights_from_disk(self, model_path: str, load_format: str, recapture_cuda_graph: bool) -> Any:
        """A folder is always the target's: see `folder_refusal`."""
        return True, _KEPT

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        """The checkpoint engine's tensors are always the target's: its requests cannot name the drafter."""
        return True, _KEPT

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None) -> Any:
        if load_format not in (None, "flattened_bucket"):
            return False, (
                f"load_format of the drafter's update: expected none or flattened_bucket, got {load_format}; send the "
                "tensors under their checkpoint's names."
            )
        try:
            return self._updater.update_weights_from_tensor(named_tensors=named_tensors, load_format=load_format)
        except _Misfit as misfit:
            return False, str(misfit)

    def load_weights_from_distributed(self, named_tensors: list[tuple[str, torch.Tensor]]) -> Any:
        if problem := self._problem(named_tensors):
            return False, problem
        return self._updater.load_weights_from_distributed(named_tensors)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        named_tensors = list(weights)
        if problem := self._problem(named_tensors):
            raise _Misfit(problem)
        return self._load_weights(named_tensors)

    def _problem(self, named_tensors: list[tuple[str, torch.Tensor]]) -> str | None:
        """What of the tensors is not the drafter's, as one sentence."""
        if self._quantized:
            return (
                "the drafter's update: expected a server whose drafter is not quantized, got one that quantized it. "
                "Nothing was changed; start the server without --speculative-draft-model-quantization."
            )
        wrong = []
        for name, tensor in named_tensors:
            expected, got = self._shapes.get(standard_name(name)), tuple(tensor.shape)
            if expected is None:
                wrong.append(f"{name}, which it has not")
            elif got != expected:
                wrong.append(f"{name} {list(got)} where it has {list(expected)}")
        if not wrong:
            return None
        return (
            f"the drafter's update: expected tensors of the drafter, got {'; '.join(wrong)}. Nothing was changed; send "
            "the target's tensors with selector target, and the drafter's under their checkpoint's names."
        )


def folder_refusal(model_path: str) -> str | None:
    """Why a folder is no update from disk, which is always the target's; None where it is no drafter."""
    try:
        read_config(model_path)
    except ValueError:
        return None
    return (
        f"update from disk: expected a checkpoint of the target, got the DFlash drafter {model_path}. Nothing was "
        "changed; send the drafter's tensors with update_weights_from_tensor and selector draft."
    )
