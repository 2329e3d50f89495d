"""Sampled answers have the target's distribution, whatever is drafted; and a rule that loses it is caught.

200,000 requests a setting; thresholds are quantiles (see `sampled_rounds.Verdict`), seeds are fixed.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.cpu import bootstrap

if bootstrap.wanted():
    bootstrap.install()

from sglang.srt.layers import sampler

from sglang_dflash.records import Accepted
from tests.cpu import sampled_rounds
from tests.cpu.sampled_rounds import (
    Drafter,
    K,
    Options,
    Rule,
    Situation,
    V,
    by_match,
    by_rejection,
    judge,
    logits_after,
    sample,
)

NUM_REQUESTS = 200_000
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
FILTERS = {
    "none": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "top_k-top_p": {"top_k": 4, "top_p": 0.7},
    "top_k-top_p-min_p": {"top_k": 5, "top_p": 0.95, "min_p": 0.1},
    "bias-top_p": {"bias": (2.0, -1.0, 0.0, -50.0, 0.5, 0.0), "top_p": 0.9},
}
# Another table of the same shape: what a drafter that knows little believes.
BELIEF_NV = torch.randn(sampled_rounds._LOGITS_NV.shape, generator=torch.Generator().manual_seed(1))


def _by_token(choose: Drafter) -> Drafter:
    """A drafter out of a choice of the next token (B,), which sees the drafts before it, and its distribution."""

    def drafter(code_B: torch.Tensor, depth_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, beliefs = [], []
        for _ in range(K - 1):
            token_B, q_BV = choose(code_B, depth_B)
            tokens.append(token_B)
            beliefs.append(q_BV)
            code_B, depth_B = code_B * V + token_B, depth_B + 1
        known = [q_BV for q_BV in beliefs if q_BV is not None]
        return torch.stack(tokens, dim=1), torch.stack(known, dim=1) if known else None

    return drafter


def _drawn(logits_NV: torch.Tensor) -> Drafter:
    """Draws from what these rows of logits say after each prefix."""

    def choose(code_B: torch.Tensor, depth_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q_BV = torch.softmax(logits_NV[sampled_rounds.row_of(code_B, depth_B)], dim=-1)
        return torch.multinomial(q_BV, 1)[:, 0], q_BV

    return _by_token(choose)


DRAFTERS: dict[str, Drafter] = {
    "good": _by_token(lambda code, depth: (logits_after(code, depth).argmax(dim=-1), None)),
    "random": _by_token(lambda code, depth: (torch.randint(V, code.shape), None)),
    "adversarial": _by_token(lambda code, depth: (logits_after(code, depth).argmin(dim=-1), None)),
    # By the prefix alone: always the same after the same tokens.
    "prefix": _by_token(lambda code, depth: ((code * 7 + depth * 3 + code // 5) % V, None)),
}
DRAWING: dict[str, Drafter] = {
    "good": _drawn(sampled_rounds._LOGITS_NV),
    "poor": _drawn(BELIEF_NV),
    "adversarial": _drawn(-2 * sampled_rounds._LOGITS_NV),
    "certain": _drawn(40 * BELIEF_NV),
}


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's sampler asks its server's settings for the backend: the CPU's."""
    monkeypatch.setattr(
        sampler, "get_exec", lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    )
    torch.manual_seed(0)


# Every pair of temperature, filter and drafter occurs.
SETTINGS = [
    (temperature, filters, (i + j) % 4)
    for i, temperature in enumerate(TEMPERATURES)
    for j, filters in enumerate(FILTERS)
]


@pytest.mark.parametrize(("temperature", "filters", "drafter"), SETTINGS)
def test_three_tokens_have_the_exact_distribution(temperature: float, filters: str, drafter: int) -> None:
    options = Options(temperature=temperature, **FILTERS[filters])
    for rule, drafters in ((by_match, DRAFTERS), (by_rejection, DRAWING)):
        verdict = judge(sample(rule, list(drafters.values())[drafter], [options], NUM_REQUESTS), options)
        assert verdict.same, (rule.__name__, verdict)


def test_drafts_of_a_token_map_lose_nothing() -> None:
    """Drawn among half of the tokens: the others come from the residual."""
    logits_NV = sampled_rounds._LOGITS_NV.clone()
    logits_NV[:, ::2] = -torch.inf
    verdict = judge(sample(by_rejection, _drawn(logits_NV), [Options()], NUM_REQUESTS), Options())
    assert verdict.same, verdict


def test_rows_of_different_options_in_one_batch() -> None:
    options = [Options(temperature=1.0, top_k=1), *(Options(temperature=1.2, **FILTERS[name]) for name in FILTERS)]
    for rule, drafter in ((by_match, DRAFTERS["good"]), (by_rejection, DRAWING["poor"])):
        said = sample(rule, drafter, options, NUM_REQUESTS)
        for i, own in enumerate(options):
            assert judge(said[i :: len(options)], own).same, (rule.__name__, own)


# -- rules that are not the product's ----------------------------------------------------------------------------------


def probabilities(situation: Situation) -> torch.Tensor:
    """The target's p (B, W, V) of one setting, for rules that work on p."""
    [options] = situation.options
    assert (options.top_k, options.top_p, options.min_p) == (Options.top_k, 1.0, 0.0)
    return torch.softmax((situation.logits_BWV + torch.tensor(options.bias)) / options.temperature, dim=-1)


def commit(situation: Situation, accepted_BK: torch.Tensor, bonus_BW: torch.Tensor) -> Accepted:
    """Commit the leading accepted drafts (bool (B, K-1)) and the bonus token of the column after them."""
    count_B = accepted_BK.long().cumprod(dim=1).sum(dim=1)
    column = torch.arange(K)
    bonus_B = bonus_BW.gather(1, count_B[:, None])[:, 0]
    shifted_BW = torch.cat([situation.draft.tokens_BK[:, 1:], torch.zeros_like(bonus_B)[:, None]], dim=1)
    tokens_BW = torch.where(column == count_B[:, None], bonus_B[:, None], shifted_BW)
    commit_B = (count_B + 1).int()
    return Accepted(commit_B, bonus_B, tokens_BW, situation.round_.seq_lens_B + commit_B)


def draws(p_BWV: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(p_BWV.flatten(0, 1), 1).view(p_BWV.shape[:2])


def without_residual(situation: Situation) -> Accepted:
    """Draws the token after a rejected draft from p itself; of drafts that are no draws q is 1."""
    p_BWV, drafts_BK = probabilities(situation), situation.draft.tokens_BK[:, 1:]
    q_BKV = situation.q_BKV
    if q_BKV is None:
        q_BKV = torch.nn.functional.one_hot(drafts_BK, V).float()
    p_draft, q_draft = (probs.gather(2, drafts_BK[..., None])[..., 0] for probs in (p_BWV[:, :-1], q_BKV))
    return commit(situation, torch.rand(p_draft.shape) * q_draft < p_draft, draws(p_BWV))


def by_threshold(situation: Situation) -> Accepted:
    """Accepts what is likely enough."""
    p_BWV = probabilities(situation)
    likely_BK = p_BWV[:, :-1].gather(2, situation.draft.tokens_BK[:, 1:, None])[..., 0] > 0.25
    return commit(situation, likely_BK, draws(p_BWV))


def drawn_again(situation: Situation) -> Accepted:
    """Accepts a match, and draws the bonus token anew instead of keeping the draw that did not match."""
    p_BWV = probabilities(situation)
    return commit(situation, draws(p_BWV)[:, :-1] == situation.draft.tokens_BK[:, 1:], draws(p_BWV))


def past_a_mismatch(situation: Situation) -> Accepted:
    """Counts matches, wherever they are."""
    choices_BW = draws(probabilities(situation))
    matches_BK = choices_BW[:, :-1] == situation.draft.tokens_BK[:, 1:]
    count_B1 = matches_BK.long().sum(dim=1, keepdim=True)
    return commit(situation, torch.arange(K - 1) < count_B1, choices_BW)


def untempered(situation: Situation) -> Accepted:
    """Forgets the temperature from the block's second column on."""
    [options] = situation.options
    situation.logits_BWV[:, 1:] *= options.temperature
    return by_match(situation)


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        (by_threshold, DRAFTERS["good"]),
        (without_residual, DRAFTERS["good"]),
        (without_residual, DRAWING["poor"]),
        (drawn_again, DRAFTERS["good"]),
        (drawn_again, DRAFTERS["prefix"]),
        (past_a_mismatch, DRAFTERS["random"]),
        (untempered, DRAFTERS["good"]),
    ],
)
def test_a_wrong_rule_is_caught(rule: Rule, drafter: Drafter) -> None:
    options = Options(temperature=0.7)
    verdict = judge(sample(rule, drafter, [options], NUM_REQUESTS), options)
    assert not verdict.same
    assert verdict.p_value < sampled_rounds.ALPHA
    assert verdict.distance > verdict.bound


def test_the_exact_distribution_by_hand() -> None:
    """One row whose filters can be worked out in the head: p = 0.5, 0.25, 0.125, ..."""
    logits_1V = torch.log(torch.tensor([[0.25, 0.5, 0.0625, 0.125, 0.03125, 0.03125]]))
    for options, kept in (
        (Options(top_k=2), [1, 0]),
        (Options(top_p=0.6), [1, 0]),
        (Options(top_p=0.8), [1, 0, 3]),
        (Options(min_p=0.24), [1, 0, 3]),
        (Options(top_k=3, top_p=0.6), [1, 0]),
        (Options(bias=(-50.0, 0, 0, 0, 0, 0), top_k=2), [1, 3]),
    ):
        weights = torch.zeros(V, dtype=torch.float64)
        weights[kept] = logits_1V[0, kept].exp().double()
        found = sampled_rounds.distribution(logits_1V, options)[0]
        torch.testing.assert_close(found, weights / weights.sum(), atol=1e-6, rtol=0)
    assert torch.equal(sampled_rounds.distribution(logits_1V, Options(top_k=1))[0].nonzero(), torch.tensor([[1]]))
