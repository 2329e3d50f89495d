"""Penalties of a block's rows against SGLang's own penalizers, fed one token a step: the same float32 bits."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.cpu import bootstrap

if bootstrap.wanted():
    bootstrap.install()

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.host.penalties import Penalties

CPU = torch.device("cpu")
V, W = 23, 5
PROMPT_LEN = 4
# What each request of a batch asks for; the third nothing.
OPTIONS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.1},
    {"presence_penalty": -0.7, "min_new_tokens": 6},
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": -0.3, "presence_penalty": 0.2, "repetition_penalty": 0.8, "min_new_tokens": 3},
    {"min_new_tokens": 9, "stop_token_ids": [11]},
]
PENALIZERS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}


def request(options: dict[str, Any], said: list[int] | None = None) -> Req:
    req = Req("r", "", array("q", range(PROMPT_LEN)), SamplingParams(**options), eos_token_ids={3, V})
    req.tokenizer = SimpleNamespace(additional_stop_token_ids={5}, eos_token_id=2)
    req.output_ids = array("q", said or [])
    return req


class Batch(SimpleNamespace):
    """Of SGLang's scheduler: its penalizers hold a weak reference to it."""

    __slots__ = ("__weakref__",)


def naive(req: Req, said: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    """What SGLang's sampler makes of the logits after these tokens of the answer."""
    batch = Batch(reqs=[req], device=CPU)
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(V, batch, PENALIZERS)
    for token in said:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    logits_1V = logits_V[None].clone()
    if orchestrator.is_required:
        additive_1V = torch.zeros(1, V)
        orchestrator.accumulate_additive_penalties(additive_1V)
        logits_1V.add_(additive_1V)
        scaling_1V = orchestrator.accumulate_scaling_penalties()
        if scaling_1V is not None:
            with torch.compiler.set_stance("force_eager"):  # it compiles itself
                apply_scaling_penalties(logits_1V, scaling_1V)
    return logits_1V[0]


def prefill(penalties: Penalties, reqs: list[Req], firsts: list[int]) -> Any:
    """SGLang's sampling info as it stood before the prefill's sampling."""
    lens = torch.tensor([PROMPT_LEN + len(req.output_ids) for req in reqs])
    info = SimpleNamespace(
        acc_additive_penalties=torch.zeros(len(reqs), V), acc_scaling_penalties=torch.ones(len(reqs), V)
    )
    penalties.begin(SimpleNamespace(reqs=reqs, seq_lens=lens, sampling_info=info))
    penalties.add(reqs, torch.tensor(firsts)[:, None], None)
    return info


def check_rounds(penalties: Penalties, reqs: list[Req], said: list[list[int]], rng: random.Random) -> None:
    """Rounds of random blocks, of which random parts are committed; `said` holds all tokens, the anchors last."""
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    for _ in range(4):
        blocks = [[answer[-1], *(rng.randrange(V) for _ in range(W - 1))] for answer in said]
        positions_BW = torch.tensor([[PROMPT_LEN + len(answer) - 1 + j for j in range(W)] for answer in said])
        logits_BWV = torch.randn(len(reqs), W, V, generator=generator)
        got_BWV = logits_BWV.clone()
        penalties.apply(reqs, torch.tensor(blocks), positions_BW, got_BWV)
        for i, req in enumerate(reqs):
            for j in range(W):
                assert torch.equal(got_BWV[i, j], naive(req, said[i] + blocks[i][1 : j + 1], logits_BWV[i, j])), (i, j)
        commits = [rng.randint(1, W) for _ in reqs]
        tokens = [[rng.randrange(V) if j < n else 0 for j in range(W)] for n in commits]
        penalties.add(reqs, torch.tensor(tokens), torch.tensor(commits, dtype=torch.int32))
        for answer, row, n in zip(said, tokens, commits):
            answer += row[:n]


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_penalised_as_plain_decoding_would(seed: int) -> None:
    rng = random.Random(seed)
    penalties, reqs = Penalties(V, CPU), [request(options) for options in OPTIONS]
    firsts = [rng.randrange(V) for _ in reqs]
    prefill(penalties, reqs, firsts)
    said = [[first] for first in firsts]
    check_rounds(penalties, reqs, said, rng)
    # Others join, in another order: an output belongs to its request, not to a row of the batch.
    joined = [request(OPTIONS[4]), request(OPTIONS[0])]
    prefill(penalties, joined, [7, 7])
    order = [6, 3, 0, 7, 5, 1]
    reqs, said = reqs + joined, [*said, [7], [7]]
    check_rounds(penalties, [reqs[i] for i in order], [said[i] for i in order], rng)


def test_a_retracted_request_goes_on_with_what_it_has_said() -> None:
    said = [3, 3, 8, 1, 3]
    penalties, reqs = Penalties(V, CPU), [request({}, [4]), *(request(options, said) for options in OPTIONS)]
    prefill(penalties, reqs, [1] * len(reqs))
    info = prefill(penalties, reqs, [9] * len(reqs))  # once more, as the next chunk of a prompt: it begins anew
    logits_V = torch.linspace(-2, 2, V)
    for i, req in enumerate(reqs[1:], 1):
        logits = logits_V + info.acc_additive_penalties[i]
        scaled = torch.where(logits < 0, logits * info.acc_scaling_penalties[i], logits / info.acc_scaling_penalties[i])
        # The repeated token's frequency penalty is added at once here, and three times there.
        torch.testing.assert_close(scaled, naive(req, said, logits_V), atol=1e-6, rtol=0)
    logits_BWV = torch.zeros(len(reqs), 1, V)
    penalties.apply(reqs, torch.tensor([[9]] * len(reqs)), torch.full((len(reqs), 1), PROMPT_LEN + 5), logits_BWV)
    for i, req in enumerate(reqs[1:], 1):
        torch.testing.assert_close(logits_BWV[i, 0], naive(req, [*said, 9], torch.zeros(V)), atol=1e-6, rtol=0)


def test_a_batch_that_asks_for_nothing_costs_nothing() -> None:
    penalties, reqs = Penalties(V, CPU), [request({}), request({"temperature": 0.5})]
    prefill(penalties, reqs, [1, 2])
    logits_BWV = torch.randn(2, 1, V)
    before = logits_BWV.clone()
    penalties.apply(reqs, torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64), logits_BWV)
    assert torch.equal(logits_BWV, before)
    assert len(penalties._outputs) == 0


@pytest.mark.parametrize("gone", [{"finished_reason": "any"}, {"is_retracted": True}], ids=["finished", "retracted"])
def test_the_next_prefill_lets_go_of_requests_that_are_kept_elsewhere(gone: dict[str, Any]) -> None:
    """Sessions keep a finished request, and its output would hold the rows of all that ran with it."""
    penalties, reqs = Penalties(V, CPU), [request(OPTIONS[0]), request(OPTIONS[3])]
    prefill(penalties, reqs, [1, 2])
    for name, value in gone.items():
        setattr(reqs[0], name, value)
    prefill(penalties, [request(OPTIONS[1])], [3])
    assert reqs[0] not in penalties._outputs
    check_rounds(penalties, reqs[1:], [[2]], random.Random(0))


def test_an_output_goes_with_its_request() -> None:
    penalties, reqs = Penalties(V, CPU), [request(OPTIONS[0])]
    prefill(penalties, reqs, [1])
    assert len(penalties._outputs) == 1
    reqs.clear()
    assert len(penalties._outputs) == 0
