"""What a training run will cost, from a few of its own steps."""

from __future__ import annotations

import dataclasses
import time

import torch

from sglang_dflash.train.loop import Trainer

TIMED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A run's size and cost."""

    drafter_parameters: int
    train_sequences: int
    train_tokens: int
    blocks_a_step: int
    epochs: float
    step_s: float
    run_s: float
    peak_bytes: int | None  # of device memory, None on a CPU

    def render(self) -> str:
        """One fact a line."""
        memory = "not measured on a CPU" if self.peak_bytes is None else f"{self.peak_bytes / 1e9:.1f} GB at the peak"
        return "\n".join(
            (
                f"drafter      {self.drafter_parameters / 1e6:.1f}M parameters",
                f"data         {self.train_sequences} sequences, {self.train_tokens / 1e6:.2f}M tokens",
                f"step         {self.blocks_a_step} blocks, {self.step_s * 1000:.0f} ms (median of {TIMED_STEPS})",
                f"run          {self.epochs:.1f} epochs, about {self.run_s / 60:.1f} min without evaluation",
                f"memory       {memory}",
            )
        )


def measure(trainer: Trainer) -> Estimate:
    """Take a few steps of a run that is then thrown away."""
    on_gpu = trainer.device.type == "cuda"
    times = []
    for _ in range(TIMED_STEPS + 1):
        start = time.perf_counter()
        trainer.train_step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    step_s = sorted(times[1:])[TIMED_STEPS // 2]
    settings = trainer.settings
    return Estimate(
        drafter_parameters=sum(parameter.numel() for parameter in trainer.drafter.parameters()),
        train_sequences=trainer.batches.num_examples,
        train_tokens=trainer.batches.num_tokens,
        blocks_a_step=settings.batch_sequences * settings.anchors,
        epochs=settings.steps / trainer.batches.steps_per_epoch,
        step_s=step_s,
        run_s=step_s * settings.steps,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
    )
