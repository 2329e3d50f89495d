"""A round's two passes as two graph launches that read this package's own buffers.

SGLang captures the passes of drafter and target. To replay one it makes a record of the batch, copies it into the
graph's inputs and prepares attention's metadata: on the host and in every round that is more time than a small target's
pass takes. Here the graphs begin with that work. They read three numbers of a request; the drafter's lays the blocks
out, the target's takes the tokens where the drafter's left them, and what a pass costs the host is its launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.debug_utils.dumper import dumper
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded as counts_real_tokens
from sglang.srt.runtime_context import get_exec
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from sglang.srt.utils.device_timer import device_timer_ctx

from sglang_dflash.draft.block import BlockLayout
from sglang_dflash.records import Round

# Token ids, positions and slots, each int64 (B, K).
Blocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Inputs of SGLang's graphs that a pass over blocks has. The last three are read by models of other kinds alone.
_INPUTS = {"input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu"}
_UNREAD = {"mrope_positions", "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"}


def serve(*runners: Any) -> bool:
    """Whether these models' graphs may be replayed so: nothing that SGLang does around a replay is wanted.

    Their attention has to be planned on the device (`host.attention`).
    """
    execution = get_exec()
    return (
        execution.graph.cuda_graph_config.decode.backend == Backend.FULL
        and not execution.overlap.enable_two_batch_overlap
        and execution.moe.expert_distribution_recorder_mode is None
        and get_moe_a2a_backend().is_none()
        and not counts_real_tokens()
        and get_global_experts_capturer() is None
        and get_global_indexer_capturer() is None
        and not dumper.may_enable
        and not any(map(_watched, runners))
    )


def _watched(runner: Any) -> bool:
    return bool(
        runner.canary_manager is not None
        or runner.msprobe_debugger is not None
        or runner.model_config.model_is_mrope
        or runner.ngram_embedding_manager.enabled
        or hasattr(runner.model, "prepare_for_forward")
    )


class RoundGraphs:
    """The captured passes of drafter and target, and what they read."""

    def __init__(self, drafter: Any, target: Any, layout: BlockLayout, drafted_BK: torch.Tensor) -> None:
        """Of SGLang's two model runners, before their graphs are captured.

        Args:
            layout: lays blocks out, in static buffers.
            drafted_BK: static; where the proposer's `score` leaves the blocks to verify.
        """
        self._drafted_BK = drafted_BK
        # Of a padded row all are 0: row 0 of SGLang's request-to-token table is nobody's, and neither is slot 0.
        self._layout = layout
        self._inputs_3B = torch.zeros((3, layout.max_requests), dtype=torch.int64, device=drafted_BK.device)
        lens_B, rows_B = self._inputs_3B[1:]
        self._draft = _Passes(drafter, lambda n: layout.fill(*self._inputs_3B[:, :n]), lens_B, rows_B, self._clear)
        self._verify = _Passes(target, lambda n: (drafted_BK[:n], *layout.blocks(n)[1:]), lens_B, rows_B, self._clear)

    def _clear(self) -> None:
        """Make all rows padding."""
        self._inputs_3B.zero_()
        self._layout.fill(*self._inputs_3B)

    def check(self) -> None:
        """After both are captured: the target's graphs read what the drafter's have laid out."""
        sizes = [passes.graphs.capture_bs for passes in (self._draft, self._verify)]
        if sizes[0] != sizes[1]:
            raise RuntimeError(f"graphs of drafter and target: expected the same batch sizes, got {sizes}")

    def hold(self, num_requests: int) -> bool:
        """Whether graphs are large enough for a round."""
        return num_requests <= self._draft.graphs.max_bs

    def draft(self, round_: Round) -> None:
        """Lay the round's blocks out and draft them."""
        num_requests = round_.num_requests
        size = self._draft.size(num_requests)
        inputs = self._inputs_3B[:, :num_requests].unbind()
        torch._foreach_copy_(inputs, (round_.anchor_B, round_.seq_lens_B, round_.rows_B))
        if num_requests < size:
            self._inputs_3B[:, num_requests:size].zero_()
        self._draft.replay(size)

    def verify(self, tokens_BK: torch.Tensor) -> LogitsProcessorOutput:
        """The target's pass over the blocks that `draft` laid out, with these tokens in them."""
        num_requests, num_tokens = tokens_BK.shape[0], tokens_BK.numel()
        if tokens_BK.data_ptr() != self._drafted_BK.data_ptr():
            self._drafted_BK[:num_requests].copy_(tokens_BK)
        output = self._verify.replay(self._verify.size(num_requests))
        return dataclasses.replace(
            output,
            next_token_logits=output.next_token_logits[:num_tokens],
            hidden_states=output.hidden_states[:num_tokens],
        )


class _Passes:
    """One model's captured passes over blocks."""

    def __init__(
        self,
        runner: Any,
        blocks: Callable[[int], Blocks],
        lens_B: torch.Tensor,
        rows_B: torch.Tensor,
        clear: Callable[[], None],
    ) -> None:
        """Of a runner of SGLang's.

        Args:
            blocks: n static blocks; may launch what fills them.
            clear: make all rows padding.
        """
        self._runner = runner
        self._blocks = blocks
        self._lens_B = lens_B
        self._rows_B = rows_B
        self._clear = clear
        runner.capture_head_hooks.append(self._begin)

    @property
    def graphs(self) -> Any:
        """SGLang's runner of the graphs; it makes a new one where it captures anew."""
        return self._runner.decode_cuda_graph_runner

    def _begin(self, graphs: Any, forward_batch: Any) -> None:
        """What a graph begins with. The layers after it read the blocks where they are laid out."""
        others = set(graphs.buffer_registry.slot_names()) - _INPUTS - _UNREAD
        assert not others, f"graphs of {type(self._runner.model).__name__} have inputs that no round fills: {others}"
        if not torch.cuda.is_current_stream_capturing():
            # SGLang runs a pass before it captures one, and captures anew in a server that has served: the slots of its
            # last round may be others' by now.
            self._clear()
        size = forward_batch.batch_size
        ids_BK, positions_BK, slots_BK = self._blocks(size)
        forward_batch.input_ids = ids_BK.view(-1)
        forward_batch.positions = positions_BK.view(-1)
        forward_batch.out_cache_loc = slots_BK.view(-1)
        forward_batch.seq_lens = self._lens_B[:size]
        forward_batch.req_pool_indices = self._rows_B[:size]
        graphs.attn_backend.init_forward_metadata_out_graph(forward_batch)

    def size(self, num_requests: int) -> int:
        """Rows of the smallest graph that holds so many, padded ones among them."""
        return next(size for size in self.graphs.capture_bs if size >= num_requests)

    def replay(self, size: int) -> Any:
        """SGLang's output of the pass of this many rows."""
        graphs = self.graphs
        with device_timer_ctx(self._runner.device_timer, "target_verify"):
            output = graphs.backend.replay(graphs._make_graph_key(size), None)
        # Where in the graph the last table is read that the scheduler may write next: it need not wait for the whole.
        mode = ForwardMode.TARGET_VERIFY
        if graphs._resolve_shared_read_ends(graphs.attn_backend, mode) is SharedReadEnds.IN_REPLAY:
            graphs._publish_read_done(in_graph=True)
        return output
