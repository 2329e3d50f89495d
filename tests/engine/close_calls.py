"""Whether answers differ by a close call alone: a token that float32 sums in another order would have chosen too.

A verified block and a decoded token differ by float32's last bits (logprobs by about 1e-5 in the tiny models). Where
two tokens' scores are closer than that, either is right, and all that follows is another answer.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.cpu.ops import murmur_hash32_cpu
from tests.engine.cases import VOCAB_SIZE, Case
from tests.engine.pairs import Pair

JITTER = 2e-5  # of logprobs
NUM_TRIALS = 400
SGLANG_SEED = 42  # of a request without one


def only(pair: Pair, case: Case, expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> bool:
    """Whether every answer that differs leaves plain decoding's at a close call. Asks plain decoding once more."""
    if len(expected) != len(got) or "n" in case.sampling[0]:
        return False
    request = {"return_logprob": True, "top_logprobs_num": VOCAB_SIZE, "logprob_start_len": -1}
    whole = pair.plain.ask({"input_ids": case.prompts, "sampling_params": case.sampling, **request})
    parted = False
    for params, one, other, full in zip(case.sampling, expected, got, whole, strict=True):
        left, right = one["output_ids"], other["output_ids"]
        if left == right:
            continue
        at = next((i for i, pair_ in enumerate(zip(left, right)) if pair_[0] != pair_[1]), None)
        if at is None or full["output_ids"][: at + 1] != left[: at + 1]:
            return False
        top = full["meta_info"]["output_top_logprobs"][at]
        logprobs_V = torch.full((VOCAB_SIZE,), float("-inf"), dtype=torch.float64)
        for logprob, token, _ in top:
            logprobs_V[token] = float("-inf") if logprob is None else logprob
        # SGLang's noise is that of the position before the token's own.
        position = full["meta_info"]["prompt_tokens"] + at - 1
        drawn = [draw(logprobs_V, params, position, jitter) for jitter in (0.0, *[JITTER] * NUM_TRIALS)]
        if drawn[0] != left[at] and left[at] not in drawn:
            return False  # not understood
        if right[at] not in drawn:
            return False
        parted = True
    return parted


def draw(logprobs_V: torch.Tensor, params: dict[str, Any], position: int, jitter: float) -> int:
    """SGLang's seeded draw from logprobs (temperature, penalties and bias in them), after noise of this size."""
    logprobs_V = logprobs_V + jitter * torch.randn(VOCAB_SIZE, dtype=torch.float64)
    if params["temperature"] == 0:
        return int(logprobs_V.argmax())
    tokens_V = torch.arange(VOCAB_SIZE)
    if "top_k" in params or "top_p" in params:
        logprobs_V, tokens_V = logprobs_V.sort(descending=True)
        probs_V = logprobs_V.exp()
        before_V = probs_V.cumsum(0) - probs_V
        out_V = (torch.arange(VOCAB_SIZE) >= params.get("top_k", VOCAB_SIZE)) | (before_V > params.get("top_p", 1.0))
        logprobs_V = logprobs_V.masked_fill(out_V, float("-inf"))
    seed = torch.tensor([params.get("sampling_seed", SGLANG_SEED)])
    uniform_V = murmur_hash32_cpu(seed, torch.tensor([position]), torch.arange(VOCAB_SIZE))[0].double() / (2**32 - 1)
    noise_V = -torch.log(-torch.log(uniform_V.clamp(min=1e-300)).clamp(max=-(2.0**-32)))
    return int(tokens_V[(logprobs_V + noise_V).argmax()])
