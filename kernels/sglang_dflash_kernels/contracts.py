"""What every implementation of an op demands of its arguments: shapes, dtypes, layout. Reads no tensor's content."""

from __future__ import annotations

import torch

from sglang_dflash_kernels.cache_pointers import CachePointers
from sglang_dflash_kernels.top1_workspace import MAX_SPLITS, MAX_VOCAB, Top1Workspace

# Tokens of the widest block: lanes of one program of `prepare_block` and `accept_greedy`.
MAX_WIDTH = 64

# FP8's largest number, and the least magnitude behind a scale.
FP8_MAX = 448.0
FP8_LEAST = 1e-12
# Of `fp8_logits`: rows it takes, columns that share a scale.
FP8_MAX_ROWS = 16
FP8_PART = 128
# Of `skinny_linear`: rows it takes, the outputs of a program and the inputs of a step, parts of a sum, programs that
# occupy a card (an H100 or H200 has 132 multiprocessors), and the fewest inputs that are a program's share.
SKINNY_MAX_ROWS = 64
SKINNY_TILE = 64
SKINNY_MAX_SPLITS = 16
SKINNY_PROGRAMS = 132
SKINNY_MIN_SHARE = 512

INDEX = (torch.int32, torch.int64)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
FLOAT = (torch.bfloat16, torch.float16, torch.float32)
FLOAT16 = (torch.bfloat16, torch.float16)
FLOAT32 = (torch.float32,)
FP8 = (torch.float8_e4m3fn,)


def expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """A bug of the caller is an AssertionError. The last dimension is contiguous, the others have any stride."""
    assert tuple(tensor.shape) == shape, f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}"
    assert tensor.dtype in dtypes, f"{name}: expected one of {dtypes}, got {tensor.dtype}"
    assert shape[-1] <= 1 or tensor.stride(-1) == 1, f"{name}: expected a contiguous last dimension"


def prepare_block(anchor_B, seq_lens_B, rows_B, req_to_token, *, ids_BK, positions_BK, slots_BK) -> tuple[int, int]:
    """Returns (B, K)."""
    size, width = ids_BK.shape
    assert 1 <= width <= MAX_WIDTH, f"ids_BK: expected a block of 1 to {MAX_WIDTH} tokens, got {width}"
    expect("anchor_B", anchor_B, (size,), INDEX)
    expect("seq_lens_B", seq_lens_B, (size,), INDEX)
    expect("rows_B", rows_B, (size,), INDEX)
    expect("req_to_token", req_to_token, tuple(req_to_token.shape), INDEX)
    for name, output in (("ids_BK", ids_BK), ("positions_BK", positions_BK), ("slots_BK", slots_BK)):
        expect(name, output, (size, width), INT64)
    return size, width


def accept_greedy(
    tokens_BK, target_BW, seq_lens_B, widths_B, *, commit_B, bonus_B, tokens_BW, new_lens_B
) -> tuple[int, int]:
    """Returns (B, W)."""
    size, width = target_BW.shape
    block = tokens_BK.shape[1]
    assert 1 <= width <= MAX_WIDTH, f"target_BW: expected a width of 1 to {MAX_WIDTH}, got {width}"
    assert width <= block, f"target_BW: expected at most the block's {block} columns, got {width}"
    expect("tokens_BK", tokens_BK, (size, block), INT64)
    expect("target_BW", target_BW, (size, width), INT64)
    expect("seq_lens_B", seq_lens_B, (size,), INDEX)
    if widths_B is not None:
        expect("widths_B", widths_B, (size,), INDEX)
    expect("commit_B", commit_B, (size,), INT32)
    expect("bonus_B", bonus_B, (size,), INT64)
    expect("tokens_BW", tokens_BW, (size, width), INT64)
    expect("new_lens_B", new_lens_B, (size,), INT64)
    return size, width


def store_features(kv_NLE, positions_N, slots_N, *, k_norm_LD, eps_L, cos_sin_PR, caches: CachePointers) -> int:
    """Returns N."""
    num_tokens, layers = kv_NLE.shape[0], caches.num_layers
    expect("kv_NLE", kv_NLE, (num_tokens, layers, 2 * caches.kv_heads * caches.head_dim), FLOAT)
    expect("positions_N", positions_N, (num_tokens,), INDEX)
    expect("slots_N", slots_N, (num_tokens,), INDEX)
    expect("k_norm_LD", k_norm_LD, (layers, caches.head_dim), FLOAT)
    expect("eps_L", eps_L, (layers,), FLOAT32)
    rotary_dim = cos_sin_PR.shape[1]
    expect("cos_sin_PR", cos_sin_PR, (cos_sin_PR.shape[0], rotary_dim), FLOAT)
    assert rotary_dim in range(2, caches.head_dim + 1, 2), (
        f"cos_sin_PR: expected an even rotary_dim of 2 to head_dim {caches.head_dim}, got {rotary_dim}"
    )
    return num_tokens


def top1(logits_NV, *, tokens_N, confidence_N, workspace: Top1Workspace | None) -> tuple[int, int]:
    """Returns (N, V)."""
    num_rows, vocab = logits_NV.shape
    assert 1 <= vocab <= MAX_VOCAB, f"logits_NV: expected a vocabulary of 1 to {MAX_VOCAB}, got {vocab}"
    expect("logits_NV", logits_NV, (num_rows, vocab), FLOAT)
    shape = tuple(tokens_N.shape)
    assert len(shape) in (1, 2), f"tokens_N: expected one or two dimensions, got shape {list(shape)}"
    assert tokens_N.numel() == num_rows, f"tokens_N: expected {num_rows} elements, got shape {list(shape)}"
    expect("tokens_N", tokens_N, shape, INT64)
    expect("confidence_N", confidence_N, shape, FLOAT32)
    if workspace is not None:
        rows, splits = workspace.maximum_NS.shape
        assert splits == MAX_SPLITS, f"workspace: expected {MAX_SPLITS} splits a row, got {splits}"
        assert rows >= num_rows, f"workspace: expected room for {num_rows} rows, got {rows}"
    return num_rows, vocab


def fp8_logits(hidden_NH, weight_VH, scale_V, *, logits_NV) -> tuple[int, int]:
    """Returns (N, V)."""
    num_rows, hidden_size = hidden_NH.shape
    vocab = weight_VH.shape[0]
    assert 1 <= num_rows <= FP8_MAX_ROWS, f"hidden_NH: expected 1 to {FP8_MAX_ROWS} rows, got {num_rows}"
    expect("hidden_NH", hidden_NH, (num_rows, hidden_size), FLOAT)
    expect("weight_VH", weight_VH, (vocab, hidden_size), FP8)
    assert weight_VH.is_contiguous(), "weight_VH: expected contiguous rows"
    expect("scale_V", scale_V, (vocab,), FLOAT32)
    expect("logits_NV", logits_NV, (num_rows, vocab), (torch.bfloat16,))
    return num_rows, vocab


def round_fp8(x_NH, *, out_NH, scale_N) -> tuple[int, int]:
    """Returns (N, H)."""
    num_rows, columns = x_NH.shape
    expect("x_NH", x_NH, (num_rows, columns), FLOAT)
    expect("out_NH", out_NH, (num_rows, columns), FP8)
    expect("scale_N", scale_N, (num_rows,), FLOAT32)
    return num_rows, columns


def rms_norm_fp8(x_NH, residual_NH, weight_H, *, out_NH, scale_N) -> None:
    num_rows, columns = round_fp8(x_NH, out_NH=out_NH, scale_N=scale_N)
    if residual_NH is not None:
        expect("residual_NH", residual_NH, (num_rows, columns), FLOAT)
    expect("weight_H", weight_H, (columns,), FLOAT)


def silu_mul_fp8(gate_up_NI, *, out_NI, scale_N) -> None:
    num_rows, columns = out_NI.shape
    expect("gate_up_NI", gate_up_NI, (num_rows, 2 * columns), FLOAT)
    expect("out_NI", out_NI, (num_rows, columns), FP8)
    expect("scale_N", scale_N, (num_rows,), FLOAT32)


def skinny_splits(outputs: int, inputs: int) -> int:
    """Parts of a sum, each a program of `skinny_linear`, that occupy a card."""
    return max(1, min(SKINNY_PROGRAMS // (outputs // SKINNY_TILE), inputs // SKINNY_MIN_SHARE, 8))


def skinny_share(inputs: int, splits: int) -> int:
    """Inputs of each part of a sum of `skinny_linear`; the last takes what is left, if anything."""
    return -(-inputs // (SKINNY_TILE * splits)) * SKINNY_TILE


def skinny_linear(x_NI, weight_OI, bias_O, *, out_NO, partial_SNO, arrived_T) -> tuple[int, int, int]:
    """Returns (N, O, I)."""
    num_rows, (outputs, inputs) = x_NI.shape[0], weight_OI.shape
    assert 1 <= num_rows <= SKINNY_MAX_ROWS, f"x_NI: expected 1 to {SKINNY_MAX_ROWS} rows, got {num_rows}"
    assert outputs % SKINNY_TILE == inputs % SKINNY_TILE == 0, (
        f"weight_OI: expected multiples of {SKINNY_TILE}, got shape {[outputs, inputs]}"
    )
    expect("x_NI", x_NI, (num_rows, inputs), FLOAT16)
    dtype = (x_NI.dtype,)
    expect("weight_OI", weight_OI, (outputs, inputs), dtype)
    assert weight_OI.is_contiguous(), "weight_OI: expected contiguous rows"
    if bias_O is not None:
        expect("bias_O", bias_O, (outputs,), dtype)
    expect("out_NO", out_NO, (num_rows, outputs), dtype)
    splits = partial_SNO.shape[0]
    assert 1 <= splits <= SKINNY_MAX_SPLITS, f"partial_SNO: expected 1 to {SKINNY_MAX_SPLITS} parts, got {splits}"
    expect("partial_SNO", partial_SNO, (splits, num_rows, outputs), FLOAT32)
    assert partial_SNO.is_contiguous(), "partial_SNO: expected a contiguous tensor"
    expect("arrived_T", arrived_T, (outputs // SKINNY_TILE,), INT32)
    return num_rows, outputs, inputs
