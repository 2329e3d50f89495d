"""Grammars (JSON schema, regex, EBNF, structural tags) inside a block: each row sees the drafts before it.

SGLang walks a request's grammar along its block on the host: row j gets the mask of the tokens that may follow token j;
a draft that the grammar forbids ends the walk, and with its row masked it is not accepted. What was committed moves the
grammar on: in SGLang's processing of the result, or, with overlapped scheduling, in the next round before its walk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask


def start_copy(batch: Any, tokens_BW: torch.Tensor) -> GrammarTree | None:
    """Start to copy the blocks to the host, before the target's pass hides the wait; None without a grammar."""
    return GrammarTree.from_linear_chain(tokens_BW) if batch.has_grammar else None


def mask(batch: Any, tree: GrammarTree | None, advance: Callable[[], None] | None, logits_NV: torch.Tensor) -> None:
    """Mask the logits after each token of the blocks, in place.

    Args:
        tree: of `start_copy`.
        advance: moves the grammars over what the round before committed, where SGLang has not done so yet.
        logits_NV: float32, row i * W + j after token j of request i's block.
    """
    if tree is None:
        return
    built = build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=tree,
        sampling_info=batch.sampling_info,
        device=logits_NV.device,
        barrier=advance,
    )
    if built is not None:
        built.apply(logits_NV)
