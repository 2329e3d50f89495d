"""`round_fp8`, `rms_norm_fp8` and `silu_mul_fp8`: rows in FP8 with a scale each."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dflash_kernels import contracts

FP8_MAX = 448.0
EPS = 1e-5
SHAPES = [(1, 16), (3, 576), (2, 1000), (5, 4096)]


def rounded(values):
    """A row of numbers in float64: its FP8 numbers and its scale, one number after the other."""
    scale = max(max(abs(value) for value in values), contracts.FP8_LEAST) / FP8_MAX
    return [float(torch.tensor(value / scale).to(torch.float8_e4m3fn)) for value in values], scale


def naive_norm(x, residual, weight):
    """Rows in FP8, their scales, and the sums."""
    rows, scales, sums = [], [], []
    for n in range(len(x)):
        row = [a + b for a, b in zip(x[n], residual[n], strict=True)]
        root = 1 / math.sqrt(sum(value * value for value in row) / len(row) + EPS)
        out, scale = rounded([value * root * w for value, w in zip(row, weight, strict=True)])
        rows, scales, sums = [*rows, out], [*scales, scale], [*sums, row]
    return torch.tensor(rows), torch.tensor(scales), torch.tensor(sums)


def naive_silu_mul(gate_up):
    rows, scales = [], []
    for row in gate_up:
        half = len(row) // 2
        out, scale = rounded([g / (1 + math.exp(-g)) * u for g, u in zip(row[:half], row[half:], strict=True)])
        rows, scales = [*rows, out], [*scales, scale]
    return torch.tensor(rows), torch.tensor(scales)


def grid(generator, *shape):
    """FP8 numbers, none a power of two: Triton's interpreter rounds to FP8 wrongly just below these."""
    mantissa = torch.randint(9, 15, shape, generator=generator) / 8
    sign = 2.0 * torch.randint(0, 2, shape, generator=generator) - 1
    numbers = sign * mantissa * 2.0 ** torch.randint(-5, 8, shape, generator=generator)
    numbers[..., 0] = FP8_MAX
    return numbers


def check(out, scale, want, want_scale, exact):
    torch.testing.assert_close(scale.cpu().double(), want_scale.double(), rtol=1e-5, atol=0)
    if exact:
        assert torch.equal(out.cpu().double(), want.double())
        return
    # Float32 may fall on the other side of the middle of two FP8 numbers: the next one, 2^-3 away, or 2^-9 among the
    # smallest. Rarely.
    far = (out.cpu().double() - want.double()).abs()
    assert (far <= want.double().abs().clamp(min=2.0**-6) * 2.0**-3).all()
    assert (far > 0).double().mean() < 1e-3


def skip_where_rounding_is_wrong(ops, device):
    if ops.name == "triton" and device.type == "cpu":
        pytest.skip("Triton's interpreter rounds to FP8 wrongly")


def run(op, output, poison, device, x, columns, dtype):
    """An op of one input on rows of a wider buffer, into rows of a wider one: `columns` of them, and their scales."""
    wide = torch.full((x.shape[0], x.shape[1] + 8), 1e4, dtype=dtype, device=device)
    wide[:, : x.shape[1]] = x
    scale = poison.output(x.shape[0], dtype=torch.float32)
    fp8 = torch.full((x.shape[0], columns + 16), 3.0, device=device).to(torch.float8_e4m3fn)
    op(wide[:, : x.shape[1]], **{output: fp8[:, :columns]}, scale_N=scale)
    poison.check_surroundings()
    assert (fp8[:, columns:].float() == 3.0).all()
    assert torch.equal(wide[:, : x.shape[1]].cpu(), x.to(dtype)), "x was written"
    return fp8[:, :columns].float(), scale


def naive_round(x):
    rows, scales = zip(*(rounded(row) for row in x), strict=True)
    return torch.tensor(rows), torch.tensor(scales)


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (2, 20480)])
def test_round_of_exact_numbers(ops, poison, device, rows, columns):
    generator = torch.Generator().manual_seed(rows + columns)
    x = grid(generator, rows, columns) * 2.0 ** torch.arange(rows)[:, None]
    out, scale = run(ops.round_fp8, "out_NH", poison, device, x, columns, torch.bfloat16)
    check(out, scale, *naive_round(x.tolist()), exact=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round(ops, poison, device, dtype):
    skip_where_rounding_is_wrong(ops, device)
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(7, 640, generator=generator) * 2.0 ** torch.arange(-9, 5, 2)[:, None]).to(dtype).float()
    out, scale = run(ops.round_fp8, "out_NH", poison, device, x, 640, dtype)
    check(out, scale, *naive_round(x.tolist()), exact=False)


def run_norm(ops, poison, device, x, residual, weight, dtype):
    """With a residual, or None for none; rows, scales, and the residual."""
    kept = None
    if residual is not None:
        kept = poison.output(*residual.shape, dtype=dtype)
        kept.copy_(residual)

    def norm(x_NH, **outputs):
        ops.rms_norm_fp8(x_NH, kept, weight.to(device, dtype), EPS, **outputs)

    return *run(norm, "out_NH", poison, device, x, x.shape[1], dtype), kept


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_norm_of_exact_numbers(ops, poison, device, rows, columns, add):
    """Every number of a row has one magnitude, so that nothing but the weight's FP8 numbers is left."""
    generator = torch.Generator().manual_seed(rows + columns)
    sign = 2.0 * torch.randint(0, 2, (rows, columns), generator=generator) - 1
    total = sign * 2.0 ** torch.arange(rows)[:, None]
    residual = torch.randint(-8, 9, (rows, columns), generator=generator).float() if add else torch.zeros_like(total)
    weight = grid(generator, columns)
    want = naive_norm((total - residual).tolist(), residual.tolist(), weight.tolist())
    out, scale, kept = run_norm(
        ops, poison, device, total - residual, residual if add else None, weight, torch.bfloat16
    )
    check(out, scale, *want[:2], exact=True)
    if add:
        assert torch.equal(kept.cpu().float(), total)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm(ops, poison, device, dtype, add):
    skip_where_rounding_is_wrong(ops, device)
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(7, 640, generator=generator).to(dtype).float() * 2.0**i for i in (0, 2))
    x[3] *= 2.0**-10
    residual[3] *= 2.0**-10
    weight = torch.rand(640, generator=generator).to(dtype).float()
    want = naive_norm(x.tolist(), (residual if add else torch.zeros_like(x)).tolist(), weight.tolist())
    out, scale, kept = run_norm(ops, poison, device, x, residual if add else None, weight, dtype)
    check(out, scale, *want[:2], exact=False)
    if add:
        assert torch.equal(kept.cpu(), (x + residual).to(dtype))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_silu_mul_of_exact_numbers(ops, poison, device, rows, columns):
    """Gates so large that silu is the identity, and powers of two."""
    generator = torch.Generator().manual_seed(rows + columns)
    gate = 2.0 ** torch.randint(5, 7, (rows, columns), generator=generator)
    gate[:, 0] = 64
    up = grid(generator, rows, columns) * 2.0 ** torch.arange(rows)[:, None]
    gate_up = torch.cat([gate, up], dim=1)
    out, scale = run(ops.silu_mul_fp8, "out_NI", poison, device, gate_up, columns, torch.bfloat16)
    check(out, scale, *naive_silu_mul(gate_up.tolist()), exact=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_silu_mul(ops, poison, device, dtype):
    skip_where_rounding_is_wrong(ops, device)
    generator = torch.Generator().manual_seed(1)
    gate_up = (torch.randn(7, 1280, generator=generator) * 2).to(dtype).float()
    out, scale = run(ops.silu_mul_fp8, "out_NI", poison, device, gate_up, 640, dtype)
    check(out, scale, *naive_silu_mul(gate_up.tolist()), exact=False)


def run_all(ops, x, weight, out, scale):
    """Each op on x, whose second half is silu_mul's up projection; after each its name."""
    ops.round_fp8(x, out_NH=out, scale_N=scale)
    yield "round_fp8"
    ops.rms_norm_fp8(x, None, weight, EPS, out_NH=out, scale_N=scale)
    yield "rms_norm_fp8"
    ops.silu_mul_fp8(x, out_NI=out[:, : out.shape[1] // 2], scale_N=scale)
    yield "silu_mul_fp8"


def test_rows_of_zeros(ops, device):
    x, weight = torch.zeros(2, 32, device=device, dtype=torch.bfloat16), torch.ones(32, device=device)
    out, scale = torch.full((2, 32), 7.0, device=device).to(torch.float8_e4m3fn), torch.zeros(2, device=device)
    for name in run_all(ops, x, weight, out, scale):
        assert not out[:, :16].float().any(), name
        assert (scale > 0).all(), name
        out.copy_(torch.full((2, 32), 7.0))
        scale.zero_()


def test_no_rows(ops, device):
    x, weight = torch.empty(0, 32, device=device), torch.ones(32, device=device)
    assert len(list(run_all(ops, x, weight, x.to(torch.float8_e4m3fn), torch.empty(0, device=device)))) == 3


def test_shapes_that_do_not_fit_are_bugs(ops, device):
    x, out = torch.zeros(2, 32, device=device), torch.zeros(2, 32, device=device).to(torch.float8_e4m3fn)
    weight, scale = torch.ones(32, device=device), torch.zeros(2, device=device)
    with pytest.raises(AssertionError, match=r"residual_NH: expected shape \[2, 32\], got \[1, 32\]"):
        ops.rms_norm_fp8(x, x[:1], weight, EPS, out_NH=out, scale_N=scale)
    with pytest.raises(AssertionError, match=r"out_NH: expected one of .*float8_e4m3fn.*, got torch.float32"):
        ops.rms_norm_fp8(x, None, weight, EPS, out_NH=x, scale_N=scale)
    with pytest.raises(AssertionError, match=r"gate_up_NI: expected shape \[2, 64\], got \[2, 32\]"):
        ops.silu_mul_fp8(x, out_NI=out, scale_N=scale)
