"""A whole draft as one graph launch: blocks laid out, attention's metadata, the drafter's layers, scores.

SGLang captures a graph of the drafter's layers and fills the graph's inputs anew for every pass, from a record of the
batch that the host makes for it. For a small target that is a fifth of the host's round. Here all of it stands inside
the graph, which reads three numbers of a request: what a draft costs the host is a copy and a launch.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded as counts_real_tokens
from sglang.srt.runtime_context import get_disagg, get_exec
from sglang.srt.utils.device_timer import device_timer_ctx

from sglang_dflash.draft.block import BlockLayout
from sglang_dflash.records import Round


def serve() -> bool:
    """Whether this server's settings leave the drafter's replays to `DraftGraphs`: full graphs, one stream, one batch.

    A count of real tokens, which experts in parallel want, is an input that these graphs do not have.
    """
    return (
        get_exec().graph.cuda_graph_config.decode.backend == Backend.FULL
        and not get_exec().overlap.enable_two_batch_overlap
        and not get_disagg().enable_pdmux
        and not counts_real_tokens()
    )


class DraftGraphs:
    """The drafter's captured graphs, and their inputs."""

    def __init__(self, runner: Any, layout: BlockLayout) -> None:
        """Of SGLang's model runner of the drafter, before its graphs are captured."""
        self._runner = runner
        self._layout = layout
        # Of a padded row all are 0: row 0 of SGLang's request-to-token table is for padding, and so is slot 0 in it.
        self._inputs_3B = torch.zeros((3, layout.max_requests), dtype=torch.int64, device=runner.device)
        runner.capture_head_hooks.append(self._begin)

    def _begin(self, graph_runner: Any, forward_batch: Any) -> None:
        """A graph's first kernels. The layers after them read the block where it is laid out."""
        anchor_B, seq_lens_B, rows_B = self._inputs_3B[:, : forward_batch.batch_size]
        ids_BK, positions_BK, slots_BK = self._layout.fill(anchor_B, seq_lens_B, rows_B)
        forward_batch.input_ids = ids_BK.view(-1)
        forward_batch.positions = positions_BK.view(-1)
        forward_batch.out_cache_loc = slots_BK.view(-1)
        forward_batch.seq_lens = seq_lens_B
        forward_batch.req_pool_indices = rows_B
        graph_runner.attn_backend.init_forward_metadata_out_graph(forward_batch)

    def replay(self, round_: Round) -> bool:
        """Draft the round's blocks; False where no graph is large enough for them."""
        graphs, num_requests = self._runner.decode_cuda_graph_runner, round_.num_requests
        size = next((size for size in graphs.capture_bs if size >= num_requests), None)
        if size is None:
            return False
        inputs = self._inputs_3B[:, :num_requests].unbind()
        torch._foreach_copy_(inputs, (round_.anchor_B, round_.seq_lens_B, round_.rows_B))
        if size > num_requests:
            self._inputs_3B[:, num_requests:size].zero_()
        with device_timer_ctx(self._runner.device_timer, "target_verify"):
            graphs.backend.replay(graphs._make_graph_key(size), None)
        return True
