"""DFlash in SGLang: draft a block in one pass, verify it in one pass, commit what the target agrees with.

A decode round (`DFlashWorker._decode`) reads top to bottom, each stage taking the record of the one before:

    read      the scheduler's batch                               -> Round
    choose    how many tokens of each block are verified          -> width
    draft     block = [anchor, mask, mask, ...] and its slots,    -> Block
              one pass of the drafter over the whole block        -> Draft
    verify    one causal pass of the target over the block,
              its features injected into the drafter's cache,
              and its own token after each of the block's         -> Verified
    accept    the longest run the target agrees with, and bonus   -> Accepted
    result    back to the scheduler

The drafter reads the prefix through keys and values made from the target's hidden states, not from tokens: every
committed token's features are injected, in prefill for the prompt and at the end of each verifying pass. Target
and drafter share one request-to-token table and one allocator: a cached prefix of one is a cached prefix of the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_utils import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    sample_simulated_acc_len,
)

import sglang_dflash_kernels as kernels
from sglang_dflash import __version__, config
from sglang_dflash.accept.alarm import AcceptanceAlarm
from sglang_dflash.accept.forced import ForcedAcceptor
from sglang_dflash.accept.match import MatchAcceptor
from sglang_dflash.accept.rejection import RejectionAcceptor
from sglang_dflash.buffers import Buffers
from sglang_dflash.draft import head, proposer
from sglang_dflash.draft.block import BlockLayout
from sglang_dflash.host import arguments, attention, few_rows, rope_store, round_graphs, rounds
from sglang_dflash.host.draft_model import DraftModel
from sglang_dflash.host.head_logits import GreedyChoices
from sglang_dflash.host.round_graphs import RoundGraphs
from sglang_dflash.host.target_model import TargetModel
from sglang_dflash.inject.features import FeatureInjector
from sglang_dflash.policy.fixed import FixedWidth

logger = logging.getLogger(__name__)


class DFlashWorker(BaseSpecWorker):
    """SGLang's speculative worker for DFLASH: orchestration only, the stages do the arithmetic."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self.device = torch.device(target_worker.device)
        self.block_size = int(get_spec().speculative_num_draft_tokens)
        # Read by SGLang's metrics.
        self.speculative_num_steps = 1
        self.speculative_num_draft_tokens = self.block_size
        self._ops = kernels.select(self.device)
        self.target = TargetModel(target_worker)
        self.drafter = DraftModel(server_args, gpu_id, nccl_port, self.target, self.block_size, self._ops)
        self.policy = FixedWidth(self.block_size)
        self.alarm = AcceptanceAlarm()
        self._mask_token_id = arguments.mask_token_id(server_args)
        if (mask_embedding_H := arguments.mask_embedding(server_args)) is not None:
            self.target.set_mask_embedding(self._mask_token_id, mask_embedding_H)
        self._settings = config.load()
        # Before SGLang sizes the KV pool by the memory that is left: a head may be a copy.
        tokens_S = arguments.drafted_tokens(server_args)
        self.head = head.make(self._settings.draft_head, self.target.head(), self._ops, tokens_S)

    # -- what SGLang reads of a speculative worker ---------------------------------------------------------------

    @property
    def draft_worker(self) -> Any:
        return self.drafter.worker

    @property
    def model_runner(self) -> Any:
        return self.drafter.runner

    @property
    def draft_model_runner(self) -> Any:
        return self.drafter.runner

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (self.target.runner.attn_backend, self.drafter.runner.attn_backend)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("draft", self.drafter.weights)]

    def weights_updated(self) -> None:
        """After every weight update: copies follow."""
        self.head.refresh()

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """SGLang tells what a round accepted, once the host knows it."""
        self.alarm.observe(num_correct_drafts_per_req)

    # -- start, in SGLang's order --------------------------------------------------------------------------------

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self._build_stages()

    def _build_stages(self) -> None:
        ops, settings = self._ops, self._settings
        self._buffers = buffers = Buffers(self._max_requests(), self.block_size, self.device)
        self.layout = BlockLayout(ops, buffers, self.req_to_token_pool.req_to_token, self._mask_token_id)
        self.proposer = proposer.make(settings.proposer, ops, buffers, self.head)
        self.acceptor = _make_acceptor(ops, buffers)
        self.injector = FeatureInjector(ops, self.drafter.layers())
        self._choices = GreedyChoices(ops, buffers.max_requests, self.block_size, self.device)
        logger.info(
            "sglang-dflash %s: DFlashWorker serves DFLASH (block %d, %d layers, mask token %d, proposer %s, %s head of "
            "%s tokens, %s ops).",
            __version__,
            self.block_size,
            len(self.drafter.model.layers),
            self._mask_token_id,
            settings.proposer,
            settings.draft_head,
            "all" if self.head.tokens_S is None else len(self.head.tokens_S),
            ops.name,
        )

    def _max_requests(self) -> int:
        captured = get_exec().graph.cuda_graph_config.decode.bs or [0]
        return max(int(self.target.runner.max_running_requests), *captured)

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        runners = {"target": self.target.runner, "drafter": self.drafter.runner}
        planned = [name for name, runner in runners.items() if attention.plan_once(runner)]
        self._graphs, num_fused = None, 0
        if len(planned) == len(runners) and round_graphs.serve(*runners.values()):
            self._graphs = RoundGraphs(self.drafter.runner, self.target.runner, self.layout, self._buffers.drafted_BK)
            num_fused = rope_store.fuse(self.target.runner)
        blocks = range(self.block_size, kernels.SKINNY_MAX_ROWS + 1, self.block_size)
        num_dense = [
            few_rows.serve(self.target.runner, self._ops, decoded=blocks),
            few_rows.serve(self.drafter.runner, self._ops),  # drafts are verified, however they were rounded
        ]
        logger.info(
            "Attention is planned once a pass for: %s. A round's passes are replayed by %s. The keys of %d target "
            "layers are stored by their rotation. Dense layers that multiply few rows by our kernel: %d of the target, "
            "%d of the drafter.",
            ", ".join(planned) or "none, each layer plans its own",
            "SGLang, where it captures graphs" if self._graphs is None else "sglang-dflash",
            num_fused,
            *num_dense,
        )
        self.target.init_graphs(self.injector.inject, self._choices, self._graphs)

    def init_cuda_graphs(self) -> None:
        self.drafter.init_graphs(self.layout, self.proposer.score, self._graphs)
        if self._graphs is not None:
            self._graphs.check()

    # -- step ----------------------------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """One scheduler step: a prefill, a decode round, or nothing.

        With overlapped scheduling, `on_publish` tells the scheduler the new lengths as soon as they are known, and
        `grammar_barrier` moves the grammars over what the round before committed.
        """
        publish = on_publish or (lambda new_lens_B: None)
        if batch.forward_mode.is_extend():
            return self._prefill(batch, publish)
        if batch.forward_mode.is_idle():
            return self._idle(publish)
        return self._decode(batch, publish, grammar_barrier)

    def _prefill(self, batch: Any, publish: Callable[[torch.Tensor], None]) -> Any:
        result, features_ND = self.target.prefill(batch)
        result.new_seq_lens = batch.seq_lens
        publish(result.new_seq_lens)
        # Before the scheduler can share the prompt's slots through the radix cache.
        self.injector.inject(features_ND, rounds.prompt_positions(batch, self.device), batch.out_cache_loc)
        result.next_draft_input = rounds.next_input(result.next_token_ids, batch.seq_lens)
        return result

    def _decode(
        self, batch: Any, publish: Callable[[torch.Tensor], None], advance_grammars: Callable[[], None] | None
    ) -> Any:
        round_ = rounds.read(batch, self.block_size, draws=self.proposer.draws)
        width = self.policy.choose(round_.num_requests)
        block = self.drafter.forward(round_)
        draft = self.proposer.propose(round_, block)
        verified = self.target.verify(batch, round_, block, draft, width, advance_grammars)
        accepted = self.acceptor.accept(round_, draft, verified)
        publish(accepted.new_lens_B)
        self.target.commit(batch, accepted)
        return rounds.result(batch, accepted, verified)

    def _idle(self, publish: Callable[[torch.Tensor], None]) -> Any:
        result = rounds.idle_result(self.device, self.block_size)
        publish(result.new_seq_lens)
        return result


def _make_acceptor(ops: Any, buffers: Buffers) -> Any:
    acceptor = RejectionAcceptor(MatchAcceptor(ops, buffers))
    if SIMULATE_ACC_LEN <= 0:
        return acceptor
    if SIMULATE_ACC_TOKEN_MODE not in ("fixed", "real-draft-token"):
        raise ValueError(
            f"SGLANG_SIMULATE_ACC_TOKEN_MODE: expected fixed or real-draft-token, got {SIMULATE_ACC_TOKEN_MODE!r}; "
            "unset it for fixed."
        )
    logger.warning("SGLANG_SIMULATE_ACC_LEN=%s forces acceptance lengths: the output is meaningless.", SIMULATE_ACC_LEN)
    next_length = partial(sample_simulated_acc_len, SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD)
    return ForcedAcceptor(acceptor, next_length, keep_drafts=SIMULATE_ACC_TOKEN_MODE == "real-draft-token")
