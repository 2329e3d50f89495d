"""Drafts that are drawn: how they are drawn, and which are kept. `test_distribution.py` counts what comes out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglang_dflash_kernels as kernels
from sglang_dflash.accept.match import MatchAcceptor
from sglang_dflash.accept.rejection import RejectionAcceptor
from sglang_dflash.buffers import Buffers
from sglang_dflash.draft import proposer
from sglang_dflash.draft.head import DenseHead
from sglang_dflash.records import Draft, Round, Verified

CPU = torch.device("cpu")
OPS = kernels.select(CPU)
K, V, MANY = 5, 7, 40_000


def a_round(num_requests: int, temperature: list[float] | None = None) -> Round:
    ones = torch.ones(num_requests, dtype=torch.int64)
    temperature_B = None if temperature is None else torch.tensor(temperature)
    return Round(ones * 3, ones, ones, ones, num_requests, ("r",) * num_requests, temperature_B)


def scored(
    num_requests: int, logits_JV: torch.Tensor, tokens_S: torch.Tensor | None = None
) -> proposer.SampledProposer:
    """A proposer that has scored this many times the same block; the anchors are 6."""
    made = proposer.make("sampled", OPS, Buffers(num_requests + 2, K, CPU), DenseHead(torch.eye(V), tokens_S))
    hidden_KV = torch.cat((torch.full((1, V), 99.0), logits_JV))
    ids_BK = torch.full((num_requests, K), 6)
    made.score(hidden_KV.repeat(num_requests, 1), ids_BK.view(-1))
    assert isinstance(made, proposer.SampledProposer)
    return made


def test_sampling_requests_draw_and_greedy_ones_take_the_most_probable() -> None:
    torch.manual_seed(0)
    logits_JV = torch.randn(K - 1, V) * 2
    made = scored(MANY, logits_JV)
    draft = made.propose(a_round(MANY, [0.5, 0.0] * (MANY // 2)), None)  # type: ignore[arg-type]
    assert (draft.tokens_BK[:, 0] == 6).all()
    assert (draft.tokens_BK[1::2, 1:] == logits_JV.argmax(-1)).all()
    q_JV = torch.softmax(logits_JV.double() / 0.5, -1)
    assert draft.q is not None
    torch.testing.assert_close(draft.q[0].double(), q_JV, atol=1e-6, rtol=1e-5)
    drawn = torch.nn.functional.one_hot(draft.tokens_BK[::2, 1:], V).double().mean(0)
    # Six standard deviations of a frequency.
    bound = 6 * (q_JV * (1 - q_JV) / (MANY // 2)).sqrt() + 1e-9
    assert ((drawn - q_JV).abs() < bound).all()


@pytest.mark.parametrize("tokens_S", [None, torch.tensor([5, 0, 3])])
def test_a_broken_drafter_drafts_the_first_token_and_the_target_says_the_rest(tokens_S: torch.Tensor | None) -> None:
    """No number, or no finite one: the committed tokens are distributed as the target's all the same."""
    torch.manual_seed(0)
    logits_JV = torch.zeros(K - 1, V)
    logits_JV[0, 3], logits_JV[1], logits_JV[2, 0] = float("nan"), float("-inf"), float("inf")
    draft = scored(MANY, logits_JV, tokens_S).propose(a_round(MANY, [0.8] * MANY), None)  # type: ignore[arg-type]
    assert draft.q is not None
    first = 0 if tokens_S is None else 5
    for slot in range(3):
        assert (draft.tokens_BK[:, 1 + slot] == first).all()
        assert draft.q[0, slot].tolist() == torch.nn.functional.one_hot(torch.tensor(first), V).tolist()
    p_V = torch.softmax(torch.randn(V), -1)
    buffers = Buffers(MANY, K, CPU)
    verified = Verified(None, p_V.expand(MANY, K, V), K, None)
    accepted = RejectionAcceptor(MatchAcceptor(OPS, buffers)).accept(a_round(MANY), draft, verified)
    said = torch.nn.functional.one_hot(accepted.tokens_BW[:, 0], V).double().mean(0)
    assert ((said - p_V).abs() < 6 * (p_V * (1 - p_V) / MANY).sqrt()).all()


def test_with_a_token_map_draws_are_its_tokens_and_q_is_over_the_whole_vocabulary() -> None:
    torch.manual_seed(0)
    tokens_S = torch.tensor([5, 0, 3])
    logits_JV = torch.randn(K - 1, V) * 2
    logits_JV[:, 1] = 9.0  # the likeliest by far, and not in the map
    made = scored(MANY, logits_JV, tokens_S)
    draft = made.propose(a_round(MANY, [0.5, 0.0] * (MANY // 2)), None)  # type: ignore[arg-type]
    assert (draft.tokens_BK[:, 0] == 6).all()
    assert (draft.tokens_BK[1::2, 1:] == tokens_S[logits_JV[:, tokens_S].argmax(-1)]).all()
    q_JV = torch.zeros(K - 1, V, dtype=torch.float64)
    q_JV[:, tokens_S] = torch.softmax(logits_JV[:, tokens_S].double() / 0.5, -1)
    assert draft.q is not None
    assert draft.q.shape == (MANY, K - 1, V)
    torch.testing.assert_close(draft.q[0].double(), q_JV, atol=1e-6, rtol=1e-5)
    outside = [token for token in range(V) if token not in tokens_S.tolist()]
    assert not draft.q[..., outside].any()
    drawn = torch.nn.functional.one_hot(draft.tokens_BK[::2, 1:], V).double().mean(0)
    bound = 6 * (q_JV * (1 - q_JV) / (MANY // 2)).sqrt() + 1e-9
    assert ((drawn - q_JV).abs() < bound).all()


def test_without_draws_the_most_probable_are_proposed() -> None:
    logits_JV = torch.randn(K - 1, V)
    draft = scored(3, logits_JV).propose(a_round(3), None)  # type: ignore[arg-type]
    assert draft.q is None
    assert (draft.tokens_BK[:, 1:] == logits_JV.argmax(-1)).all()


def accepted_of(drafts: list[int], p_WV: torch.Tensor, q_JV: torch.Tensor, width: int = K) -> Any:
    """Many requests with the same block of anchor 6."""
    tokens_BK = torch.tensor([6, *drafts]).repeat(MANY, 1)
    draft = Draft(tokens_BK, q=q_JV.repeat(MANY, 1, 1))
    verified = Verified(None, p_WV[:width].repeat(MANY, 1, 1), width, None)
    acceptor = RejectionAcceptor(MatchAcceptor(OPS, Buffers(MANY, K, CPU)))
    return acceptor.accept(a_round(MANY), draft, verified)


def certain(tokens: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), V).float()


@pytest.mark.parametrize("num_right", range(K))
def test_where_the_target_is_certain_drafts_are_kept_up_to_the_first_other_one(num_right: int) -> None:
    said, drafts = [1, 2, 3, 4, 5], [1, 2, 3, 4]
    if num_right < K - 1:
        drafts[num_right] = 0
    accepted = accepted_of(drafts, certain(said), torch.full((K - 1, V), 1 / V))
    assert (accepted.commit_B == num_right + 1).all()
    assert (accepted.bonus_B == said[num_right]).all()
    assert (accepted.new_lens_B == 3 + num_right + 1).all()
    assert (accepted.tokens_BW == torch.tensor(said[: num_right + 1] + [0] * (K - 1 - num_right))).all()


def test_a_draft_is_kept_with_p_over_q_and_replaced_from_the_residual() -> None:
    torch.manual_seed(1)
    p_WV, q_JV = torch.full((K, V), 1 / V), torch.full((K - 1, V), 1 / V)
    q_JV[0] = torch.tensor([0.5, 0.1, 0.4, 0, 0, 0, 0])
    p_WV[0] = torch.tensor([0.3, 0.2, 0.4, 0.1, 0, 0, 0])
    accepted = accepted_of([0, 1, 1, 1], p_WV, q_JV)
    kept = accepted.commit_B > 1
    assert kept.double().mean() == pytest.approx(0.3 / 0.5, abs=6 * (0.24 / MANY) ** 0.5)
    # Where p and q are the same every draft is kept.
    assert (accepted.commit_B[kept] == K).all()
    instead = torch.nn.functional.one_hot(accepted.bonus_B[~kept], V).double().mean(0)
    expected = torch.tensor([0, 0.5, 0, 0.5, 0, 0, 0])
    assert (instead - expected).abs().max() < 6 * (0.25 / (~kept).sum()) ** 0.5
    assert not instead[expected == 0].any()


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_narrow_verification_reads_no_draft_past_it(width: int) -> None:
    torch.manual_seed(2)
    accepted = accepted_of([1, 2, 3, 4], certain([1, 2, 3, 4, 5]), certain([1, 2, 3, 4]), width)
    assert (accepted.commit_B == width).all()
    assert (accepted.tokens_BW == torch.arange(1, width + 1)).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_ks": [3, 1 << 30, 1, 2]},
        {"top_ps": [0.5, 0.9, 1.0, 0.05]},
        {"min_ps": [0.0, 0.3, 0.9, 0.1]},
        {"top_ks": [4, 2, 1, 1 << 30], "top_ps": [0.7, 0.6, 1.0, 0.9], "min_ps": [0.1, 0.0, 0.0, 0.6]},
    ],
)
def test_the_targets_distribution_is_what_its_sampler_draws_from(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from sglang_dflash.host import sampling

    kernel = SimpleNamespace(sampling_backend="pytorch")
    monkeypatch.setattr(sampler, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    torch.manual_seed(3)
    values = {"top_ks": [1 << 30] * 4, "top_ps": [1.0] * 4, "min_ps": [0.0] * 4} | options
    temperatures = torch.tensor([[0.3], [0.7], [1.0], [1.5]])
    info = SamplingBatchInfo(
        temperatures=temperatures,
        top_ks=torch.tensor(values["top_ks"], dtype=torch.int32),
        top_ps=torch.tensor(values["top_ps"]),
        min_ps=torch.tensor(values["min_ps"]),
        is_all_greedy=False,
        is_any_greedy=1 in values["top_ks"],
        need_top_p_sampling="top_ps" in options,
        need_top_k_sampling="top_ks" in options,
        need_min_p_sampling="min_ps" in options,
        vocab_size=V,
        device="cpu",
    )
    width = 2
    logits_NV = torch.randn(4 * width, V) * 2
    if info.is_any_greedy:
        logits_NV[4, :2] = logits_NV[4].max() + 1  # a tie of a greedy request: the first token has it
    # Without its distributed groups.
    runner = SimpleNamespace(sampler=sampler.Sampler.__new__(sampler.Sampler))
    p_BWV = sampling.distribution(runner, info, logits_NV, torch.zeros(4, width, dtype=torch.int64))
    for i in range(4):
        for j in range(width):
            expected = by_hand(logits_NV[i * width + j], temperatures[i, 0], *(values[n][i] for n in values))
            torch.testing.assert_close(p_BWV[i, j].double(), expected, atol=1e-6, rtol=1e-5)


def by_hand(logits_V: torch.Tensor, temperature: Any, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Filters one by one: a token stays if fewer than k are more probable, if those sum to at most top-p, and so on."""
    probs = torch.softmax(logits_V.double() / temperature.double(), -1).tolist()
    order = sorted(range(V), key=lambda token: (-probs[token], token))
    left, before = [0.0] * V, 0.0
    for rank, token in enumerate(order):
        if rank < top_k and before <= top_p and probs[token] >= min_p * probs[order[0]]:
            left[token] = probs[token]
        before += probs[token]
    return torch.tensor(left, dtype=torch.float64) / sum(left)
