from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash_kernels import top1_workspace
from sglang_dflash_kernels.top1_workspace import SPLIT_LOGITS

# Triton's interpreter computes with numpy, which warns of inf - inf, 1 / 0 and rows of NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

INF, NAN = math.inf, math.nan

# Against float64: exp and a sum of up to 152k terms in float32, in the order of a tree.
CONFIDENCE_RTOL = 1e-5


def naive(row: list[float]) -> tuple[int, float]:
    best = 0
    for index, logit in enumerate(row):
        if math.isnan(row[best]):
            break
        if logit > row[best] or math.isnan(logit):
            best = index
    if math.isnan(row[best]) or math.isinf(row[best]):
        return best, NAN
    return best, 1.0 / math.fsum(math.exp(logit - row[best]) for logit in row)


def check(ops, poison, logits_NV, *, workspace=None):
    num_rows = logits_NV.shape[0]
    tokens_N, confidence_N = poison.output(num_rows), poison.output(num_rows, dtype=torch.float32)
    ops.top1(logits_NV, tokens_N=tokens_N, confidence_N=confidence_N, workspace=workspace)
    poison.check_surroundings()
    assert_matches_twin(logits_NV, tokens_N, confidence_N)


def assert_matches_twin(logits_NV, tokens_N, confidence_N):
    want = [naive(row) for row in logits_NV.double().tolist()]
    assert tokens_N.tolist() == [token for token, _ in want]
    assert tokens_N.tolist() == logits_NV.argmax(dim=1).tolist()
    wanted = torch.tensor([confidence for _, confidence in want], dtype=torch.float64)
    torch.testing.assert_close(confidence_N.cpu().double(), wanted, rtol=CONFIDENCE_RTOL, atol=0, equal_nan=True)


def random_logits(device, num_rows, vocab, dtype, stride=None, scale=3.0):
    """Rows of a buffer whose columns past the vocabulary hold a larger value than any logit."""
    stride = stride or vocab
    generator = torch.Generator().manual_seed(num_rows * 1_000_003 + vocab)
    buffer = torch.full((num_rows, stride), 1e4, dtype=dtype)
    buffer[:, :vocab] = (torch.randn(num_rows, vocab, generator=generator) * scale).to(dtype)
    return buffer.to(device)[:, :vocab]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 7, SPLIT_LOGITS - 1, SPLIT_LOGITS, SPLIT_LOGITS + 1, 9000])
def test_matches_twin(ops, poison, device, vocab, dtype):
    check(ops, poison, random_logits(device, 3, vocab, dtype))


@pytest.mark.parametrize("vocab", [49_152, 151_936, 262_144])
def test_real_vocabularies(ops, poison, device, vocab):
    """Random bfloat16 logits of this many share their maximum often: ties within and across splits."""
    check(ops, poison, random_logits(device, 2, vocab, torch.bfloat16), workspace=top1_workspace(5, device))


@pytest.mark.parametrize("stride", [9000 + 1, 9216])
def test_padded_vocabulary(ops, poison, device, stride):
    check(ops, poison, random_logits(device, 3, 9000, torch.bfloat16, stride))


@pytest.mark.parametrize("num_rows", [1, 15, 31])
def test_odd_row_counts(ops, poison, device, num_rows):
    check(ops, poison, random_logits(device, num_rows, 5000, torch.float32), workspace=top1_workspace(31, device))


def test_near_certain_and_flat_rows(ops, poison, device):
    logits = torch.zeros(3, 10_000, device=device)
    logits[0, 9_999] = 80.0
    logits[1] = -1e4
    check(ops, poison, logits)


def row_of(fill: float, marks: dict[int, float], vocab: int) -> list[float]:
    row = [fill] * vocab
    for index, logit in marks.items():
        row[index] = logit
    return row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_special_rows(ops, poison, device, dtype):
    vocab, later = 2 * SPLIT_LOGITS + 9, SPLIT_LOGITS + 3
    rows = [
        row_of(-INF, {}, vocab),
        row_of(-INF, {later: -2.0}, vocab),
        row_of(-INF, {0: -2.0, later: -2.0}, vocab),
        row_of(0.0, {later: 3.0, later + 1: 3.0, vocab - 1: 3.0}, vocab),
        row_of(0.0, {later: NAN, vocab - 1: NAN}, vocab),
        row_of(0.0, {1: INF, 5: NAN, later: NAN}, vocab),
        row_of(0.0, {5: 1.0, later: INF, vocab - 1: INF}, vocab),
        row_of(-INF, {7: NAN}, vocab),
        row_of(0.0, {7: -0.0}, vocab),
        row_of(NAN, {}, vocab),
    ]
    check(ops, poison, torch.tensor(rows, dtype=dtype, device=device))


@given(
    fill=st.sampled_from([0.0, -INF, -3.5]),
    marks=st.dictionaries(
        st.sampled_from([0, 1, 31, 32, 4095, 4096, 4100, 8191, 8192, 8199]),
        st.sampled_from([-INF, -1.0, 0.0, 2.0, 2.5, INF, NAN]),
    ),
)
def test_any_marks(ops, new_poison, device, fill, marks):
    check(ops, new_poison(), torch.tensor([row_of(fill, marks, 8200)], device=device))


def test_outputs_of_two_dimensions(ops, poison, device):
    """The drafts go straight into columns 1 to K-1 of the block."""
    logits = random_logits(device, 6, 5000, torch.bfloat16)
    tokens_BK, confidence = poison.output(3, 3), poison.output(3, 2, dtype=torch.float32)
    ops.top1(logits, tokens_N=tokens_BK[:, 1:], confidence_N=confidence)
    poison.check_surroundings()
    assert (tokens_BK[:, 0] == -7777).all()
    assert_matches_twin(logits, tokens_BK[:, 1:].flatten(), confidence.flatten())


def test_stale_workspace_does_not_matter(ops, poison, device):
    """A workspace that served a wider vocabulary and better logits before."""
    workspace = top1_workspace(4, device)
    for tensor in workspace:
        tensor.fill_(10_000)
    check(ops, poison, random_logits(device, 4, 5000, torch.float32), workspace=workspace)


def test_no_rows(ops, poison, device):
    check(ops, poison, torch.zeros(0, 5000, device=device), workspace=top1_workspace(0, device))


def test_small_workspace_is_refused(ops, poison, device):
    with pytest.raises(AssertionError, match="workspace: expected room for 3 rows, got 2"):
        check(ops, poison, torch.zeros(3, 50, device=device), workspace=top1_workspace(2, device))
