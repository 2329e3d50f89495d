"""Train a drafter: draw blocks, predict, step; evaluate on held-out sequences; save so that a kill loses little.

What a step does depends on the settings and the step's number alone (data order, anchors, learning rate), so that a run
taken up from a saved state goes on as it would have.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_dflash import __version__, checkpoint, drafter_config
from sglang_dflash.drafter_config import DrafterConfig
from sglang_dflash.train import blocks, dataset, evaluate, loss, optimizer, run_record, state
from sglang_dflash.train.evaluate import Evaluation
from sglang_dflash.train.model import BlockDrafter
from sglang_dflash.train.run_record import RunRecord
from sglang_dflash.train.settings import Settings
from sglang_dflash.train.target import FeatureCache, FrozenTarget, fingerprint

METRICS = "metrics.jsonl"
STATES = "states"
EVALUATION = "evaluation.json"
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
        if settings.output.exists() and not settings.output.is_dir():
            raise ValueError(f"output: expected a folder or a new name, got the file {settings.output}; name another")
        self.settings, self.device = settings, device
        self.dtype = getattr(torch, settings.compute_dtype)
        self.config = _drafter_config(settings)
        self.target = FrozenTarget(settings.target, self.config.target_layer_ids, self.dtype, device)
        torch.manual_seed(settings.seed)
        self.drafter = initialise(BlockDrafter(self.config)).to(device)
        self.drafter.compiled = device.type == "cuda"
        self.examples = dataset.read(settings.data)
        self.data_sha256 = hashlib.sha256(settings.data.read_bytes()).hexdigest()
        train, self.heldout = self._batches("train"), self._batches("heldout")
        if train is None:
            raise ValueError(f"{settings.data}: expected examples of the split train, got none; make data first")
        self.batches = train
        self.cache = FeatureCache(self.target, train, self.dtype, device) if settings.cache_features else None
        self.optimizers = optimizer.make(self.drafter, settings, fused=device.type == "cuda")
        self.step, self.seconds = 0, 0.0

    def _batches(self, split: dataset.Split) -> dataset.Batches | None:
        of_split = [example for example in self.examples if example.split == split]
        chosen = self.settings
        # On a GPU one width: every other one would compile the drafter again.
        sizes = (chosen.batch_sequences, chosen.max_tokens, chosen.seed)
        if not of_split:
            return None
        batches = dataset.Batches(of_split, *sizes, one_width=self.device.type == "cuda")
        if batches.largest_id >= self.config.vocab_size:
            raise ValueError(
                f"{chosen.data}: expected token ids below the target's vocabulary of {self.config.vocab_size}, got "
                f"{batches.largest_id}; make the data with this target"
            )
        return batches

    def run(self, show: Callable[[Progress], None] = lambda progress: None, command: str = "Trainer.run") -> Path:
        """Train to the end, from the newest state if there is one; the drafter's directory, in the z-lab form.

        Beside the drafter are left: METRICS, EVALUATION where there is held-out data, and the run's record.
        """
        self.settings.output.mkdir(parents=True, exist_ok=True)
        self.resume()
        started, before = time.perf_counter(), self.seconds
        told, outcomes = time.perf_counter(), []
        while self.step < self.settings.steps:
            outcomes.append(self.train_step())
            if self.step % self.settings.log_every == 0 or self.step == self.settings.steps:
                self._tell(self._progress("train", outcomes, time.perf_counter() - told), show)
                told, outcomes = time.perf_counter(), []
            if self.heldout and (self.step % self.settings.evaluate_every == 0 or self.step == self.settings.steps):
                progress, evaluation = self.evaluate()
                self._tell(progress, show)
                (self.settings.output / EVALUATION).write_text(evaluation.to_json())
            self.seconds = before + time.perf_counter() - started
            if self.step % self.settings.checkpoint_every == 0 or self.step == self.settings.steps:
                self.save()
        self.record(command).write(self.settings.output / run_record.FILE)
        return self.export()

    def resume(self) -> None:
        """Take up the newest state of the output directory; where there is none, forget what another run left there."""
        output = self.settings.output
        saved = state.load(output / STATES, self.device)
        if saved is None:
            for name in (METRICS, EVALUATION, run_record.FILE):
                (output / name).unlink(missing_ok=True)
            return
        before, now = saved["settings"], self._identity()
        if different := [name for name in now if before.get(name) != now[name]]:
            was = ", ".join(f"{name} {before.get(name)!r}, not {now[name]!r}" for name in different)
            raise ValueError(
                f"{output}: expected a run of the same settings, data and target, got one of {was}; use another output "
                "directory or remove this one"
            )
        self.drafter.load_state_dict(saved["drafter"])
        for optimiser, values in zip(self.optimizers, saved["optimizers"], strict=True):
            optimiser.load_state_dict(values)
        self.step, self.seconds = saved["step"], saved["seconds"]
        _drop_torn_line(output / METRICS)

    def save(self) -> None:
        """Write the state; the run can be taken up from here."""
        contents = {
            "settings": self._identity(),
            "drafter": self.drafter.state_dict(),
            "optimizers": [optimiser.state_dict() for optimiser in self.optimizers],
            "seconds": self.seconds,
        }
        state.save(self.settings.output / STATES, self.step, contents)

    def export(self) -> Path:
        """Write the drafter as it is now, in bfloat16 and the z-lab form."""
        weights = self.drafter.state_dict().items()
        tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in weights}
        return checkpoint.write_checkpoint(self.settings.output / "drafter", self.config, tensors)

    @torch.no_grad()
    def evaluate(self) -> tuple[Progress, Evaluation]:
        """Loss and acceptance on every held-out sequence, with anchors that are the same each time."""
        assert self.heldout is not None, "no held-out sequences"
        start, outcomes = time.perf_counter(), []
        families: list[str] = []
        sequences: list[int] = []
        for index, rows in enumerate(self.heldout.by_length()):
            generator = torch.Generator(self.device).manual_seed(EVALUATION_SEED * _SEED_STRIDE + index)
            # Filled up to the size that all batches have; what comes a second time is not counted.
            filled = (rows * self.settings.batch_sequences)[: self.settings.batch_sequences]
            outcome = self._forward(self.heldout.batch_of(filled), generator, cached=False)
            kept = len(rows) * self.settings.anchors
            outcomes.append({**outcome, **{name: outcome[name][:kept] for name in ("right_NJ", "valid_NJ")}})
            sequences += [len(families) + i for i in range(len(rows)) for _ in range(self.settings.anchors)]
            families += [self.heldout.examples[row].family for row in rows]
        progress = self._progress("heldout", outcomes, time.perf_counter() - start)
        right_NJ, valid_NJ = (torch.cat([o[name] for o in outcomes]).cpu() for name in ("right_NJ", "valid_NJ"))
        return progress, evaluate.evaluate_matches(right_NJ, valid_NJ, torch.tensor(sequences), families)

    def train_step(self) -> dict[str, Any]:
        """One step of the optimiser; what `_forward` gave."""
        rate = learning_rate(self.settings, self.step)
        for group in (group for optimiser in self.optimizers for group in optimiser.param_groups):
            group["lr"] = rate
        generator = torch.Generator(self.device).manual_seed(self.settings.seed * _SEED_STRIDE + self.step)
        outcome = self._forward(self.batches.batch(self.step), generator, cached=True)
        self.drafter.zero_grad(set_to_none=True)
        outcome["loss"].backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.settings.clip_norm)
        for optimiser in self.optimizers:
            optimiser.step()
        self.step += 1
        return {**outcome, "loss": outcome["loss"].detach()}

    def record(self, command: str) -> RunRecord:
        """What a model card is made from."""
        chosen = self.settings
        counts: dict[tuple[str, dataset.Split], list[int]] = {}
        for example in self.examples:
            counts.setdefault((example.family, example.split), []).append(len(example.answer_ids))
        return RunRecord(
            settings=chosen,
            hardware=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU",
            minutes=round(self.seconds / 60, 2) or 0.01,
            versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")}
            | {"sglang-dflash": __version__},
            command=command,
            data=[
                run_record.DataCount(family=family, split=split, examples=len(lengths), tokens=sum(lengths))
                for (family, split), lengths in counts.items()
            ],
            sequences_per_step=chosen.batch_sequences,
            blocks_per_sequence=chosen.anchors,
            optimizer=optimizer.describe(chosen),
            schedule=f"{chosen.warmup:.0%} linear warm-up, cosine to zero",
            loss=f"cross entropy, D-PACE weights (smoothing {chosen.dpace_smoothing})"
            if chosen.loss == "dpace"
            else f"cross entropy, decay by slot (gamma {chosen.decay_gamma})",
            seeds={"training": chosen.seed},
        )

    def _forward(self, batch: dataset.Batch, generator: torch.Generator, cached: bool) -> dict[str, Any]:
        tensors = (batch.ids_BS, batch.num_prompt_B, batch.lengths_B)
        ids_BS, num_prompt_B, lengths_B = (tensor.to(self.device) for tensor in tensors)
        drawn = blocks.draw(ids_BS, num_prompt_B, lengths_B, self.settings.anchors, self.settings.block_size, generator)
        source = self.cache if cached and self.cache is not None else self.target
        features_BSD = source.features(batch, self.device)
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
            loss=float(torch.stack([o["loss"] for o in outcomes]).mean()),
            slot1_accuracy=float(right_NJ[first, 0].float().mean()) if bool(first.any()) else 0.0,
            acceptance_length=evaluate.acceptance_length(right_NJ, valid_NJ),
            lr=learning_rate(self.settings, max(self.step - 1, 0)),
            tokens_per_s=sum(o["num_tokens"] for o in outcomes) / seconds,
        )

    def _tell(self, progress: Progress, show: Callable[[Progress], None]) -> None:
        with (self.settings.output / METRICS).open("a") as file:
            file.write(json.dumps(progress.__dict__) + "\n")
        show(progress)

    def _identity(self) -> dict[str, Any]:
        """What decides what a step does: settings, data and target."""
        settings = self.settings.model_dump(mode="json", exclude={"log_every", "evaluate_every", "checkpoint_every"})
        return settings | {"data_sha256": self.data_sha256, "target_weights": fingerprint(self.target.model)}


def _drop_torn_line(file: Path) -> None:
    """The next line is not to be appended to half of one that a kill left."""
    if file.is_file():
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)


def _drafter_config(settings: Settings) -> DrafterConfig:
    file = settings.target / "config.json"
    if not file.is_file():
        raise ValueError(f"target: expected a folder with config.json, got {settings.target}; correct the path")
    chosen = (settings.num_layers, settings.block_size, settings.mask_token_id, settings.target_layer_ids)
    try:
        config = drafter_config.config_for_target(json.loads(file.read_text()), *chosen)
    except KeyError as error:
        raise ValueError(f"{file}: expected the key {error}, got none; train for a Llama or Qwen3 target") from error
    if settings.mask_token_id >= config.vocab_size:
        raise ValueError(
            f"mask_token_id: expected an id below the target's vocabulary of {config.vocab_size}, got "
            f"{settings.mask_token_id}; take a special token that texts never hold"
        )
    size = settings.intermediate_size
    return config if size is None else dataclasses.replace(config, intermediate_size=size)


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
