"""DFlash generation on Transformers, one request at a time: prefill, then rounds of draft, verify, accept, inject.

    prompt -> target -> first token (the anchor) and the prompt's features -> drafter's context
    round:   drafter fills [anchor, mask, ..., mask] in one pass
             target reads [anchor, draft, ..., draft] in one pass and says its own token after each
             drafts are kept as long as they equal the target's tokens; the target's next token is the new anchor
             features of the kept tokens -> drafter's context

A round costs one pass of each model and commits between 1 and K tokens. The output is the target's own, whatever the
drafter says: a poor drafter costs time only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from sglang_dflash.reference.drafter import Drafter


@dataclass
class SpecOutput:
    """What `spec_generate` returns."""

    output_ids: torch.Tensor  # int64, (1, prompt + new tokens), as Transformers' generate gives it
    num_prompt_tokens: int
    # Tokens committed by each round, bonus token included, before the cut at a stop token or at max_new_tokens.
    acceptance_lengths: list[int] = field(default_factory=list)

    @property
    def num_rounds(self) -> int:
        return len(self.acceptance_lengths)

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens a round (tau, bonus token included); 0.0 where the first token ended the output."""
        return sum(self.acceptance_lengths) / self.num_rounds if self.num_rounds else 0.0


@torch.inference_mode()
def spec_generate(
    target: Any,
    drafter: Drafter,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    block_size: int | None = None,
    temperature: float = 0.0,
    stop_token_ids: Collection[int] | None = None,
    generator: torch.Generator | None = None,
) -> SpecOutput:
    """Continue `input_ids` (int64, (1, tokens)) by at most `max_new_tokens` tokens, a stop token included.

    `target` is a Llama or Qwen3 of Transformers (AutoModelForCausalLM). `block_size` None takes the trained one.
    Temperature 0 gives the target's greedy output; above 0 the output is distributed as the target's samples at that
    temperature. Exact up to rounding: a pass over several tokens may round differently from single steps.
    """
    block_size = drafter.config.block_size if block_size is None else block_size
    _check(target, drafter, input_ids, max_new_tokens, block_size, temperature)
    stop, context = set(stop_token_ids or ()), drafter.new_context()
    cache = DynamicCache()  # of full length in every layer: a cache that forgets cannot be cropped

    logits_NV, features_ND = _target_forward(target, drafter, input_ids, cache, num_logits=1)
    drafter.inject(features_ND, context)
    new_ids = _choose(logits_NV, temperature, generator).tolist()
    result = SpecOutput(input_ids, input_ids.shape[1])

    while len(new_ids) < max_new_tokens and not stop & set(new_ids):
        anchor = new_ids[-1]
        _, draft_logits_KV = drafter.draft_logits(target, anchor, context, block_size)
        drafts = draft_logits_KV[1:].argmax(dim=-1)

        block = torch.cat((input_ids.new_tensor([anchor]), drafts))[None]
        logits_KV, features_KD = _target_forward(target, drafter, block, cache, num_logits=block_size)
        choices = _choose(logits_KV, temperature, generator)

        num_accepted = count_accepted(drafts, choices)
        cache.crop(num_accepted - drafts.shape[0])  # a negative count: the rejected drafts go
        drafter.inject(features_KD[: num_accepted + 1], context)
        new_ids += choices[: num_accepted + 1].tolist()
        result.acceptance_lengths.append(num_accepted + 1)

    new_ids = _cut(new_ids[:max_new_tokens], stop)
    result.output_ids = torch.cat((input_ids, input_ids.new_tensor([new_ids])), dim=1)
    return result


def count_accepted(drafts: torch.Tensor, choices: torch.Tensor) -> int:
    """How many leading drafts equal the target's own choices; `choices` has one more, the bonus token's.

    With choices drawn at random this accepts draft x with the target's probability p(x), and on a rejection the
    target's choice is distributed as p without x: speculative sampling for a drafter that is certain of its draft.
    """
    return int((drafts == choices[:-1]).cumprod(dim=0).sum())


def _target_forward(
    target: Any, drafter: Drafter, ids: torch.Tensor, cache: DynamicCache, num_logits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the last `num_logits` tokens and features (N, D) of all N tokens, which follow the cache."""
    out = target(ids, past_key_values=cache, use_cache=True, output_hidden_states=True, logits_to_keep=num_logits)
    # hidden_states[0] is the embedding's output, so layer i's is hidden_states[i + 1].
    taps = [out.hidden_states[i + 1][0] for i in drafter.config.target_layer_ids]
    return out.logits[0], torch.cat(taps, dim=-1)


def _choose(logits_NV: torch.Tensor, temperature: float, generator: torch.Generator | None) -> torch.Tensor:
    """The target's own token after each of N tokens, (N,)."""
    if temperature == 0:
        return logits_NV.argmax(dim=-1)
    probs_NV = torch.softmax(logits_NV.float() / temperature, dim=-1)
    return torch.multinomial(probs_NV, 1, generator=generator)[:, 0]


def _cut(ids: list[int], stop: set[int]) -> list[int]:
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in stop), ids)


def _check(
    target: Any,
    drafter: Drafter,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    block_size: int,
    temperature: float,
) -> None:
    """Refuse what would give a wrong answer."""
    trained, taps = drafter.config.block_size, drafter.config.target_layer_ids
    last_tap = target.config.num_hidden_layers - 2  # the last layer's output comes back after the final norm
    hidden, drafter_hidden = target.config.hidden_size, drafter.config.hidden_size
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"expected input_ids of shape (1, tokens), got {tuple(input_ids.shape)}; pass one prompt")
    if not 2 <= block_size <= trained:
        raise ValueError(f"expected a block of 2 to {trained}, the trained width, got {block_size}; narrow it")
    if max_new_tokens < 1:
        raise ValueError(f"expected max_new_tokens of at least 1, got {max_new_tokens}; raise it")
    if temperature < 0:
        raise ValueError(f"expected a temperature of at least 0, got {temperature}; use 0 for greedy")
    if drafter_hidden != hidden:
        raise ValueError(f"expected hidden size {hidden}, got {drafter_hidden}; use the drafter of this target")
    if not all(0 <= tap <= last_tap for tap in taps):
        raise ValueError(f"expected taps 0 to {last_tap}, got {taps}; use a drafter trained on such layers")
