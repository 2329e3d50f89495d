"""The stages of a round with the reference kernels, each against a loop over requests and tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import sglang_dflash_kernels as kernels
from sglang_dflash.accept.alarm import AcceptanceAlarm
from sglang_dflash.accept.forced import FIXED_TOKEN_ID, ForcedAcceptor
from sglang_dflash.accept.match import MatchAcceptor
from sglang_dflash.buffers import Buffers
from sglang_dflash.draft import proposer
from sglang_dflash.draft.block import BlockLayout
from sglang_dflash.draft.head import DenseHead
from sglang_dflash.inject.features import DraftLayers, FeatureInjector, project
from sglang_dflash.policy.fixed import FixedWidth
from sglang_dflash.records import Block, Draft, Round, Verified

CPU = torch.device("cpu")
OPS = kernels.select(CPU)
POISON = -77
MAX_REQUESTS, K = 5, 6


@pytest.fixture
def buffers() -> Buffers:
    """Every static buffer poisoned: what a stage does not write shows."""
    made = Buffers(MAX_REQUESTS, K, CPU)
    for tensor in all_tensors(made):
        tensor.fill_(POISON)
    return made


def all_tensors(owner: object) -> Iterator[torch.Tensor]:
    for value in vars(owner).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list):
            for part in value:
                yield from all_tensors(part)


def a_round(seq_lens: list[int], anchors: list[int] | None = None, rows: list[int] | None = None) -> Round:
    size = len(seq_lens)
    seq_lens_B = torch.tensor(seq_lens, dtype=torch.int64)
    return Round(
        seq_lens_B=seq_lens_B,
        rows_B=torch.tensor(rows or list(range(size)), dtype=torch.int64),
        anchor_B=torch.tensor(anchors or [1] * size, dtype=torch.int64),
        seq_lens_bound_cpu_B=seq_lens_B + K,
        seq_lens_bound_sum=int((seq_lens_B + K).sum()),
        rids=tuple(f"r{i}" for i in range(size)),
    )


# -- buffers ----------------------------------------------------------------------------------------------------------


def test_buffers_hold_the_largest_batch_of_whole_blocks() -> None:
    made = Buffers(MAX_REQUESTS, K, CPU)
    for name in ("ids_BK", "positions_BK", "slots_BK", "drafted_BK"):
        assert getattr(made, name).shape == (MAX_REQUESTS, K)
        assert getattr(made, name).dtype == torch.int64
    assert made.confidence.shape == (MAX_REQUESTS, K - 1)
    assert made.confidence.dtype == torch.float32
    accepted = made.next_accepted()
    assert accepted.tokens_BK.shape == (MAX_REQUESTS, K)
    assert (accepted.commit_B.dtype, accepted.bonus_B.dtype) == (torch.int32, torch.int64)


def test_accepted_buffers_alternate_and_share_no_memory(buffers: Buffers) -> None:
    first, second, third, fourth = (buffers.next_accepted() for _ in range(4))
    assert first is third
    assert second is fourth
    theirs = {tensor.data_ptr() for tensor in all_tensors(first)}
    assert len(theirs) == 4
    assert not theirs & {tensor.data_ptr() for tensor in all_tensors(second)}


# -- draft ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 3, MAX_REQUESTS])
def test_the_layout_of_a_block(buffers: Buffers, size: int) -> None:
    """Anchor and masks, the positions behind the cached prefix, and the slots that the requests' rows hold there."""
    mask, seq_lens, anchors, rows = 9, [0, 3, 7, 1, 12][:size], [5, 6, 7, 8, 4][:size], [4, 7, 6, 2, 1][:size]
    req_to_token = torch.randperm(8 * 20).view(8, 20).to(torch.int32)
    layout = BlockLayout(OPS, buffers, req_to_token, mask)
    round_ = a_round(seq_lens, anchors, rows)
    ids_BK, positions_BK, slots_BK = layout.fill(round_.anchor_B, round_.seq_lens_B, round_.rows_B)
    assert ids_BK.shape == positions_BK.shape == slots_BK.shape == (size, K)
    for i in range(size):
        assert ids_BK[i].tolist() == [anchors[i]] + [mask] * (K - 1)
        assert positions_BK[i].tolist() == list(range(seq_lens[i], seq_lens[i] + K))
        assert slots_BK[i].tolist() == req_to_token[rows[i], seq_lens[i] : seq_lens[i] + K].tolist()
    for view, whole in ((ids_BK, buffers.ids_BK), (positions_BK, buffers.positions_BK), (slots_BK, buffers.slots_BK)):
        assert view.data_ptr() == whole.data_ptr() or size == 0
        assert (whole[size:] == POISON).all()


VOCAB, HIDDEN = 11, 11


@pytest.mark.parametrize("size", [1, 2, MAX_REQUESTS])
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_slot_k_drafts_token_k(buffers: Buffers, size: int, head_dtype: torch.dtype) -> None:
    """The head's rows are the axes, so a hidden state that points along axis t says token t; slot 0 is not asked."""
    generator = torch.Generator().manual_seed(size)
    said_BK = torch.randint(VOCAB, (size, K), generator=generator)
    strength_BK = torch.rand((size, K), generator=generator) * 4 + 1
    hidden_NH = torch.nn.functional.one_hot(said_BK, HIDDEN).float() * strength_BK[..., None]
    anchors = [(int(said_BK[i, 0]) + 1) % VOCAB for i in range(size)]
    ids_BK = torch.full((size, K), VOCAB - 1)
    ids_BK[:, 0] = torch.tensor(anchors)
    made = proposer.make("argmax", OPS, buffers, DenseHead(torch.eye(VOCAB, HIDDEN, dtype=head_dtype)))
    made.score(hidden_NH.view(-1, HIDDEN), ids_BK.view(-1))
    draft = made.propose(a_round([4] * size, anchors), no_block())
    assert draft.tokens_BK.shape == (size, K)
    assert draft.confidence is not None
    assert draft.confidence.shape == (size, K - 1)
    for i in range(size):
        assert draft.tokens_BK[i].tolist() == [anchors[i], *said_BK[i, 1:].tolist()]
        for k in range(1, K):
            logit = float(strength_BK[i, k].to(head_dtype))
            expected = math.exp(logit) / (math.exp(logit) + VOCAB - 1)
            assert abs(float(draft.confidence[i, k - 1]) - expected) < 1e-6
    assert (buffers.drafted_BK[size:] == POISON).all()
    assert (buffers.confidence[size:] == POISON).all()


@pytest.mark.parametrize("size", [1, 2, MAX_REQUESTS])
def test_with_a_token_map_slots_draft_its_tokens_and_the_anchor_stays(buffers: Buffers, size: int) -> None:
    """Confidence is the probability among the map's tokens: a likelier token outside of it takes nothing away."""
    tokens_S = torch.tensor([7, 0, 10, 4])
    generator = torch.Generator().manual_seed(size)
    said_BK = tokens_S[torch.randint(len(tokens_S), (size, K), generator=generator)]
    # Token 5 is the likeliest everywhere, and not in the map.
    hidden_NH = torch.nn.functional.one_hot(said_BK, HIDDEN).float() * 3
    hidden_NH[..., 5] = 9
    ids_BK = torch.full((size, K), VOCAB - 1)
    ids_BK[:, 0] = 2  # an anchor that is a valid index of the map
    made = proposer.make("argmax", OPS, buffers, DenseHead(torch.eye(VOCAB, HIDDEN), tokens_S))
    addresses = {name: value.data_ptr() for name, value in vars(made).items() if isinstance(value, torch.Tensor)}
    made.score(hidden_NH.view(-1, HIDDEN), ids_BK.view(-1))
    draft = made.propose(a_round([4] * size, [2] * size), no_block())
    assert draft.tokens_BK.tolist() == [[2, *said_BK[i, 1:].tolist()] for i in range(size)]
    assert draft.tokens_BK.data_ptr() == buffers.drafted_BK.data_ptr()
    assert draft.confidence is not None
    expected = torch.full((size, K - 1), math.exp(3) / (math.exp(3) + len(tokens_S) - 1))
    torch.testing.assert_close(draft.confidence, expected)
    assert (buffers.drafted_BK[size:] == POISON).all()
    now = {name: value.data_ptr() for name, value in vars(made).items() if isinstance(value, torch.Tensor)}
    assert now == addresses, "captured graphs hold them"


def no_block() -> Block:
    empty = torch.empty(0, dtype=torch.int64)
    return Block(empty, empty, empty, None)


class IncompleteProposer:
    def __init__(self, *args: Any) -> None:
        self.args, self.draws = args, False


class AnotherProposer(IncompleteProposer):
    def score(self, hidden_NH: torch.Tensor, ids_N: torch.Tensor) -> None: ...

    def propose(self, round_: Round, block: Any) -> Any: ...


def test_a_proposer_is_named_by_module_and_class(buffers: Buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "another_package.proposers", sys.modules[__name__])
    monkeypatch.setitem(sys.modules, "another_package", sys.modules[__name__])
    head_VH = torch.zeros(2, 2)
    made: Any = proposer.make("another_package.proposers:AnotherProposer", OPS, buffers, head_VH)
    assert type(made) is AnotherProposer
    assert made.args == (OPS, buffers, head_VH)


def test_a_proposer_that_lacks_a_part_is_refused(buffers: Buffers, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "another_package", sys.modules[__name__])
    with pytest.raises(ValueError, match="expected score, propose as a Proposer has them, got none in"):
        proposer.make("another_package:IncompleteProposer", OPS, buffers, torch.zeros(2, 2))


@pytest.mark.parametrize(
    "name",
    ["top1", "no_such_module:Class", "sglang_dflash.records:Missing", "sglang_dflash:", ":A", ".a:B", "math:pi"],
)
def test_an_unknown_proposer_is_refused(buffers: Buffers, name: str) -> None:
    with pytest.raises(
        ValueError, match=r"proposer: expected argmax, sampled or package\.module:Class, got "
    ) as caught:
        proposer.make(name, OPS, buffers, torch.zeros(2, 2))
    assert repr(name) in str(caught.value)


def test_the_fixed_policy_verifies_its_width_at_every_batch_size() -> None:
    policy = FixedWidth(7)
    assert [policy.choose(size) for size in (1, 8, 500)] == [7, 7, 7]


# -- accept -----------------------------------------------------------------------------------------------------------


def verified(target_BW: torch.Tensor) -> Verified:
    return Verified(target_BW, None, target_BW.shape[1], None)


def one_by_one(draft: list[int], target: list[int]) -> list[int]:
    """The tokens that plain decoding would commit: after each right draft one more, and the target's at the end."""
    committed = [target[0]]
    for j in range(1, len(target)):
        if draft[j] != committed[-1]:
            break
        committed.append(target[j])
    return committed


@pytest.mark.parametrize("width", [1, 2, K])
@pytest.mark.parametrize("size", [1, 3, MAX_REQUESTS])
def test_acceptance_commits_what_plain_decoding_would(buffers: Buffers, size: int, width: int) -> None:
    generator = torch.Generator().manual_seed(10 * size + width)
    acceptor = MatchAcceptor(OPS, buffers)
    lengths = set()
    for _ in range(30):
        # Two tokens: half of the drafts are right, so every length occurs.
        draft_BK = torch.randint(2, (size, K), generator=generator)
        target_BW = torch.randint(2, (size, width), generator=generator)
        round_ = a_round([3 + 5 * i for i in range(size)])
        accepted = acceptor.accept(round_, Draft(draft_BK), verified(target_BW))
        assert accepted.tokens_BW.shape == (size, width)
        for i in range(size):
            expected = one_by_one(draft_BK[i].tolist(), target_BW[i].tolist())
            lengths.add(len(expected))
            assert int(accepted.commit_B[i]) == len(expected)
            assert accepted.tokens_BW[i].tolist() == expected + [0] * (width - len(expected))
            assert int(accepted.bonus_B[i]) == expected[-1]
            assert int(accepted.new_lens_B[i]) == 3 + 5 * i + len(expected)
    assert lengths == set(range(1, width + 1))


def test_a_rounds_tokens_stay_while_the_next_round_runs(buffers: Buffers) -> None:
    acceptor = MatchAcceptor(OPS, buffers)
    ones, twos = torch.ones(2, K, dtype=torch.int64), torch.full((2, K), 2)
    first = acceptor.accept(a_round([1, 2]), Draft(ones), verified(ones))
    second = acceptor.accept(a_round([7, 8]), Draft(twos), verified(twos))
    assert first.tokens_BW.tolist() == [[1] * K] * 2
    assert first.new_lens_B.tolist() == [1 + K, 2 + K]
    assert second.tokens_BW.tolist() == [[2] * K] * 2
    assert second.new_lens_B.tolist() == [7 + K, 8 + K]


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("keep_drafts", [True, False])
@pytest.mark.parametrize("drafts_are_right", [True, False])
def test_forced_lengths(buffers: Buffers, length: int, keep_drafts: bool, drafts_are_right: bool) -> None:
    width, size = 4, 3
    widths: list[int] = []

    def next_length(of: int) -> int:
        widths.append(of)
        return length

    acceptor = ForcedAcceptor(MatchAcceptor(OPS, buffers), next_length, keep_drafts=keep_drafts)
    draft_BK = torch.arange(size * K).view(size, K) + 100
    target_BW = torch.arange(size * width).view(size, width)
    # Without force, four tokens would be committed or one.
    if drafts_are_right:
        draft_BK[:, 1:width] = target_BW[:, : width - 1]
    accepted = acceptor.accept(a_round([5, 0, 9]), Draft(draft_BK), verified(target_BW))
    assert widths == [width]
    assert accepted.commit_B.tolist() == [length] * size
    assert accepted.new_lens_B.tolist() == [5 + length, length, 9 + length]
    for i in range(size):
        if keep_drafts:
            bonus = int(target_BW[i, length - 1])
            expected = [*draft_BK[i, 1:length].tolist(), bonus] + [0] * (width - length)
        else:
            bonus, expected = FIXED_TOKEN_ID, [FIXED_TOKEN_ID] * width
        assert int(accepted.bonus_B[i]) == bonus
        assert accepted.tokens_BW[i].tolist() == expected


# -- inject -----------------------------------------------------------------------------------------------------------

LAYERS, HEADS, HEAD_DIM, FEATURES, CONTEXT, NUM_SLOTS, NUM_POSITIONS = 3, 2, 4, 9, 5, 40, 32


def draft_layers(*, bias: bool, rotary_dim: int) -> DraftLayers:
    """Random weights, with what the drafter's own have: projections that are a part of a larger tensor."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    size = 2 * HEADS * HEAD_DIM
    fc, norm = random(CONTEXT, FEATURES), random(CONTEXT)
    angles = random(NUM_POSITIONS, rotary_dim // 2) * 3
    caches = [[torch.full((NUM_SLOTS, HEADS, HEAD_DIM), math.nan) for _ in range(LAYERS)] for _ in range(2)]
    return DraftLayers(
        fuse=lambda features_ND: torch.nn.functional.rms_norm(features_ND @ fc.T, (CONTEXT,), norm, 1e-5),
        project=partial(project, random(LAYERS, size + 6, CONTEXT)[:, 6:], random(LAYERS, size) if bias else None),
        k_norm_LD=random(LAYERS, HEAD_DIM),
        eps_L=torch.tensor([1e-6, 1e-3, 0.1]),
        cos_sin_PR=torch.cat([angles.cos(), angles.sin()], dim=1),
        value_scale=0.5,
        caches=kernels.CachePointers(*caches),
    )


def key_and_value(layers: DraftLayers, layer: int, head: int, feature_D: torch.Tensor, position: int) -> torch.Tensor:
    """One token's key and value (2, head_dim) in one layer and head, written out."""
    context_H = layers.fuse(feature_D[None])[0]
    weight_LEH, bias_LE = layers.project.args
    kv_E = weight_LEH[layer] @ context_H + (0 if bias_LE is None else bias_LE[layer])
    key = kv_E[head * HEAD_DIM : (head + 1) * HEAD_DIM].tolist()
    value = kv_E[(HEADS + head) * HEAD_DIM : (HEADS + head + 1) * HEAD_DIM] * layers.value_scale
    scale = 1 / math.sqrt(sum(x * x for x in key) / HEAD_DIM + float(layers.eps_L[layer]))
    key = [x * scale * float(weight) for x, weight in zip(key, layers.k_norm_LD[layer], strict=True)]
    cos_sin = layers.cos_sin_PR[position].tolist()
    half = len(cos_sin) // 2
    for i in range(half):
        cos, sin = cos_sin[i], cos_sin[half + i]
        first, second = key[i], key[i + half]
        key[i], key[i + half] = first * cos - second * sin, second * cos + first * sin
    return torch.stack([torch.tensor(key), value])


@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_features_become_keys_and_values(bias: bool, rotary_dim: int) -> None:
    layers = draft_layers(bias=bias, rotary_dim=rotary_dim)
    features_ND = torch.randn(9, FEATURES, generator=torch.Generator().manual_seed(2))
    positions = [4, 5, 6, 0, 1, 2, 19, 20, 21]
    slots = [31, 2, 17, 9, 8, 7, 30, 1, 12]
    FeatureInjector(OPS, layers).inject(features_ND, torch.tensor(positions), torch.tensor(slots))
    stored = {slot: (features_ND[n], positions[n]) for n, slot in enumerate(slots)}
    for layer in range(LAYERS):
        keys, values = layers.caches.key_caches[layer], layers.caches.value_caches[layer]
        for slot in range(NUM_SLOTS):
            for head in range(HEADS):
                got = torch.stack([keys[slot, head], values[slot, head]])
                if slot in stored:
                    expected = key_and_value(layers, layer, head, *stored[slot])
                    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
                else:
                    assert got.isnan().all(), f"slot {slot} was written"


def test_no_features_leave_the_caches_alone() -> None:
    layers = draft_layers(bias=True, rotary_dim=HEAD_DIM)
    none = torch.empty(0, dtype=torch.int64)
    FeatureInjector(OPS, layers).inject(torch.empty(0, FEATURES), none, none)
    assert all(cache.isnan().all() for cache in layers.caches.key_caches)


# -- alarm ------------------------------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture, rounds: list[list[int]]) -> list[str]:
    caplog.clear()
    alarm = AcceptanceAlarm(num_blocks=100)
    for accepted in rounds:
        alarm.observe(accepted)
    return [record.getMessage() for record in caplog.records]


def test_the_alarm_warns_once_where_nearly_nothing_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    nothing, few, one = [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]
    (warning,) = warnings_of(caplog, [nothing] * 24 + [few] + [nothing] * 200)
    assert "Of the last 100 blocks the target accepted 0.010 drafts a block" in warning
    assert "target_layer_ids" in warning
    assert warnings_of(caplog, [nothing] * 24) == [], "too few blocks to judge"
    # 0.05 of a draft a block is enough, and what a fit drafter accepts later does not hide an earlier window.
    assert warnings_of(caplog, ([nothing] * 4 + [few]) * 100) == []
    assert len(warnings_of(caplog, [one] * 25 + [nothing] * 25 + [one] * 25)) == 1
    assert warnings_of(caplog, ([one] * 13 + [nothing] * 12) * 4) == []
