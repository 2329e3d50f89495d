"""Marks a worker's stages for the profiler: a named range around each function that is a stage.

Only an engine that `bench profile` starts has them (SGLANG_DFLASH_RANGES); no other runs a line of this. Ours and the
built-in worker call the same functions of SGLang for the two forward passes, and these are marked for both; ours may
replay their graphs itself (`host.round_graphs`):

    round    one decode step of the worker
    draft    the drafter's forward pass          head     the draft head, where it runs outside of the drafter's graph
    verify   the target's forward pass           accept   the target's choices, acceptance and bonus token
    inject   features into the drafter's cache

What a round does outside of these is glue.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any, Literal

import torch

PREFIX = "dflash."
ROUND, DRAFT, HEAD, VERIFY, ACCEPT, INJECT = "round", "draft", "head", "verify", "accept", "inject"
STAGES = (DRAFT, HEAD, VERIFY, ACCEPT, INJECT)

Worker = Literal["ours", "stock"]
_BUILT_IN = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
_COMMON = {
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": DRAFT,
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": VERIFY,
}
# Dotted path: stage. Of nested stages the outer one counts, so that the target's pass, which runs a ModelRunner too, is
# not a draft; `head` counts inside of another.
MARKED: dict[Worker, dict[str, str]] = {
    "ours": {
        **_COMMON,
        "sglang_dflash.worker.DFlashWorker._decode": ROUND,
        "sglang_dflash.host.draft_model.DraftModel.forward": DRAFT,
        "sglang_dflash.host.round_graphs.RoundGraphs.verify": VERIFY,
        "sglang_dflash.host.sampling.choose": ACCEPT,
        "sglang_dflash.host.sampling.distribution": ACCEPT,
        "sglang_dflash.accept.rejection.RejectionAcceptor.accept": ACCEPT,
        "sglang_dflash.accept.forced.ForcedAcceptor.accept": ACCEPT,
        "sglang_dflash.inject.features.FeatureInjector.inject": INJECT,
    },
    "stock": {
        **_COMMON,
        f"{_BUILT_IN}.forward_batch_generation": ROUND,
        f"{_BUILT_IN}._greedy_sample_from_vocab_parallel_head": HEAD,
        f"{_BUILT_IN}._accept_block": ACCEPT,
        f"{_BUILT_IN}._append_target_hidden_to_draft_kv_by_loc": INJECT,
    },
}
_MAKE_PROPOSER = "sglang_dflash.draft.proposer.make"


def mark(worker: Worker) -> None:
    """Put the ranges around a worker's stages in this process; call it before the worker is made."""
    for path, stage in MARKED[worker].items():
        _replace(path, functools.partial(_ranged, stage=stage))
    if worker == "ours":
        _replace(_MAKE_PROPOSER, _with_ranged_score)


def _replace(path: str, wrap: Callable[[Any], Any]) -> None:
    owner_path, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    setattr(owner, name, wrap(getattr(owner, name)))


def _ranged(function: Any, stage: str) -> Any:
    """`function` inside a range. A round of the built-in worker's is a decode step; its prefill gets no range."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if stage == ROUND and _is_prefill(args, kwargs):
            return function(*args, **kwargs)
        with torch.profiler.record_function(PREFIX + stage):
            return function(*args, **kwargs)

    return call


def _is_prefill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    batch = kwargs["batch"] if "batch" in kwargs else args[1]
    return bool(batch.forward_mode.is_extend() or batch.forward_mode.is_idle())


def _with_ranged_score(make: Any) -> Any:
    """The head is captured with the drafter on a GPU, and there told apart by its kernels; on a CPU this marks it."""

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        proposer = make(*args, **kwargs)
        proposer.score = _ranged(proposer.score, stage=HEAD)
        return proposer

    return call
