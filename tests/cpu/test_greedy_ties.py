"""A greedy request is given the first of equal logits, whoever is in its batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler

from sglang_dflash.host import sampling
from tests.cpu import sampled_rounds
from tests.cpu.sampled_rounds import Options

TIED = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0])
ROWS, FIRST, LAST = 4, 1, 4


class DrawsTheLast(torch.nn.Module):
    """SGLang's sampler where its draw falls on the last of equal tokens; as there, logits become probabilities."""

    def forward(self, output: Any, info: Any, *args: Any, **options: Any) -> torch.Tensor:
        assert args == (False, [], [], "positions")
        logits_NV = output.next_token_logits
        tokens_N = logits_NV.shape[1] - 1 - logits_NV.flip(1).argmax(dim=1)
        logits_NV[:] = 0.2
        return tokens_N.int()


@pytest.mark.parametrize(
    ("top_ks", "custom", "expected"),
    [
        ([1, 50, 1, 50], False, [FIRST, LAST, FIRST, LAST]),
        ([50, 50, 50, 50], False, [LAST] * 4),
        # SGLang's sampler is greedy itself where all are.
        ([1, 1, 1, 1], False, [LAST] * 4),
        ([1, 50, 1, 50], True, [LAST] * 4),
    ],
)
def test_what_a_sampler_is_overruled_in(top_ks: list[int], custom: bool, expected: list[int]) -> None:
    draws_the_last = DrawsTheLast()
    sampling.keep_greedy(draws_the_last)
    info = SimpleNamespace(
        is_all_greedy=set(top_ks) == {1},
        is_any_greedy=1 in top_ks,
        has_custom_logit_processor=custom,
        top_ks=torch.tensor(top_ks),
    )
    output = SimpleNamespace(next_token_logits=TIED.repeat(ROWS, 1))
    tokens_N = draws_the_last(output, info, False, [], [], "positions")
    assert tokens_N.tolist() == expected
    assert tokens_N.dtype == torch.int32


def test_a_block_of_a_greedy_request_beside_one_that_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """With SGLang's own sampler, all but its draw: the greedy one's tokens are the same, the other's are not."""

    def draw(self: Any, probs_NV: torch.Tensor, info: Any, *args: Any) -> tuple[torch.Tensor, None]:
        likeliest_NV = probs_NV == probs_NV.amax(dim=-1, keepdim=True)
        left_NV = torch.where((info.top_ks == 1)[:, None], likeliest_NV, probs_NV > 0)
        return torch.multinomial(left_NV.float(), 1)[:, 0], None

    monkeypatch.setattr(sampler.Sampler, "_sample_from_probs", draw)
    runner, width = sampled_rounds._runner(), 3
    sampling.keep_greedy(runner.sampler)
    options = [Options(top_k=1), Options(temperature=1.0)]
    info = sampled_rounds.sampling_info(options, torch.arange(2))
    drawn = set()
    for seed in range(20):
        torch.manual_seed(seed)
        logits_NV = TIED.repeat(2 * width, 1)
        tokens_BW = sampling.choose(
            runner, info, logits_NV, torch.zeros(2, width, dtype=torch.int64), keep_logits=False
        )
        assert tokens_BW[0].tolist() == [FIRST] * width
        drawn.update(tokens_BW[1].tolist())
    assert {1, 3, 4} <= drawn
