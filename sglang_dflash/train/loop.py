"""Train a drafter: draw blocks, predict, step; evaluate on held-out sequences; save so that a kill loses little.

What a step does depends on the settings and the step's number alone (data order, anchors, learning rate), so that a run
taken up from a saved state goes on as it would have.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_dflash import checkpoint, drafter_config
from sglang_dflash.train import blocks, dataset, loss, state
from sglang_dflash.train.model import BlockDrafter
from sglang_dflash.train.settings import Settings
from sglang_dflash.train.target import FrozenTarget

METRICS = "metrics.jsonl"
STATES = "states"
# Blocks whose anchors are drawn the same way in every evaluation.
EVALUATION_SEED = 1
# A step's anchors come from a generator of their own seed, far from every other step's.
_SEED_STRIDE = 1_000_003


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a step tells: handed to the caller's display and written to METRICS."""

    step: int
    split: str  # "train" or "heldout"
    loss: float
    slot1_accuracy: float
    acceptance_length: float  # bonus token included
    lr: float
    tokens_per_s: float


class Trainer:
    """One training run in `settings.output`."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.dtype = getattr(torch, settings.compute_dtype)
        target = json.loads((settings.target / "config.json").read_text())
        self.config = drafter_config.config_for_target(
            target, settings.num_layers, settings.block_size, settings.mask_token_id, settings.target_layer_ids
        )
        if settings.intermediate_size is not None:
            self.config = dataclasses.replace(self.config, intermediate_size=settings.intermediate_size)
        if settings.mask_token_id >= self.config.vocab_size:
            raise ValueError(
                f"mask_token_id: expected an id below the target's vocabulary of {self.config.vocab_size}, got "
                f"{settings.mask_token_id}; take a special token that texts never hold"
            )
        self.target = FrozenTarget(settings.target, self.config.target_layer_ids, self.dtype, device)
        torch.manual_seed(settings.seed)
        self.drafter = initialise(BlockDrafter(self.config)).to(device)
        examples = dataset.read(settings.data)
        self.train = [e for e in examples if e.split == "train"]
        self.heldout = [e for e in examples if e.split == "heldout"]
        if not self.train:
            raise ValueError(f"{settings.data}: expected examples of the split train, got none; make data first")
        self.batches = dataset.Batches(self.train, settings.batch_sequences, settings.max_tokens, settings.seed)
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0
        )
        self.step = 0

    def run(self, show: Callable[[Progress], None] = lambda progress: None) -> Path:
        """Train to the end, from the newest state if there is one; the drafter's directory, in the z-lab form."""
        self.resume()
        while self.step < self.settings.steps:
            start = time.perf_counter()
            outcome = self.train_step()
            if self.step % self.settings.log_every == 0 or self.step == self.settings.steps:
                self._tell(self._progress("train", [outcome], time.perf_counter() - start), show)
            if self.heldout and (self.step % self.settings.evaluate_every == 0 or self.step == self.settings.steps):
                self._tell(self.evaluate(), show)
            if self.step % self.settings.checkpoint_every == 0 or self.step == self.settings.steps:
                self.save()
        return self.export()

    def resume(self) -> None:
        """Take up the newest state of the output directory, if there is one."""
        saved = state.load(self.settings.output / STATES, self.device)
        if saved is None:
            return
        if saved["settings"] != self._identity():
            raise ValueError(
                f"{self.settings.output}: expected a run of the same settings, got one of others; use another output "
                "directory or remove this one"
            )
        self.drafter.load_state_dict(saved["drafter"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]

    def save(self) -> None:
        """Write the state; the run can be taken up from here."""
        contents = {
            "settings": self._identity(),
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        state.save(self.settings.output / STATES, self.step, contents)

    def export(self) -> Path:
        """Write the drafter as it is now, in bfloat16 and the z-lab form."""
        weights = self.drafter.state_dict().items()
        tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in weights}
        return checkpoint.write_checkpoint(self.settings.output / "drafter", self.config, tensors)

    @torch.no_grad()
    def evaluate(self) -> Progress:
        """Loss and acceptance on the held-out sequences, with anchors that are the same each time."""
        batch_sequences = min(self.settings.batch_sequences, len(self.heldout))
        held = dataset.Batches(self.heldout, batch_sequences, self.settings.max_tokens, EVALUATION_SEED)
        start, outcomes = time.perf_counter(), []
        for index in range(held.steps_per_epoch):
            generator = torch.Generator(self.device).manual_seed(EVALUATION_SEED * _SEED_STRIDE + index)
            outcomes.append(self._forward(held.batch(index), generator))
        seconds = time.perf_counter() - start
        return self._progress("heldout", outcomes, seconds)

    def train_step(self) -> dict[str, Any]:
        """One step of the optimiser; what `_forward` gave."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.step)
        generator = torch.Generator(self.device).manual_seed(self.settings.seed * _SEED_STRIDE + self.step)
        outcome = self._forward(self.batches.batch(self.step), generator)
        self.optimizer.zero_grad(set_to_none=True)
        outcome["loss"].backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.step += 1
        return outcome

    def _forward(self, batch: dataset.Batch, generator: torch.Generator) -> dict[str, Any]:
        tensors = (batch.ids_BS, batch.num_prompt_B, batch.lengths_B)
        ids_BS, num_prompt_B, lengths_B = (tensor.to(self.device) for tensor in tensors)
        drawn = blocks.draw(ids_BS, num_prompt_B, lengths_B, self.settings.anchors, self.settings.block_size, generator)
        features_BSD = self.target.features(ids_BS)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden_BAKH = self.drafter.forward_blocks(
                features_BSD, drawn, self.target.embedding, self.settings.mask_token_id
            )
        labels_NJ, valid_NJ = drawn.labels_BAK[..., 1:].flatten(0, 1), drawn.valid_BAK[..., 1:].flatten(0, 1)
        scores = loss.score(hidden_BAKH[..., 1:, :].flatten(0, 1), self.target.head_VH, labels_NJ)
        if self.settings.loss == "dpace":
            weights_NJ = loss.dpace_weights(scores.nll_NJ, valid_NJ, self.settings.dpace_smoothing)
        else:
            weights_NJ = loss.decay_weights(valid_NJ, self.settings.decay_gamma)
        return {
            "loss": loss.weighted(scores.nll_NJ, weights_NJ),
            "right_NJ": scores.right_NJ,
            "valid_NJ": valid_NJ,
            "num_tokens": int(batch.lengths_B.sum()),
        }

    def _progress(self, split: str, outcomes: list[dict[str, Any]], seconds: float) -> Progress:
        right_NJ = torch.cat([o["right_NJ"] for o in outcomes])
        valid_NJ = torch.cat([o["valid_NJ"] for o in outcomes])
        first = valid_NJ[:, 0]
        return Progress(
            step=self.step,
            split=split,
            loss=float(torch.stack([o["loss"].detach() for o in outcomes]).mean()),
            slot1_accuracy=float(right_NJ[first, 0].float().mean()) if bool(first.any()) else 0.0,
            acceptance_length=loss.acceptance_length(right_NJ, valid_NJ),
            lr=learning_rate(self.settings, max(self.step - 1, 0)),
            tokens_per_s=sum(o["num_tokens"] for o in outcomes) / seconds,
        )

    def _tell(self, progress: Progress, show: Callable[[Progress], None]) -> None:
        self.settings.output.mkdir(parents=True, exist_ok=True)
        with (self.settings.output / METRICS).open("a") as file:
            file.write(json.dumps(progress.__dict__) + "\n")
        show(progress)

    def _identity(self) -> dict[str, Any]:
        """The settings that decide what a step does."""
        return self.settings.model_dump(mode="json", exclude={"log_every", "evaluate_every", "checkpoint_every"})


def initialise(drafter: BlockDrafter, std: float = 0.02) -> BlockDrafter:
    """Normal weights, norms at one."""
    for module in drafter.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
    return drafter


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then a cosine to zero at the last step."""
    warmup_steps = settings.warmup * settings.steps
    if step < warmup_steps:
        return settings.learning_rate * (step + 1) / max(warmup_steps, 1)
    done = (step - warmup_steps) / max(settings.steps - warmup_steps, 1)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
