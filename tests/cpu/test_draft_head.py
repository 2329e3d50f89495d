"""The draft head: the target's own, or a copy in FP8 that is close to it and follows its updates; all rows or some."""

from __future__ import annotations

import pytest
import torch

import sglang_dflash_kernels as kernels
from sglang_dflash.draft import head

V, H = 64, 48
OPS = kernels.select(torch.device("cpu"))
# Neither sorted nor a range, the first and the last token in it; as many as FP8 products take.
TOKENS_S = torch.tensor([63, 5, 0, 17, 40, 41, 2, 9, 33, 8, 62, 1, 30, 29, 50, 11])


@pytest.fixture
def weight_VH() -> torch.Tensor:
    torch.manual_seed(0)
    # Rows of very different size: a scale for each token is what keeps the small ones.
    return (torch.randn(V, H) * torch.logspace(-3, 1, V)[:, None]).to(torch.bfloat16)


@pytest.fixture(params=[5, 40], ids=["a few rows", "many rows"])
def hidden_NH(request: pytest.FixtureRequest) -> torch.Tensor:
    torch.manual_seed(1)
    return (torch.randn(request.param, H) * torch.logspace(-2, 2, request.param)[:, None]).to(torch.bfloat16)


def test_the_dense_head_is_the_targets_weight(weight_VH: torch.Tensor, hidden_NH: torch.Tensor) -> None:
    made, out = head.make("dense", weight_VH, OPS), torch.empty(hidden_NH.shape[0], V, dtype=torch.bfloat16)
    assert made.weight_VH is weight_VH
    assert made.tokens_S is None
    assert torch.equal(made(hidden_NH), hidden_NH @ weight_VH.T)
    assert made(hidden_NH.float(), out=out) is out
    assert torch.equal(out, hidden_NH @ weight_VH.T)


def worst_error(made: head.Head, weight_VH: torch.Tensor, hidden_NH: torch.Tensor) -> float:
    """Of a logit, relative to the norms of its hidden state and its token's row."""
    exact_NV = hidden_NH.double() @ weight_VH.double().T
    scale_NV = torch.outer(hidden_NH.double().norm(dim=1), weight_VH.double().norm(dim=1))
    return float(((made(hidden_NH).double() - exact_NV).abs() / scale_NV).max())


def test_the_fp8_copy_is_close_for_tokens_of_every_size(weight_VH: torch.Tensor, hidden_NH: torch.Tensor) -> None:
    made = head.make("fp8", weight_VH, OPS)
    assert made.tokens_S is None
    # FP8 E4M3 keeps 3 bits after the point: a factor of each product is off by at most 1/16.
    assert 0 < worst_error(made, weight_VH, hidden_NH) < 2 / 16
    out = torch.empty(hidden_NH.shape[0], V, dtype=torch.bfloat16)
    assert torch.equal(made(hidden_NH, out=out), made(hidden_NH))


def test_a_row_of_zeros_stays_zero(weight_VH: torch.Tensor) -> None:
    weight_VH[3] = 0
    logits_NV = head.make("fp8", weight_VH, OPS)(torch.zeros(2, H, dtype=torch.bfloat16))
    assert not logits_NV.any()


def test_the_copy_follows_an_update_in_place(
    weight_VH: torch.Tensor, hidden_NH: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_ROWS", 24)  # three parts, the last one smaller
    made = head.make("fp8", weight_VH, OPS)
    addresses = addresses_of(made)
    weight_VH.copy_(weight_VH.flip(0))
    assert worst_error(made, weight_VH, hidden_NH) > 0.5
    made.refresh()
    assert worst_error(made, weight_VH, hidden_NH) < 2 / 16
    assert addresses_of(made) == addresses, "captured graphs hold them"


def addresses_of(made: head.Head) -> list[int]:
    return [value.data_ptr() for value in vars(made).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(("precision", "bound"), [("dense", 1e-2), ("fp8", 2 / 16)])
def test_a_subsets_logits_are_its_tokens_in_its_order_and_follow_an_update_in_place(
    weight_VH: torch.Tensor, hidden_NH: torch.Tensor, precision: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_ROWS", 6)  # three parts, the last one smaller
    made = head.make(precision, weight_VH, OPS, TOKENS_S)
    assert made.tokens_S is not None
    assert torch.equal(made.tokens_S, TOKENS_S)
    assert made.weight_VH is weight_VH, "whole: proposers read the vocabulary's size"
    assert made(hidden_NH).shape == (hidden_NH.shape[0], len(TOKENS_S))
    assert worst_error(made, weight_VH[TOKENS_S], hidden_NH) < bound
    out = torch.empty(hidden_NH.shape[0], len(TOKENS_S), dtype=torch.bfloat16)
    addresses = addresses_of(made)
    assert torch.equal(made(hidden_NH, out=out), made(hidden_NH))
    weight_VH.copy_(weight_VH.flip(0))
    assert worst_error(made, weight_VH[TOKENS_S], hidden_NH) > 0.5
    made.refresh()
    assert worst_error(made, weight_VH[TOKENS_S], hidden_NH) < bound
    assert addresses_of(made) == addresses, "captured graphs hold them"


def test_a_subset_that_fp8_products_do_not_take_is_refused(weight_VH: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"multiples of 16, got torch\.bfloat16 \[15, 48\]; .* map a multiple of 16"):
        head.make("fp8", weight_VH, OPS, TOKENS_S[1:])


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (64, 48)), (torch.bfloat16, (60, 48)), (torch.bfloat16, (64, 40))]
)
def test_a_head_that_fp8_products_do_not_take_is_refused(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected a bfloat16 head whose sides are multiples of 16, got"):
        head.make("fp8", torch.zeros(shape, dtype=dtype), OPS)


def test_a_card_without_fp8_products_is_refused(weight_VH: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"expected a GPU of compute capability 8\.9 or more, .*, got 8\.0; leave"):
        head.make("fp8", weight_VH.as_subclass(OnCuda), OPS)
    assert isinstance(head.make("dense", weight_VH.as_subclass(OnCuda), OPS), head.DenseHead)
