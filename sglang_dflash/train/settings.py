"""The settings of a training run: one strict schema, from a YAML file, from flags, or both."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from sglang_dflash import validation


def _ascending(taps: tuple[int, ...]) -> tuple[int, ...]:
    """A server hands the features out in the order of the layers."""
    if not taps or list(taps) != sorted(set(taps)):
        raise ValueError(f"expected layers that ascend, got {list(taps)}; sort them")
    return taps


class Settings(pydantic.BaseModel):
    """A training run. The defaults are for a target of about 100M parameters on one GPU; see `docs/training.md`.

    `decay_gamma` and the loss named `decay` are the paper's (arXiv 2602.06036, appendix A.1); `dpace` is D-PACE
    (arXiv 2605.18810).
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    target: Path
    data: Path
    output: Path
    # The drafter.
    num_layers: int = pydantic.Field(5, ge=1)
    block_size: int = pydantic.Field(16, ge=2, le=64)
    mask_token_id: int = pydantic.Field(ge=0)
    # None: spread over the target, the paper's formula.
    target_layer_ids: Annotated[tuple[int, ...], pydantic.AfterValidator(_ascending)] | None = None
    intermediate_size: int | None = pydantic.Field(None, ge=1)  # None: the target's
    # The batch.
    max_tokens: int = pydantic.Field(512, ge=64)  # of a sequence, prompt included; longer ones are cut
    batch_sequences: int = pydantic.Field(32, ge=1)
    anchors: int = pydantic.Field(64, ge=1)  # blocks a sequence, redrawn each time it is seen
    # Keep the target's features of all training tokens on the device, instead of computing them in every epoch: a token
    # takes 2 bytes a feature, taps times hidden size of them.
    cache_features: bool = False
    # The optimiser.
    optimizer: Literal["adamw", "muon"] = "muon"  # muon: for the matrices, AdamW for the norms
    steps: int = pydantic.Field(4500, ge=1)
    learning_rate: float = pydantic.Field(3e-3, gt=0)
    warmup: float = pydantic.Field(0.04, ge=0, lt=1)  # fraction of the steps
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = pydantic.Field(1.0, gt=0)
    # The loss.
    loss: Literal["dpace", "decay"] = "dpace"
    dpace_smoothing: float = pydantic.Field(0.5, ge=0, le=1)
    decay_gamma: float = pydantic.Field(7.0, gt=0)
    # Running.
    seed: int = 0
    log_every: int = pydantic.Field(10, ge=1)
    evaluate_every: int = pydantic.Field(500, ge=1)
    checkpoint_every: int = pydantic.Field(500, ge=1)
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"


def load(file: Path | None, overrides: dict[str, Any]) -> Settings:
    """The settings of a YAML file (or none), with `overrides` on top.

    Raises:
        ValueError: the file is not a YAML mapping, or a key or value is wrong; every problem is named.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = yaml.safe_load(file.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"{file}: expected a YAML file of training settings, got {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file}: expected a YAML mapping of settings, got {type(values).__name__}")
    try:
        return Settings.model_validate({**values, **overrides})
    except pydantic.ValidationError as error:
        raise ValueError(f"{file or 'the flags'}:\n  - " + "\n  - ".join(validation.problems(error))) from error
