"""One draw a row, in proportion to weights: exact frequencies, shapes, and rows that leave one choice."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.draws import draw

NUM_DRAWS = 200_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frequencies_are_the_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights_V = torch.tensor([3.0, 0.0, 1.0, 0.5, 5.5], dtype=dtype)
    counts_V = torch.bincount(draw(weights_V.expand(NUM_DRAWS, -1)), minlength=5)
    p_V = weights_V / weights_V.sum()
    # Five standard deviations.
    allowed_V = 5 * (p_V * (1 - p_V) / NUM_DRAWS).sqrt()
    assert ((counts_V / NUM_DRAWS - p_V).abs() <= allowed_V).all(), counts_V


def test_the_draws_are_those_of_multinomial() -> None:
    weights_NV = torch.rand(64, 300)
    torch.manual_seed(1)
    drawn_N = draw(weights_NV)
    torch.manual_seed(1)
    assert torch.equal(drawn_N, torch.multinomial(weights_NV, 1)[:, 0])


def test_all_dimensions_but_the_last_are_rows() -> None:
    weights = torch.zeros(2, 3, 7)
    choices = torch.randint(7, (2, 3))
    weights.scatter_(2, choices[..., None], 1e-30)
    assert torch.equal(draw(weights), choices)
    assert draw(weights[:0]).shape == (0, 3)


def test_an_exponential_of_zero_draws_nothing_that_has_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "exponential_", torch.Tensor.zero_)
    assert draw(torch.tensor([0.0, 2.0, 0.0])).item() == 1
