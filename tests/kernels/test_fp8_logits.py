from __future__ import annotations

import pytest
import torch

from sglang_dflash_kernels import contracts

PART = contracts.FP8_PART
FP8_MAX = 448.0


def naive(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, scale_V: torch.Tensor) -> torch.Tensor:
    """One logit after the other, parts one after the other, in float64."""
    (num_rows, hidden_size), vocab = hidden_NH.shape, weight_VH.shape[0]
    hidden, weight = hidden_NH.float().cpu(), weight_VH.float().cpu()
    want = torch.zeros(num_rows, vocab, dtype=torch.float64)
    for row in range(num_rows):
        for first in range(0, hidden_size, PART):
            part = hidden[row, first : first + PART]
            scale = max(float(part.abs().max()), 1e-12) / FP8_MAX
            rounded = (part / scale).to(torch.float8_e4m3fn).double()
            for token in range(vocab):
                want[row, token] += scale * float(rounded @ weight[token, first : first + PART].double())
    return want * scale_V.cpu().double()


def inputs(device, num_rows, vocab, hidden_size, hidden_stride=None, exact=True):
    """Rows, parts and tokens of very different sizes: one taken for another shows.

    Exact ones are FP8 numbers times a power of two for each row and part: nothing is rounded. Triton's interpreter
    rounds to FP8 wrongly below powers of two (127.9 becomes 64).
    """
    generator = torch.Generator().manual_seed(num_rows + 100 * vocab + hidden_size)
    hidden_NH = torch.randn(num_rows, hidden_size, generator=generator) * 100
    if exact:
        hidden_NH = hidden_NH.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
        hidden_NH[:, ::PART] = FP8_MAX
    rows, parts = torch.arange(num_rows)[:, None], torch.arange(hidden_size) // PART
    buffer = torch.full((num_rows, hidden_stride or hidden_size), 1e4)
    buffer[:, :hidden_size] = hidden_NH * 2.0 ** (rows - 2 * parts)
    weight_VH = (torch.randn(vocab, hidden_size, generator=generator) * 30).to(torch.float8_e4m3fn)
    scale_V = torch.logspace(-3, 0, vocab)
    return buffer.to(device, torch.bfloat16)[:, :hidden_size], weight_VH.to(device), scale_V.to(device)


def check(ops, poison, hidden_NH, weight_VH, scale_V):
    logits_NV = poison.output(hidden_NH.shape[0], weight_VH.shape[0], dtype=torch.bfloat16)
    ops.fp8_logits(hidden_NH, weight_VH, scale_V, logits_NV=logits_NV)
    poison.check_surroundings()
    want = naive(hidden_NH, weight_VH, scale_V)
    # Relative to the sizes of what is added up: bfloat16 keeps 8 bits, the tensor cores add up FP8 products in 14.
    size_NV = hidden_NH.cpu().double().abs() @ weight_VH.cpu().double().abs().T * scale_V.cpu().double()
    assert ((logits_NV.cpu().double() - want).abs() / size_NV).max() < 2**-7


@pytest.mark.parametrize("num_rows", [1, 7, 15, 16])
def test_matches_twin(ops, poison, device, num_rows):
    check(ops, poison, *inputs(device, num_rows, 130, 512))


def test_a_small_part_has_a_scale_of_its_own(ops, device):
    """By the large part's scale all of the small one would round to zero. Only the small one has weights."""
    hidden_NH = torch.full((2, 2 * PART), 448.0, device=device, dtype=torch.bfloat16)
    hidden_NH[:, :PART] *= 2.0**-20
    weight_VH = torch.zeros(64, 2 * PART, device=device)
    weight_VH[:, :PART] = 1.0
    logits_NV = torch.empty(2, 64, device=device, dtype=torch.bfloat16)
    ops.fp8_logits(hidden_NH, weight_VH.to(torch.float8_e4m3fn), torch.ones(64, device=device), logits_NV=logits_NV)
    assert torch.equal(logits_NV, torch.full_like(logits_NV, PART * 448.0 * 2.0**-20))


def test_rounds_hidden_states(ops, poison, device):
    if ops.name == "triton" and device.type == "cpu":
        pytest.skip("Triton's interpreter rounds to FP8 wrongly")
    check(ops, poison, *inputs(device, 15, 130, 1040, exact=False))


@pytest.mark.parametrize(("vocab", "hidden_size"), [(1, 16), (127, 128), (128, 144), (129, 576), (200, 1040)])
def test_odd_shapes(ops, poison, device, vocab, hidden_size):
    check(ops, poison, *inputs(device, 3, vocab, hidden_size))


def test_rows_of_a_wider_buffer(ops, poison, device):
    check(ops, poison, *inputs(device, 5, 70, 320, hidden_stride=336))


def test_zeros_stay_zero(ops, device):
    hidden_NH, weight_VH, scale_V = inputs(device, 2, 70, 320)
    logits_NV = torch.full((2, 70), 7.0, dtype=torch.bfloat16, device=device)
    ops.fp8_logits(torch.zeros_like(hidden_NH), weight_VH, scale_V, logits_NV=logits_NV)
    assert not logits_NV.any()


def test_more_rows_than_it_takes_are_a_bug(ops, device):
    hidden_NH, weight_VH, scale_V = inputs(device, contracts.FP8_MAX_ROWS + 1, 64, 256)
    with pytest.raises(AssertionError, match="expected 1 to 16 rows, got 17"):
        ops.fp8_logits(hidden_NH, weight_VH, scale_V, logits_NV=hidden_NH.new_empty(17, 64))
