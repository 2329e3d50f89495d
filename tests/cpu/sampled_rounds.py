"""Rounds of the real stages over a target that is a table: many requests at once, and the exact distribution beside.

The target knows V tokens; p(next | tokens since the start) is a row of a fixed random table, another for every prefix.
A `Rule` decides a round: what of a drafted block is committed, given the target's logits. `by_match` is the product's
(`host.sampling.choose` with SGLang's own sampler, then `accept.match.MatchAcceptor`) for drafts that are no draws, and
`by_rejection` (`host.sampling.distribution`, `accept.rejection.RejectionAcceptor`) for those that are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from sglang.srt.layers import sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

import sglang_dflash_kernels as kernels
from sglang_dflash.accept.match import MatchAcceptor
from sglang_dflash.accept.rejection import RejectionAcceptor
from sglang_dflash.buffers import Buffers
from sglang_dflash.host import sampling
from sglang_dflash.records import Accepted, Draft, Round, Verified

CPU = torch.device("cpu")
V, K, LENGTH = 6, 4, 3
START = 5  # the token before the first
_tables = torch.Generator().manual_seed(0)
# After 0, 1, 2, 3 tokens: a row for each prefix. Longer ones are cut by `Target.rows`: nobody reads what they lead to.
_LOGITS_NV = torch.randn(sum(V**depth for depth in range(LENGTH + 1)), V, generator=_tables) * 1.5
_OFFSETS = torch.tensor([sum(V**d for d in range(depth)) for depth in range(LENGTH + 1)])


@dataclasses.dataclass(frozen=True)
class Options:
    """Sampling parameters of a request, as SGLang's."""

    temperature: float = 1.0
    top_k: int = TOP_K_ALL
    top_p: float = 1.0
    min_p: float = 0.0
    bias: tuple[float, ...] = (0.0,) * V


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a rule decides about: B requests whose blocks are verified in W = K columns."""

    round_: Round
    draft: Draft
    q_BKV: torch.Tensor | None  # float32, shape (B, K-1, V): the drafts' own distribution, None where they are no draws
    logits_BWV: torch.Tensor  # float32; a rule may overwrite it
    positions_BW: torch.Tensor
    options: list[Options]  # request i (`round_.rows_B`) has options[i % len(options)]
    buffers: Buffers


Rule = Callable[[Situation], Accepted]
# From the prefixes' rows of the table (see `row_of`) and depths: drafts (B, K-1), and their distribution or None.
Drafter = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def row_of(code_B: torch.Tensor, depth_B: torch.Tensor) -> torch.Tensor:
    """Rows of the table: `code_B` reads the tokens since the start as a number to the base V."""
    depth_B = depth_B.clamp(max=LENGTH)
    return _OFFSETS[depth_B] + code_B % V**LENGTH


def logits_after(code_B: torch.Tensor, depth_B: torch.Tensor) -> torch.Tensor:
    return _LOGITS_NV[row_of(code_B, depth_B)]


def sample(rule: Rule, drafter: Drafter, options: list[Options], num_requests: int) -> torch.Tensor:
    """The first LENGTH tokens of each request, int64 (B, LENGTH), round by round until all are there."""
    buffers = Buffers(num_requests, K, CPU)
    said = torch.zeros(num_requests, LENGTH + K, dtype=torch.int64)
    # Of the requests that go on, all of them the first time: their indices, lengths, prefixes and last tokens.
    index = torch.arange(num_requests)
    depth, code, anchor = torch.zeros_like(index), torch.zeros_like(index), torch.full_like(index, START)
    while len(index):
        drafts, q_BKV = drafter(code, depth)
        logits_BWV, after, at = torch.empty(len(index), K, V), code, depth
        for column in range(K):
            if column:
                after, at = after * V + drafts[:, column - 1], at + 1
            logits_BWV[:, column] = logits_after(after, at)
        tokens_BK = torch.cat([anchor[:, None], drafts], dim=1)
        round_ = Round(depth, index, anchor, depth + K, int((depth + K).sum()), ())
        positions_BW = depth[:, None] + torch.arange(K)
        situation = Situation(round_, Draft(tokens_BK), q_BKV, logits_BWV, positions_BW, options, buffers)
        accepted = rule(situation)
        for column in range(K):
            taken_B = accepted.commit_B > column
            said[index[taken_B], depth[taken_B] + column] = accepted.tokens_BW[taken_B, column]
            code = torch.where(taken_B, code * V + accepted.tokens_BW[:, column], code)
        goes_on = accepted.new_lens_B < LENGTH
        index, code = index[goes_on], code[goes_on]
        depth, anchor = accepted.new_lens_B[goes_on], accepted.bonus_B[goes_on]
    return said[:, :LENGTH]


def by_match(situation: Situation) -> Accepted:
    """The product's own stages, for drafts that are no draws."""
    logits_NV, info = _biased(situation)
    choices_BW = sampling.choose(_runner(), info, logits_NV, situation.positions_BW, keep_logits=False)
    verified = Verified(choices_BW, None, K, None)
    acceptor = MatchAcceptor(kernels.select(CPU), situation.buffers)
    return acceptor.accept(situation.round_, situation.draft, verified)


def by_rejection(situation: Situation) -> Accepted:
    """The product's own stages, for drafts drawn from a distribution."""
    assert situation.q_BKV is not None
    logits_NV, info = _biased(situation)
    p_BWV = sampling.distribution(_runner(), info, logits_NV, situation.positions_BW)
    draft = dataclasses.replace(situation.draft, q=situation.q_BKV)
    acceptor = RejectionAcceptor(MatchAcceptor(kernels.select(CPU), situation.buffers))
    return acceptor.accept(situation.round_, draft, Verified(None, p_BWV, K, None))


def _biased(situation: Situation) -> tuple[torch.Tensor, SamplingBatchInfo]:
    info = sampling_info(situation.options, situation.round_.rows_B)
    sampling.add_bias(info, situation.logits_BWV)
    return situation.logits_BWV.reshape(-1, V), info


def sampling_info(options: list[Options], requests_B: torch.Tensor) -> SamplingBatchInfo:
    rows = requests_B % len(options)

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([getattr(each, name) for each in options], dtype=dtype)[rows]

    bias = column("bias")
    return SamplingBatchInfo(
        temperatures=column("temperature")[:, None],
        top_ps=column("top_p"),
        top_ks=column("top_k", torch.int32),
        min_ps=column("min_p"),
        is_all_greedy=all(each.top_k <= 1 for each in options),
        is_any_greedy=any(each.top_k <= 1 for each in options),
        need_top_p_sampling=any(each.top_p != 1.0 for each in options),
        need_top_k_sampling=any(each.top_k != TOP_K_ALL for each in options),
        need_min_p_sampling=any(each.min_p > 0 for each in options),
        vocab_size=V,
        logit_bias=bias if bool(bias.any()) else None,
        device="cpu",
    )


def _runner() -> SimpleNamespace:
    """SGLang's sampler without a server around it: what its constructor reads there is set as on one CPU."""
    made = sampler.Sampler.__new__(sampler.Sampler)
    torch.nn.Module.__init__(made)
    made.rl_on_policy_target = None
    made.enable_deterministic = made.use_log_softmax_logprob = made.use_ascend_backend = False
    return SimpleNamespace(sampler=made)


# -- what is owed ------------------------------------------------------------------------------------------------------


def distribution(logits_NV: torch.Tensor, options: Options) -> torch.Tensor:
    """p(next) of each row, float64, from the options' definitions and not from any sampler.

    Of the tokens by falling probability p: the first top_k, those before which less than top_p of the mass lies, and
    those of at least min_p times the largest probability are left; what is left is scaled to 1.
    """
    bias_V = torch.tensor(options.bias, dtype=torch.float64)
    probs_NV = torch.softmax((logits_NV.double() + bias_V) / options.temperature, dim=-1)
    for probs_V in probs_NV:
        mass, largest = 0.0, float(probs_V.max())
        for rank, token in enumerate(probs_V.argsort(descending=True).tolist()):
            p = float(probs_V[token])
            if rank >= options.top_k or mass > options.top_p or p < options.min_p * largest:
                probs_V[token] = 0.0
            mass += p
    return probs_NV / probs_NV.sum(dim=-1, keepdim=True)


def exact(options: Options) -> torch.Tensor:
    """The probability of every sequence of LENGTH tokens, float64, shape (V ** LENGTH,)."""
    probs_NV = distribution(_LOGITS_NV, options)
    sequences = torch.tensor(list(itertools.product(range(V), repeat=LENGTH)))
    result = torch.ones(len(sequences), dtype=torch.float64)
    code = torch.zeros(len(sequences), dtype=torch.int64)
    for depth in range(LENGTH):
        rows = row_of(code, torch.full_like(code, depth))
        result *= probs_NV[rows, sequences[:, depth]]
        code = code * V + sequences[:, depth]
    return result


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How samples compare with the exact distribution.

    Attributes:
        p_value: of Pearson's chi-square test; cells that expect fewer than MIN_EXPECTED samples are one cell.
        distance: total variation between the frequencies and the distribution.
        bound: what `distance` stays under with a probability of 1 - ALPHA. Its mean is at most
            sum(sqrt(p (1-p) / n)) / 2, and a sample moves it by 1/n at most (McDiarmid's inequality).
        impossible: samples of probability 0.
    """

    p_value: float
    distance: float
    bound: float
    impossible: int

    @property
    def same(self) -> bool:
        return self.p_value > ALPHA and self.distance < self.bound and self.impossible == 0


ALPHA = 1e-6
MIN_EXPECTED = 10.0


def judge(said: torch.Tensor, options: Options) -> Verdict:
    """Samples (B, LENGTH) against the exact distribution of these options."""
    expected, n = exact(options), said.shape[0]
    code = said[:, 0] * V**2 + said[:, 1] * V + said[:, 2]
    counts = torch.bincount(code, minlength=V**LENGTH).double()
    large = expected * n >= MIN_EXPECTED
    cells = torch.cat([expected[large] * n, (expected[~large] * n).sum()[None]])
    seen = torch.cat([counts[large], counts[~large].sum()[None]])
    used = cells > 0
    cells, seen = cells[used], seen[used]
    statistic = ((seen - cells) ** 2 / cells).sum()
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(freedom, statistic / 2)) if len(cells) > 1 else 1.0
    mean = float((expected * (1 - expected) / n).clamp(min=0).sqrt().sum()) / 2
    return Verdict(
        p_value=p_value,
        distance=float((counts / n - expected).abs().sum()) / 2,
        bound=mean + math.sqrt(-math.log(ALPHA) / (2 * n)),
        impossible=int(counts[expected == 0].sum()),
    )
