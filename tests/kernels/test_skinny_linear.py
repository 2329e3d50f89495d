from __future__ import annotations

import pytest
import torch

from sglang_dflash_kernels import SKINNY_MAX_ROWS, SKINNY_MAX_SPLITS, SKINNY_TILE, skinny_splits

# One program a tile and several, shares of unequal length, and more tiles than a card has multiprocessors.
SHAPES = [(64, 64), (192, 576), (64, 1088), (128, 2048), (8512, 64)]


def naive(x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """One number after the other, in float64."""
    rows, weights = x_NI.cpu().double(), weight_OI.cpu().double()
    want = torch.stack([torch.stack([row.dot(weight) for weight in weights]) for row in rows])
    return want if bias_O is None else want + bias_O.cpu().double()


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request, ops, device) -> torch.dtype:
    if ops.name == "triton" and device.type == "cpu" and request.param == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as whole numbers")
    return request.param


@pytest.fixture
def whole(device, dtype):
    """Whole numbers so small that sums of products are exact in bfloat16 too: nothing is rounded anywhere."""
    return lambda *shape, high=1: torch.randint(-high, high + 1, shape, device=device).to(dtype)


def run(ops, poison, device, x_NI, weight_OI, bias_O=None, splits=None) -> torch.Tensor:
    (outputs, inputs), num_rows = weight_OI.shape, x_NI.shape[0]
    splits = splits or skinny_splits(outputs, inputs)
    out_NO = poison.output(num_rows, outputs, dtype=x_NI.dtype)
    arrived_T = torch.zeros(outputs // SKINNY_TILE, dtype=torch.int32, device=device)
    partial_SNO = torch.full((splits, num_rows, outputs), float("nan"), device=device)
    for _ in range(2):  # the second finds the counters as the first left them
        out_NO.fill_(float("nan"))
        ops.skinny_linear(x_NI, weight_OI, bias_O, out_NO=out_NO, partial_SNO=partial_SNO, arrived_T=arrived_T)
        assert not arrived_T.any()
    poison.check_surroundings()
    return out_NO.cpu().double()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 15, 16, 33, 64])
def test_matches_twin(ops, poison, device, whole, num_rows, outputs, inputs):
    """Sums of up to 2,048 products of -1, 0 and 1 stay below 257: bfloat16 has them all."""
    torch.manual_seed(num_rows + outputs + inputs)
    x_NI, weight_OI, bias_O = whole(num_rows, inputs), whole(outputs, inputs), whole(outputs, high=9)
    want = naive(x_NI, weight_OI, bias_O)
    assert want.abs().max() <= 256
    assert torch.equal(run(ops, poison, device, x_NI, weight_OI, bias_O), want)


@pytest.mark.parametrize(("outputs", "inputs"), [(128, 2048), (192, 576)])
def test_rounds_once(ops, poison, device, dtype, outputs, inputs):
    torch.manual_seed(outputs)
    x_NI = torch.randn(16, inputs, device=device).to(dtype)
    weight_OI = torch.randn(outputs, inputs, device=device).to(dtype)
    want = naive(x_NI, weight_OI, None)
    # Half a unit of the dtype, and float32's noise where products cancel.
    size = x_NI.cpu().double().abs() @ weight_OI.cpu().double().abs().T
    off = (run(ops, poison, device, x_NI, weight_OI) - want).abs()
    assert (off <= torch.finfo(dtype).eps / 2 * want.abs() + 2.0**-20 * size).all()


def test_every_share_counts(ops, poison, device, dtype):
    """Both ends of both shares."""
    outputs, inputs = 64, 1088
    weight_OI = torch.zeros(outputs, inputs, device=device)
    for at, factor in ((0, 1), (575, 2), (576, 4), (1087, 8)):
        weight_OI[:, at] = factor
    x_NI = torch.arange(1.0, 4.0, device=device)[:, None].expand(3, inputs).to(dtype)
    got = run(ops, poison, device, x_NI, weight_OI.to(dtype))
    assert torch.equal(got, 15 * torch.arange(1.0, 4.0, dtype=torch.float64)[:, None].expand(3, outputs))


@pytest.mark.parametrize("splits", [3, 5, SKINNY_MAX_SPLITS])
def test_any_number_of_parts(ops, poison, device, whole, splits):
    """17 steps: shares of six, six and five, of four and of one, and shares of two with parts that get nothing."""
    x_NI, weight_OI = whole(5, 1088), whole(128, 1088)
    assert torch.equal(run(ops, poison, device, x_NI, weight_OI, splits=splits), naive(x_NI, weight_OI, None))


# In float32 2^24 + 1 is 2^24. Three parts of 128: 2^24, two and -2^24; or of these the second last.
@pytest.mark.parametrize(
    ("factors", "want"),
    [
        ({0: 4096, 128: 1, 192: 1, 256: -4096}, 2),
        ({0: 4096, 128: 1, 256: -4096}, 0),
        ({0: 4096, 128: -4096, 256: 1}, 1),
    ],
)
def test_parts_are_added_in_their_order(ops, poison, device, dtype, factors, want):
    x_NI, weight_OI = torch.zeros(16, 384, device=device), torch.zeros(64, 384, device=device)
    for at, factor in factors.items():
        x_NI[:, at], weight_OI[:, at] = abs(factor), factor
    got = run(ops, poison, device, x_NI.to(dtype), weight_OI.to(dtype), splits=3)
    assert torch.equal(got, torch.full((16, 64), want, dtype=torch.float64))


@pytest.mark.parametrize(("outputs", "inputs", "splits"), [(192, 1088, 1), (192, 1088, 3), (8512, 2048, 2)])
def test_a_row_has_its_bits_among_any_number(ops, poison, device, dtype, outputs, inputs, splits):
    if ops.name != "triton" or device.type != "cuda":
        pytest.skip("PyTorch adds up by the number of rows")
    x_NI, weight_OI = (torch.randn(rows, inputs, device=device).to(dtype) for rows in (64, outputs))
    alone = [run(ops, poison, device, row, weight_OI, splits=splits) for row in x_NI.split(1)]
    for num_rows in (16, 33, 64):
        among = [run(ops, poison, device, rows, weight_OI, splits=splits) for rows in x_NI.split(num_rows)]
        assert torch.equal(torch.cat(among), torch.cat(alone))


def test_rows_of_a_wider_buffer(ops, poison, device, whole):
    wide, weight_OI = whole(5, 256), whole(64, 128)
    x_NI = wide[:, 64:192]
    assert torch.equal(run(ops, poison, device, x_NI, weight_OI), naive(x_NI, weight_OI, None))


@pytest.mark.parametrize(
    ("outputs", "inputs", "splits"),
    [
        (6144, 4096, 1),
        (4096, 4096, 2),
        (24_576, 4096, 1),
        (4096, 12_288, 2),
        (576, 1536, 3),
        (64, 64, 1),
        (64, 65_536, 8),
    ],
)
def test_splits_occupy_a_card(outputs, inputs, splits):
    assert skinny_splits(outputs, inputs) == splits


def test_what_it_does_not_take_is_a_bug(ops, device, whole):
    x_NI, weight_OI = whole(SKINNY_MAX_ROWS + 1, 64), whole(64, 64)
    scratch = {"partial_SNO": torch.zeros(1, 65, 64, device=device), "arrived_T": torch.zeros(1, dtype=torch.int32)}
    with pytest.raises(AssertionError, match="expected 1 to 64 rows, got 65"):
        ops.skinny_linear(x_NI, weight_OI, None, out_NO=x_NI.clone(), **scratch)
    many = {**scratch, "partial_SNO": torch.zeros(SKINNY_MAX_SPLITS + 1, 3, 64, device=device)}
    with pytest.raises(AssertionError, match="partial_SNO: expected 1 to 16 parts, got 17"):
        ops.skinny_linear(x_NI[:3], weight_OI, None, out_NO=x_NI[:3].clone(), **many)
    with pytest.raises(AssertionError, match=r"expected multiples of 64, got shape \[64, 48\]"):
        ops.skinny_linear(x_NI[:3, :48], weight_OI[:, :48], None, out_NO=x_NI[:3].clone(), **scratch)
