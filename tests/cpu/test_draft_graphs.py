"""The drafter's graphs: what they read, what a replay feeds them, and which rounds they hold."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_config import Backend

import sglang_dflash_kernels as kernels
from sglang_dflash.buffers import Buffers
from sglang_dflash.draft.block import BlockLayout
from sglang_dflash.host import draft_graphs
from sglang_dflash.host.draft_graphs import DraftGraphs
from sglang_dflash.records import Round

CPU = torch.device("cpu")
K, MASK, CAPTURED = 4, 9, (1, 2, 5)
ROWS, LONGEST = 7, 40


class Runner:
    """SGLang's runner. A captured graph is a function of static tensors, so replaying is running it once more."""

    def __init__(self) -> None:
        self.device = CPU
        self.device_timer = None
        self.capture_head_hooks: list[Any] = []
        self.decode_cuda_graph_runner = self
        self.attn_backend = self
        self.backend = self
        self.capture_bs = list(CAPTURED)
        self.seen: Any = None

    def _make_graph_key(self, size: int) -> Any:
        return ("key", size)

    def replay(self, key: Any, forward_batch: Any) -> None:
        assert key[0] == "key"
        assert key[1] in CAPTURED
        assert forward_batch is None
        self.seen = SimpleNamespace(batch_size=key[1], input_ids="SGLang's", positions="SGLang's")
        [hook] = self.capture_head_hooks
        hook(self, self.seen)

    def init_forward_metadata_out_graph(self, forward_batch: Any) -> None:
        """Attention of each request: its row of the table, up to its length and a block."""
        forward_batch.metadata = [
            (row, length + K)
            for row, length in zip(
                forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True
            )
        ]


@pytest.fixture
def table() -> torch.Tensor:
    """Request to token; its first row is for padding."""
    table = torch.randperm(ROWS * LONGEST).add(1).view(ROWS, LONGEST).to(torch.int32)
    table[0] = 0
    return table


@pytest.fixture
def layout(table: torch.Tensor) -> BlockLayout:
    return BlockLayout(kernels.select(CPU), Buffers(max(CAPTURED), K, CPU), table, MASK)


def a_round(anchors: list[int], lens: list[int], rows: list[int]) -> Round:
    lens_B = torch.tensor(lens)
    return Round(
        lens_B, torch.tensor(rows), torch.tensor(anchors), lens_B + K, sum(lens), tuple(map(str, range(len(lens))))
    )


def test_a_replay_drafts_the_rounds_blocks_and_padding_touches_no_request(
    layout: BlockLayout, table: torch.Tensor
) -> None:
    """Rounds of several sizes in turn: nothing of an earlier, larger one may be left in a padded row."""
    runner = Runner()
    graphs = DraftGraphs(runner, layout)
    rounds = (
        a_round([11, 12, 13, 14, 15], [3, 30, 7, 0, 12], [4, 2, 6, 1, 5]),
        a_round([21, 22, 23], [5, 9, 8], [2, 6, 3]),
        a_round([31], [17], [5]),
        a_round([41, 42], [1, 2], [3, 1]),
    )
    for round_, size in zip(rounds, (5, 5, 1, 2), strict=True):
        assert graphs.replay(round_)
        seen, n = runner.seen, round_.num_requests
        assert seen.batch_size == size
        ids_BK, positions_BK, slots_BK = layout.blocks(n)
        for i, (anchor, length, row) in enumerate(
            zip(round_.anchor_B.tolist(), round_.seq_lens_B.tolist(), round_.rows_B.tolist(), strict=True)
        ):
            assert ids_BK[i].tolist() == [anchor] + [MASK] * (K - 1)
            assert positions_BK[i].tolist() == list(range(length, length + K))
            assert slots_BK[i].tolist() == table[row, length : length + K].tolist()
            assert seen.metadata[i] == (row, length + K)
        # What the layers read is what was laid out, at its own address.
        for got, whole in zip((seen.input_ids, seen.positions, seen.out_cache_loc), layout.blocks(size), strict=True):
            assert got.shape == (size * K,)
            assert got.data_ptr() == whole.data_ptr()
        assert seen.metadata[n:] == [(0, K)] * (size - n)
        assert not seen.out_cache_loc[n * K :].any(), "a padded row writes to a slot of a request"


def test_a_round_of_more_requests_than_the_largest_graph_holds_is_not_drafted(layout: BlockLayout) -> None:
    runner = Runner()
    graphs = DraftGraphs(runner, layout)
    six = list(range(6))
    assert not graphs.replay(a_round(six, six, six))
    assert runner.seen is None


def test_the_replay_counts_in_sglangs_timer(layout: BlockLayout) -> None:
    runner, categories = Runner(), []

    @contextlib.contextmanager
    def wrap(metadata: dict[str, str]) -> Any:
        assert runner.seen is None
        yield
        assert runner.seen is not None
        categories.append(metadata["category"])

    runner.device_timer = SimpleNamespace(wrap=wrap)  # type: ignore[assignment]
    assert DraftGraphs(runner, layout).replay(a_round([1], [2], [3]))
    assert categories == ["target_verify"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"backend": Backend.BREAKABLE}, False),
        ({"backend": Backend.DISABLED}, False),
        ({"overlap": True}, False),
        ({"pdmux": True}, False),
        ({"counts": True}, False),
    ],
)
def test_which_settings_leave_the_replays_to_us(
    changed: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"backend": Backend.FULL, "overlap": False, "pdmux": False, "counts": False, **changed}
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=settings["backend"])))
    overlap = SimpleNamespace(enable_two_batch_overlap=settings["overlap"])
    monkeypatch.setattr(draft_graphs, "get_exec", lambda: SimpleNamespace(graph=graph, overlap=overlap))
    monkeypatch.setattr(draft_graphs, "get_disagg", lambda: SimpleNamespace(enable_pdmux=settings["pdmux"]))
    monkeypatch.setattr(draft_graphs, "counts_real_tokens", lambda: settings["counts"])
    assert draft_graphs.serve() is expected
