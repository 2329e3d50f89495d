"""From SGLang's batch to a `Round` and a `Block`, and from `Accepted` back to SGLang's result."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.utils.common import async_h2d

from sglang_dflash.draft.block import BlockLayout
from sglang_dflash.records import Accepted, Block, Round, Verified


def read(batch: Any, block_size: int, *, draws: bool) -> Round:
    """The round that the scheduler hands over; its temperatures only for a proposer that draws."""
    draft_input = batch.spec_info
    assert isinstance(draft_input, DFlashDraftInputV2), f"a decode batch carries {type(draft_input).__name__}"
    if batch.seq_lens_cpu is not None:
        bound_cpu_B = batch.seq_lens_cpu + block_size
        bound_sum = int(bound_cpu_B.sum())
    else:
        # Lengths stay on the device (their backend plans there): the slots reserved for this round bound them.
        bound_cpu_B, bound_sum = draft_input.nxt_kv_lens_cpu, int(draft_input.nxt_kv_lens_sum)
    return Round(
        seq_lens_B=batch.seq_lens,
        rows_B=batch.req_pool_indices,
        anchor_B=draft_input.bonus_tokens,
        seq_lens_bound_cpu_B=bound_cpu_B,
        seq_lens_bound_sum=bound_sum,
        rids=tuple(req.rid for req in batch.reqs),
        temperature_B=_temperature(batch.sampling_info) if draws else None,
    )


def _temperature(info: Any) -> torch.Tensor | None:
    if info.is_all_greedy or info.sampling_seed is not None:
        return None
    # SGLang makes a greedy request one of temperature 1 and top-k 1.
    return torch.where(info.top_ks == 1, 0.0, info.temperatures[:, 0])


def blocks(round_: Round, layout: BlockLayout, translator: Any) -> Block:
    """The round's blocks, which are laid out, with SGLang's plan of their cache slots."""
    ids_BK, positions_BK, slots_BK = layout.blocks(round_.num_requests)
    plan = translator.plan(
        req_pool_indices=round_.rows_B,
        seq_lens=round_.seq_lens_B,
        seq_lens_cpu=round_.seq_lens_bound_cpu_B,
        write_virtual=slots_BK.view(-1),
        read_extent=ids_BK.shape[1],
    )
    return Block(ids_BK, positions_BK, slots_BK, plan)


def prompt_positions(batch: Any, device: torch.device) -> torch.Tensor:
    """Absolute positions (N,) int64 of a prefill batch's tokens: each request extends its cached prefix."""
    spans = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    positions = chain.from_iterable(range(prefix, prefix + length) for prefix, length in spans)
    return async_h2d(list(positions), dtype=torch.int64, device=device)


def next_input(bonus_B: torch.Tensor, new_lens_B: torch.Tensor) -> DFlashDraftInputV2:
    """What the next round needs: the anchors, and the lengths of the cached prefixes."""
    return make_draft_input_v2(bonus_tokens=bonus_B, new_seq_lens=new_lens_B)


def result(batch: Any, accepted: Accepted, verified: Verified) -> GenerationBatchResult:
    """SGLang's result of a decode round: row i of the flat tokens holds commit_B[i] tokens and padding."""
    forward = verified.host_result
    if batch.return_logprob:
        compute_spec_logprobs(batch, forward.logits_output, accepted.tokens_BW.reshape(-1), chain_stride=verified.width)
    # The scheduler holds a result for a round more, and reads no logits of it.
    forward.logits_output.next_token_logits = None
    return GenerationBatchResult(
        logits_output=forward.logits_output,
        next_token_ids=accepted.tokens_BW.reshape(-1),
        accept_lens=accepted.commit_B,
        can_run_cuda_graph=forward.can_run_cuda_graph,
        next_draft_input=next_input(accepted.bonus_B, accepted.new_lens_B),
        speculative_num_draft_tokens=verified.width,
        new_seq_lens=accepted.new_lens_B,
        routed_experts_output=forward.routed_experts_output,
        indexer_topk_output=forward.indexer_topk_output,
    )


def idle_result(device: torch.device, width: int) -> GenerationBatchResult:
    """The result of a round without requests."""
    next_draft_input = DFlashDraftInputV2.create_idle_input(device=device)
    return GenerationBatchResult(
        next_token_ids=next_draft_input.bonus_tokens,
        accept_lens=torch.empty(0, dtype=torch.int32, device=device),
        next_draft_input=next_draft_input,
        speculative_num_draft_tokens=width,
        new_seq_lens=next_draft_input.new_seq_lens,
    )
