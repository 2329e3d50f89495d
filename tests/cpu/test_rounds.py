"""Between SGLang's batch and the records: reading a round, opening its block, handing the result back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglang_dflash_kernels as kernels
from sglang_dflash.buffers import Buffers
from sglang_dflash.draft.block import BlockLayout
from sglang_dflash.records import Accepted, Verified

CPU = torch.device("cpu")
K = 6


@pytest.fixture
def rounds() -> Any:
    from sglang_dflash.host import rounds

    return rounds


def decode_batch(rounds: Any, **fields: Any) -> Any:
    bonus, lens = torch.tensor([7, 8]), torch.tensor([4, 9])
    batch = SimpleNamespace(
        spec_info=rounds.next_input(bonus, lens),
        seq_lens=lens,
        seq_lens_cpu=torch.tensor([3, 9]),
        req_pool_indices=torch.tensor([2, 1]),
        reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")],
        sampling_info=SimpleNamespace(is_all_greedy=True),
    )
    return SimpleNamespace(**vars(batch) | fields)


def test_a_round_is_read_from_the_batch(rounds: Any) -> None:
    batch = decode_batch(rounds)
    round_ = rounds.read(batch, K, draws=True)
    assert round_.seq_lens_B is batch.seq_lens
    assert round_.rows_B is batch.req_pool_indices
    assert round_.anchor_B.tolist() == [7, 8]
    assert round_.rids == ("a", "b")
    assert round_.num_requests == 2
    # The host's lengths and a whole block more; the scheduler's own tensor stays.
    assert round_.seq_lens_bound_cpu_B.tolist() == [3 + K, 9 + K]
    assert round_.seq_lens_bound_sum == 12 + 2 * K
    assert batch.seq_lens_cpu.tolist() == [3, 9]


@pytest.mark.parametrize(
    ("greedy", "seed", "expected"), [(True, None, None), (False, 1, None), (False, None, [0.0, 0.5])]
)
def test_the_temperature_of_draws(rounds: Any, greedy: bool, seed: int | None, expected: list[float] | None) -> None:
    """SGLang gives a greedy request temperature 1 and top-k 1."""
    info = SimpleNamespace(
        is_all_greedy=greedy,
        sampling_seed=seed,
        top_ks=torch.tensor([1, 1 << 30]),
        temperatures=torch.tensor([[1.0], [0.5]]),
    )
    temperature_B = rounds.read(decode_batch(rounds, sampling_info=info), K, draws=True).temperature_B
    assert (temperature_B if temperature_B is None else temperature_B.tolist()) == expected
    assert rounds.read(decode_batch(rounds, sampling_info=info), K, draws=False).temperature_B is None


def test_without_lengths_on_the_host_the_reserved_slots_bound_them(rounds: Any) -> None:
    batch = decode_batch(rounds, seq_lens_cpu=None)
    batch.spec_info.nxt_kv_lens_cpu, batch.spec_info.nxt_kv_lens_sum = torch.tensor([20, 24]), 44
    round_ = rounds.read(batch, K, draws=True)
    assert round_.seq_lens_bound_cpu_B.tolist() == [20, 24]
    assert round_.seq_lens_bound_sum == 44


def test_a_batch_of_another_algorithm_is_a_bug(rounds: Any) -> None:
    with pytest.raises(AssertionError, match="a decode batch carries NoneType"):
        rounds.read(decode_batch(rounds, spec_info=None), K, draws=True)


def test_opening_a_block_plans_its_slots(rounds: Any) -> None:
    asked: dict[str, Any] = {}

    def plan(**arguments: Any) -> str:
        asked.update(arguments)
        return "the plan"

    layout = BlockLayout(kernels.select(CPU), Buffers(2, K, CPU), torch.arange(3 * 30).view(3, 30).to(torch.int32), 3)
    round_ = rounds.read(decode_batch(rounds), K, draws=True)
    layout.fill(round_.anchor_B, round_.seq_lens_B, round_.rows_B)
    block = rounds.blocks(round_, layout, SimpleNamespace(plan=plan))
    assert block.plan == "the plan"
    assert block.ids_BK.tolist() == [[7] + [3] * (K - 1), [8] + [3] * (K - 1)]
    assert block.positions_BK[:, 0].tolist() == [4, 9]
    assert block.slots_BK[:, 0].tolist() == [60 + 4, 30 + 9]
    assert asked["req_pool_indices"] is round_.rows_B
    assert asked["seq_lens"] is round_.seq_lens_B
    assert asked["seq_lens_cpu"] is round_.seq_lens_bound_cpu_B
    assert asked["write_virtual"].tolist() == block.slots_BK.flatten().tolist()
    assert asked["read_extent"] == K


def test_prompt_positions_follow_the_cached_prefix(rounds: Any) -> None:
    batch = SimpleNamespace(prefix_lens=[0, 5, 128], extend_lens=[3, 1, 2])
    positions_N = rounds.prompt_positions(batch, CPU)
    assert positions_N.tolist() == [0, 1, 2, 5, 128, 129]
    assert positions_N.dtype == torch.int64
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        rounds.prompt_positions(SimpleNamespace(prefix_lens=[0], extend_lens=[3, 1]), CPU)


def test_the_result_of_a_round(rounds: Any) -> None:
    width = 4
    accepted = Accepted(
        commit_B=torch.tensor([2, 4], dtype=torch.int32),
        bonus_B=torch.tensor([12, 24]),
        tokens_BW=torch.tensor([[11, 12, 0, 0], [21, 22, 23, 24]]),
        new_lens_B=torch.tensor([6, 13]),
    )
    forward = SimpleNamespace(
        logits_output=SimpleNamespace(next_token_logits="large"),
        can_run_cuda_graph=True,
        routed_experts_output="experts",
        indexer_topk_output="topk",
    )
    batch = SimpleNamespace(return_logprob=False)
    result = rounds.result(batch, accepted, Verified(torch.empty(0), None, width, forward))
    # As SGLang's scheduler reads it: rows of the result's own width, of which the first accept_lens count.
    rows = result.next_token_ids.view(-1, result.speculative_num_draft_tokens).tolist()
    assert [row[:n] for row, n in zip(rows, result.accept_lens.tolist(), strict=True)] == [[11, 12], [21, 22, 23, 24]]
    assert result.new_seq_lens.tolist() == [6, 13]
    assert result.next_draft_input.bonus_tokens.tolist() == [12, 24]
    assert result.next_draft_input.new_seq_lens.tolist() == [6, 13]
    assert (result.logits_output, result.can_run_cuda_graph) == (forward.logits_output, True)
    assert result.logits_output.next_token_logits is None, "held until the round after the next"
    assert (result.routed_experts_output, result.indexer_topk_output) == ("experts", "topk")


def test_the_result_of_an_idle_round(rounds: Any) -> None:
    result = rounds.idle_result(CPU, K)
    assert result.speculative_num_draft_tokens == K
    for tensor in (result.next_token_ids, result.accept_lens, result.new_seq_lens):
        assert tensor.shape == (0,)
    assert rounds.read(decode_batch(rounds, spec_info=result.next_draft_input, reqs=[]), K, draws=True).rids == ()
