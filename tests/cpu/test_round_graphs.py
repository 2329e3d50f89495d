"""The graphs of a round: what they read, what a replay feeds them, and which models' graphs are replayed so."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.cuda_graph_config import Backend

import sglang_dflash_kernels as kernels
from sglang_dflash.buffers import Buffers
from sglang_dflash.draft.block import BlockLayout
from sglang_dflash.host import round_graphs
from sglang_dflash.host.round_graphs import RoundGraphs
from sglang_dflash.records import Round

CPU = torch.device("cpu")
K, MASK, CAPTURED = 4, 9, (1, 2, 5)
ROWS, LONGEST, VOCAB, FEATURES = 7, 40, 11, 3
PLAIN_INPUTS = ["input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu"]


class Runner:
    """SGLang's runner of a model and of its graphs.

    A captured graph is a function of static tensors: it is replayed by running it once more, of which `seen` tells.
    """

    def __init__(self, name: str, captured: tuple[int, ...] = CAPTURED, inputs: list[str] = PLAIN_INPUTS) -> None:
        self.name = name
        self.model = object()
        self.device_timer: Any = None
        self.capture_head_hooks: list[Any] = []
        self.decode_cuda_graph_runner = self.attn_backend = self.backend = self
        self.buffer_registry = SimpleNamespace(slot_names=lambda: [*inputs, "mrope_positions"])
        self.capture_bs, self.max_bs = list(captured), max(captured)
        self.read_ends = SharedReadEnds.IN_REPLAY
        self.published = 0
        self.seen: Any = None

    def _make_graph_key(self, size: int) -> Any:
        return (self.name, size)

    def replay(self, key: Any, forward_batch: Any) -> Any:
        assert key[0] == self.name
        assert forward_batch is None
        self.seen = SimpleNamespace(batch_size=key[1], input_ids="SGLang's", positions="SGLang's")
        [hook] = self.capture_head_hooks
        hook(self, self.seen)
        num_tokens = key[1] * K
        logits = torch.arange(num_tokens * VOCAB).view(num_tokens, VOCAB)
        features = torch.arange(num_tokens * FEATURES).view(num_tokens, FEATURES)
        return LogitsProcessorOutput(next_token_logits=logits, hidden_states=features, customized_info={"kept": []})

    def init_forward_metadata_out_graph(self, forward_batch: Any) -> None:
        """Attention of each request: its row of the table, up to its length and a block."""
        rows, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        forward_batch.metadata = [(row, length + K) for row, length in zip(rows, lengths, strict=True)]

    def _resolve_shared_read_ends(self, backend: Any, mode: Any) -> SharedReadEnds:
        assert backend is self
        assert mode.is_target_verify()
        return self.read_ends

    def _publish_read_done(self, in_graph: bool) -> None:
        assert in_graph
        assert self.seen is not None
        self.published += 1


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a graph is being captured: what stands last."""
    states = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: states[-1])
    return states


@pytest.fixture
def table() -> torch.Tensor:
    """Request to token; its first row is nobody's, and what stands in it is not for reading."""
    return torch.randperm(ROWS * LONGEST).add(1).view(ROWS, LONGEST).to(torch.int32)


@pytest.fixture
def buffers() -> Buffers:
    """With room for a request more than the largest graph."""
    return Buffers(max(CAPTURED) + 1, K, CPU)


@pytest.fixture
def layout(table: torch.Tensor, buffers: Buffers) -> BlockLayout:
    return BlockLayout(kernels.select(CPU), buffers, table, MASK)


@pytest.fixture
def drafter() -> Runner:
    return Runner("drafter")


@pytest.fixture
def target() -> Runner:
    return Runner("target")


@pytest.fixture
def graphs(drafter: Runner, target: Runner, layout: BlockLayout, buffers: Buffers) -> RoundGraphs:
    made = RoundGraphs(drafter, target, layout, buffers.drafted_BK)
    made.check()
    return made


def a_round(anchors: list[int], lens: list[int], rows: list[int]) -> Round:
    lens_B, rids = torch.tensor(lens), tuple(map(str, rows))
    return Round(lens_B, torch.tensor(rows), torch.tensor(anchors), lens_B + K, sum(lens), rids)


def test_both_passes_read_the_rounds_blocks_and_padding_touches_no_request(
    graphs: RoundGraphs,
    drafter: Runner,
    target: Runner,
    layout: BlockLayout,
    buffers: Buffers,
    table: torch.Tensor,
) -> None:
    """Rounds of several sizes in turn: nothing of an earlier, larger one may be left in a padded row."""
    rounds = (
        a_round([11, 12, 13, 14, 15], [3, 30, 7, 0, 12], [4, 2, 6, 1, 5]),
        a_round([21, 22, 23], [5, 9, 8], [2, 6, 3]),
        a_round([31], [17], [5]),
        a_round([41, 42], [1, 2], [3, 1]),
    )
    for round_, size in zip(rounds, (5, 5, 1, 2), strict=True):
        assert graphs.hold(round_.num_requests)
        graphs.draft(round_)
        n = round_.num_requests
        ids_BK, positions_BK, slots_BK = layout.blocks(n)
        fields = (round_.anchor_B.tolist(), round_.seq_lens_B.tolist(), round_.rows_B.tolist())
        for i, (anchor, length, row) in enumerate(zip(*fields, strict=True)):
            assert ids_BK[i].tolist() == [anchor] + [MASK] * (K - 1)
            assert positions_BK[i].tolist() == list(range(length, length + K))
            assert slots_BK[i].tolist() == table[row, length : length + K].tolist()
        output = graphs.verify(buffers.drafted_BK[:n])
        assert output.next_token_logits.tolist() == torch.arange(n * K * VOCAB).view(-1, VOCAB).tolist()
        assert output.customized_info == {"kept": []}
        assert output.hidden_states.tolist() == torch.arange(n * K * FEATURES).view(-1, FEATURES).tolist()
        ids = {drafter: layout.blocks(size)[0], target: buffers.drafted_BK[:size]}
        for runner in (drafter, target):
            seen = runner.seen
            assert seen.batch_size == size
            # What the layers read is what was laid out or drafted, at its own address.
            for got, whole in zip(
                (seen.input_ids, seen.positions, seen.out_cache_loc),
                (ids[runner], *layout.blocks(size)[1:]),
                strict=True,
            ):
                assert got.shape == (size * K,)
                assert got.data_ptr() == whole.data_ptr()
            assert seen.metadata[:n] == [(row, length + K) for _, length, row in zip(*fields, strict=True)]
            assert seen.metadata[n:] == [(0, K)] * (size - n)
            assert not seen.out_cache_loc[n * K :].any(), "a padded row writes to a slot of a request"


@pytest.mark.parametrize("passes", ["_draft", "_verify"])
def test_a_pass_before_its_capture_touches_no_request(
    passes: str, graphs: RoundGraphs, drafter: Runner, target: Runner, buffers: Buffers, capturing: list[bool]
) -> None:
    """SGLang may capture anew in a server that has served: rounds of many and of one, then the largest graph's pass."""
    for lens in ([3, 30, 7, 0, 12], [17]):
        graphs.draft(a_round(lens, lens, [4, 2, 6, 1, 5][: len(lens)]))
        graphs.verify(buffers.drafted_BK[: len(lens)])
    capturing.append(False)
    getattr(graphs, passes).replay(max(CAPTURED))
    seen = (drafter if passes == "_draft" else target).seen
    assert not seen.out_cache_loc.any()
    assert seen.metadata == [(0, K)] * max(CAPTURED)
    assert seen.positions.view(-1, K).tolist() == [list(range(K))] * max(CAPTURED)


def test_tokens_that_a_proposer_keeps_elsewhere_are_verified(
    graphs: RoundGraphs, target: Runner, buffers: Buffers
) -> None:
    graphs.draft(a_round([1, 2], [3, 4], [5, 6]))
    tokens_BK = torch.randint(VOCAB, (2, K))
    graphs.verify(tokens_BK)
    assert target.seen.input_ids.tolist() == tokens_BK.flatten().tolist()


def test_graphs_hold_as_many_requests_as_the_largest(graphs: RoundGraphs) -> None:
    assert [graphs.hold(n) for n in (1, 4, 5, 6)] == [True, True, True, False]


def test_the_scheduler_hears_when_its_tables_were_read(graphs: RoundGraphs, target: Runner, buffers: Buffers) -> None:
    """Where SGLang has no such mark in a graph, it is left to wait for the whole pass."""
    graphs.draft(a_round([1], [2], [3]))
    graphs.verify(buffers.drafted_BK[:1])
    assert target.published == 1
    target.read_ends = SharedReadEnds.POST_REPLAY
    graphs.verify(buffers.drafted_BK[:1])
    assert target.published == 1


def test_replays_count_in_sglangs_timer(graphs: RoundGraphs, drafter: Runner, target: Runner, buffers: Buffers) -> None:
    categories = []

    @contextlib.contextmanager
    def wrap(metadata: dict[str, str]) -> Any:
        seen = drafter.seen, target.seen
        yield
        assert (drafter.seen, target.seen) != seen
        categories.append(metadata["category"])

    drafter.device_timer = target.device_timer = SimpleNamespace(wrap=wrap)
    graphs.draft(a_round([1], [2], [3]))
    graphs.verify(buffers.drafted_BK[:1])
    assert categories == ["target_verify"] * 2


def test_graphs_of_other_sizes_are_refused(drafter: Runner, layout: BlockLayout, buffers: Buffers) -> None:
    graphs = RoundGraphs(drafter, Runner("target", (1, 2, 8)), layout, buffers.drafted_BK)
    with pytest.raises(RuntimeError, match=r"expected the same batch sizes, got \[\[1, 2, 5\], \[1, 2, 8\]\]"):
        graphs.check()


def test_a_graph_with_an_input_of_another_kind_is_not_captured(
    drafter: Runner, layout: BlockLayout, buffers: Buffers
) -> None:
    target = Runner("target", inputs=[*PLAIN_INPUTS, "encoder_lens"])
    graphs = RoundGraphs(drafter, target, layout, buffers.drafted_BK)
    with pytest.raises(AssertionError, match="inputs that no round fills"):
        graphs.verify(buffers.drafted_BK[:1])


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"backend": Backend.BREAKABLE},
        {"backend": Backend.DISABLED},
        {"overlap": True},
        {"recorder": "stat"},
        {"counts": True},
        {"a2a": "deepep"},
        {"experts": object()},
        {"indexer": object()},
        {"dumper": True},
        {"canary": object()},
        {"debugger": object()},
        {"mrope": True},
        {"ngram": True},
        {"model": SimpleNamespace(prepare_for_forward=print)},
    ],
)
def test_which_models_graphs_are_replayed_so(
    changed: dict[str, Any], position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"backend": Backend.FULL, "overlap": False, "recorder": None, "counts": False, "experts": None}
    given |= {"indexer": None, "dumper": False, "canary": None, "debugger": None, "mrope": False, "ngram": False}
    given |= {"model": object(), "a2a": "none", **changed}
    execution = SimpleNamespace(
        graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=given["backend"]))),
        overlap=SimpleNamespace(enable_two_batch_overlap=given["overlap"]),
        moe=SimpleNamespace(expert_distribution_recorder_mode=given["recorder"]),
    )
    monkeypatch.setattr(round_graphs, "get_exec", lambda: execution)
    monkeypatch.setattr(round_graphs, "counts_real_tokens", lambda: given["counts"])
    a2a = SimpleNamespace(is_none=lambda: given["a2a"] == "none")
    monkeypatch.setattr(round_graphs, "get_moe_a2a_backend", lambda: a2a)
    monkeypatch.setattr(round_graphs, "get_global_experts_capturer", lambda: given["experts"])
    monkeypatch.setattr(round_graphs, "get_global_indexer_capturer", lambda: given["indexer"])
    monkeypatch.setattr(round_graphs, "dumper", SimpleNamespace(may_enable=given["dumper"]))

    def runner(**fields: Any) -> Any:
        plain = {"canary": None, "debugger": None, "mrope": False, "ngram": False, "model": object(), **fields}
        return SimpleNamespace(
            canary_manager=plain["canary"],
            msprobe_debugger=plain["debugger"],
            model_config=SimpleNamespace(model_is_mrope=plain["mrope"]),
            ngram_embedding_manager=SimpleNamespace(enabled=plain["ngram"]),
            model=plain["model"],
        )

    runners = [runner(), runner()]
    runners[position] = runner(**given)
    assert round_graphs.serve(*runners) is (not changed)
