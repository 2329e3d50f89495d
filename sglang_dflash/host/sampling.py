"""The target's own token after every token of a verified block, chosen as plain decoding chooses it.

A block's rows are the target's logits after the anchor and after each draft. SGLang's sampler takes one row a request;
here each request's parameters stand for all of its rows. Penalties, grammar masks, bias and custom logit processors are
in the logits already (`target_model`). Where a request is greedy the token is the argmax; where it samples it is a draw
from the distribution of plain decoding (temperature, top-k, top-p, min-p), and where SGLang seeds its draws
(--enable-deterministic-inference) the very same draw: that noise depends on seed and position alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

# Fields of SGLang's SamplingBatchInfo with an entry a request that the sampler reads.
_PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


def keep_greedy(sampler: Any) -> None:
    """Let SGLang's sampler give greedy requests the argmax beside requests that sample, as it does where none samples.

    It draws from what top-k 1 leaves of the probabilities, and of equal ones that is all: with logits of 16 bits a
    greedy answer would change from run to run. Where it applies custom logit processors itself it has its way.
    """
    original = sampler.forward

    def forward(output: Any, info: Any, *args: Any, **options: Any) -> torch.Tensor:
        if info.is_all_greedy or not info.is_any_greedy or info.has_custom_logit_processor:
            return original(output, info, *args, **options)
        choices_N = output.next_token_logits.argmax(dim=-1)  # before they are overwritten
        tokens_N = original(output, info, *args, **options)
        return torch.where(info.top_ks == 1, choices_N.to(tokens_N.dtype), tokens_N)

    sampler.forward = forward


def add_bias(info: Any, logits_BWV: torch.Tensor) -> None:
    """Add each request's logit bias to its rows."""
    if info.logit_bias is not None:
        logits_BWV.add_(info.logit_bias[:, None])


def choose(
    runner: Any, info: Any, logits_NV: torch.Tensor, positions_BW: torch.Tensor, *, keep_logits: bool
) -> torch.Tensor:
    """The chosen tokens, int64 (B, W).

    Args:
        runner: SGLang's model runner of the target, whose sampler it is.
        info: SGLang's SamplingBatchInfo of the B requests.
        logits_NV: float32, row i * W + j after token j of request i's block; sampling overwrites it.
        positions_BW: int64, of the block's tokens.
        keep_logits: leave `logits_NV` as it is.
    """
    num_requests, width = positions_BW.shape
    if info.is_all_greedy:
        # The same argmax over the same float32 logits as SGLang's sampler: ties fall on the same token.
        return torch.argmax(logits_NV, dim=-1).view(num_requests, width)
    output = LogitsProcessorOutput(next_token_logits=logits_NV.clone() if keep_logits else logits_NV)
    tokens_N = runner.sampler(output, for_rows(info, width), False, [], [], positions_BW.reshape(-1))
    return tokens_N.long().view(num_requests, width)


def distribution(runner: Any, info: Any, logits_NV: torch.Tensor, positions_BW: torch.Tensor) -> torch.Tensor:
    """The distribution (B, W, V), float32, that `choose` would draw each token from; a greedy request's is all on one.

    Arguments as of `choose`; `logits_NV` stays. What SGLang's filters leave of the probabilities, by its own kernels
    in its own order, is what its sampler reports for requests that ask for their sampling masks: here all rows do.
    """
    rows = for_rows(info, positions_BW.shape[1])
    p_NV = torch.softmax(logits_NV / rows.temperatures, dim=-1)
    if info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling:
        rows.sampling_mask_batch_indices = torch.arange(logits_NV.shape[0], device=logits_NV.device)
        _, left = runner.sampler._sample_from_probs(p_NV, rows, positions_BW.reshape(-1), False)
        p_NV = left.weights
        if left.token_ids is not None:
            p_NV = torch.zeros_like(p_NV).scatter_(1, left.token_ids.long(), p_NV)
    p_NV.div_(p_NV.sum(dim=-1, keepdim=True))
    if info.is_any_greedy:
        # Ties fall where the argmax has them.
        greedy_N1, choices_N1 = (rows.top_ks == 1)[:, None], logits_NV.argmax(dim=-1, keepdim=True)
        p_NV.masked_fill_(greedy_N1, 0.0).scatter_(1, choices_N1, p_NV.gather(1, choices_N1).where(~greedy_N1, 1.0))
    return p_NV.view(*positions_BW.shape, -1)


def for_rows(info: Any, width: int) -> Any:
    """`info` with every request's parameters repeated for the `width` rows of its block."""
    values = {name: getattr(info, name) for name in _PER_REQUEST}
    repeated = {name: v.repeat_interleave(width, dim=0) for name, v in values.items() if v is not None}
    # These stand in the logits already; the rest is state of requests that `requests.refusal` refuses.
    done = dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "logit_bias", "penalizer_orchestrator"))
    return dataclasses.replace(info, **repeated, **done, has_custom_logit_processor=False)
