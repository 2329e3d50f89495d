"""Anchors, what a block sees, and the loss, against loops over blocks and slots."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dflash.train import blocks, evaluate, loss

BLOCK_SIZE = 4


def draw(num_anchors: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, blocks.Blocks]:
    ids_BS = torch.arange(100, 132).repeat(3, 1) + torch.tensor([[0], [1000], [2000]])
    num_prompt_B, lengths_B = torch.tensor([5, 20, 3]), torch.tensor([32, 24, 6])
    generator = torch.Generator().manual_seed(seed)
    return (
        ids_BS,
        num_prompt_B,
        lengths_B,
        blocks.draw(ids_BS, num_prompt_B, lengths_B, num_anchors, BLOCK_SIZE, generator),
    )


def test_anchors_are_answer_tokens_with_a_successor() -> None:
    _, num_prompt_B, lengths_B, drawn = draw(8)
    for row in range(3):
        live = drawn.valid_BAK[row].any(-1)
        anchors = drawn.anchors_BA[row][live].tolist()
        eligible = range(int(num_prompt_B[row]), int(lengths_B[row]) - 1)
        assert len(anchors) == min(8, len(eligible))
        assert anchors == sorted(set(anchors)), "ascending, each once"
        assert set(anchors) <= set(eligible)
        assert drawn.anchors_BA[row].tolist() == sorted(drawn.anchors_BA[row].tolist())


def test_anchors_are_drawn_anew_and_again_the_same() -> None:
    assert draw(4, seed=1)[3].anchors_BA.tolist() == draw(4, seed=1)[3].anchors_BA.tolist()
    assert draw(4, seed=1)[3].anchors_BA.tolist() != draw(4, seed=2)[3].anchors_BA.tolist()
    every = {anchor for seed in range(40) for anchor in draw(4, seed)[3].anchors_BA[0].tolist()}
    assert every == set(range(5, 31)), "the first answer token too"


def test_slot_k_is_labelled_with_the_token_k_places_after_the_anchor() -> None:
    ids_BS, _, lengths_B, drawn = draw(8)
    for row in range(3):
        for anchor, labels, valid in zip(drawn.anchors_BA[row], drawn.labels_BAK[row], drawn.valid_BAK[row]):
            assert not valid[0]
            if not valid.any():
                continue
            for k in range(BLOCK_SIZE):
                inside = int(anchor) + k < int(lengths_B[row])
                assert bool(valid[k]) == (inside and k > 0)
                if inside:
                    assert labels[k] == ids_BS[row, int(anchor) + k]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_visible(causal: bool, window: int | None) -> None:
    _, _, _, drawn = draw(3)
    num_tokens = 32
    sees = blocks.visible(drawn.anchors_BA, num_tokens, BLOCK_SIZE, causal, window)
    assert sees.shape == (3, 3 * BLOCK_SIZE, num_tokens + 3 * BLOCK_SIZE)
    for row in range(3):
        for a in range(3):
            anchor = int(drawn.anchors_BA[row, a])
            for k in range(BLOCK_SIZE):
                position, got = anchor + k, sees[row, a * BLOCK_SIZE + k]
                for s in range(num_tokens):
                    assert bool(got[s]) == (s < anchor and (window is None or position - s < window))
                for other in range(3):
                    for slot in range(BLOCK_SIZE):
                        expected = other == a and (not causal or slot <= k)
                        expected = expected and (window is None or abs(k - slot) < window)
                        assert bool(got[num_tokens + other * BLOCK_SIZE + slot]) == expected


def test_score_in_chunks_is_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_ROWS", 7)
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, 8, requires_grad=True)
    head, labels = torch.randn(11, 8), torch.randint(11, (5, 3))
    scores = loss.score(hidden, head, labels)
    expected = torch.nn.functional.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(scores.nll_NJ.flatten(), expected)
    assert scores.right_NJ.tolist() == ((hidden @ head.T).argmax(-1) == labels).tolist()
    (grad,) = torch.autograd.grad(scores.nll_NJ.sum(), hidden)
    (expected_grad,) = torch.autograd.grad(expected.sum(), hidden)
    torch.testing.assert_close(grad, expected_grad)


def test_weights() -> None:
    valid = torch.tensor([[True, True, True], [True, True, False]])
    decay = loss.decay_weights(valid, gamma=7.0)
    assert decay[0].tolist() == pytest.approx([1.0, math.exp(-1 / 7), math.exp(-2 / 7)])
    assert decay[1, 2] == 0
    nll = torch.tensor([[0.1, 0.7, 2.0], [0.5, 0.2, 0.3]])
    got = loss.dpace_weights(nll, valid, smoothing=0.5)
    for row in range(2):
        q = [0.5 * math.exp(-float(n)) + 0.5 if v else 0.0 for n, v in zip(nll[row], valid[row])]
        for j in range(3):
            expected = sum(math.prod(q[: m + 1]) for m in range(j, 3)) if valid[row, j] else 0.0
            assert float(got[row, j]) == pytest.approx(expected)
    assert float(loss.weighted(nll, decay)) == pytest.approx(float((nll * decay).sum() / decay.sum()))


def test_acceptance_length() -> None:
    right = torch.tensor([[True, True, False, True], [False, True, True, True], [True, True, True, True]])
    valid = torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]])
    # Slot 1: 2 of 3 right; slot 2: 2 of 2; slot 3: 0 of 1, the third block's is not judged.
    assert evaluate.acceptance_length(right, valid) == pytest.approx(1 + 2 / 3 + 2 / 3)
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    assert evaluate.acceptance_length(torch.cat([right, nothing]), torch.cat([valid, nothing])) == pytest.approx(7 / 3)
    assert evaluate.acceptance_length(nothing, nothing) == 1
