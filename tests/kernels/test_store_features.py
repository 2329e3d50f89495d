from __future__ import annotations

import importlib
import math
from dataclasses import dataclass

import pytest
import torch

from sglang_dflash_kernels import CachePointers, select

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUM_SLOTS, GUARD_SLOTS, NUM_POSITIONS = 64, 8, 50

# Triton's interpreter truncates float32 to bfloat16 where the compiled kernel rounds to nearest.
TRUNCATES_BF16 = not torch.cuda.is_available()

# Largest relative error of one rounding to nearest, and the spacing below the smallest normal number.
UNIT_ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}
SUBNORMAL_STEP = {BF16: 2.0**-133, FP16: 2.0**-24, FP32: 2.0**-149}

# What float32 arithmetic may add before that rounding, relative to the head's largest key: a sum of head_dim squares,
# a square root and four products.
FLOAT32_NOISE = 16 * 2.0**-24


@dataclass(frozen=True)
class Model:
    kv_heads: int
    head_dim: int
    rotary_dim: int
    layers: int = 2


QWEN3 = Model(kv_heads=8, head_dim=128, rotary_dim=128)
SMOLLM2 = Model(kv_heads=3, head_dim=64, rotary_dim=64, layers=3)
MODELS = [
    QWEN3,
    SMOLLM2,
    Model(kv_heads=1, head_dim=96, rotary_dim=96),
    Model(kv_heads=2, head_dim=80, rotary_dim=32),
    Model(kv_heads=2, head_dim=128, rotary_dim=64, layers=1),
    Model(kv_heads=5, head_dim=6, rotary_dim=2),
]


class Case:
    """Random inputs of N tokens on distinct slots, and caches of random bits inside larger, equally random buffers."""

    def __init__(self, model, device, num_tokens, *, kv=BF16, cache=BF16, table=FP32, index=torch.int64, spread=False):
        self.model, self.cache_dtype = model, cache
        generator = torch.Generator().manual_seed(num_tokens + 31 * model.head_dim)
        width = 2 * model.kv_heads * model.head_dim

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        magnitude_N = torch.logspace(-2, 2, num_tokens or 1)[:num_tokens]
        features = normal(num_tokens, model.layers, width) * magnitude_N[:, None, None]
        if spread:  # cut from a wider buffer with the layers outside, as a batched GEMM leaves them
            wide = torch.full((model.layers + 1, num_tokens, width + 16), math.nan)
            wide[: model.layers, :, :width] = features.transpose(0, 1)
            self.kv_NLE = wide.to(device, kv)[: model.layers, :, :width].transpose(0, 1)
        else:
            self.kv_NLE = features.to(device, kv)
        slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_tokens]
        self.slots_N = slots.to(device, index)
        self.positions_N = torch.randint(0, NUM_POSITIONS, (num_tokens,), generator=generator).to(device, index)
        self.k_norm_LD = (1 + 0.3 * normal(model.layers, model.head_dim)).to(device, kv)
        self.eps_L = torch.logspace(-6, -2, model.layers).to(device)
        angles = normal(NUM_POSITIONS, model.rotary_dim // 2) * 3
        self.cos_sin_PR = torch.cat([angles.cos(), angles.sin()], dim=1).to(device, table)
        shape = (NUM_SLOTS + GUARD_SLOTS, model.kv_heads, model.head_dim)
        self.buffers = [normal(*shape).to(device, cache) for _ in range(2 * model.layers)]
        self.before = [buffer.clone() for buffer in self.buffers]

    def run(self, ops, value_scale=1.0):
        self.truncated = TRUNCATES_BF16 and ops.name == "triton" and self.cache_dtype == BF16
        self.caches = CachePointers(*self.key_value_caches())
        ops.store_features(
            self.kv_NLE,
            self.positions_N,
            self.slots_N,
            k_norm_LD=self.k_norm_LD,
            eps_L=self.eps_L,
            cos_sin_PR=self.cos_sin_PR,
            value_scale=value_scale,
            caches=self.caches,
        )

    def key_value_caches(self):
        caches = [buffer[:NUM_SLOTS] for buffer in self.buffers]
        return caches[: self.model.layers], caches[self.model.layers :]

    def naive(self, token, layer, head, value_scale):
        """One head's key and value in Python floats, which are float64."""
        dim, half = self.model.head_dim, self.model.rotary_dim // 2
        row = self.kv_NLE[token, layer].tolist()
        key = row[head * dim : (head + 1) * dim]
        value = row[(self.model.kv_heads + head) * dim : (self.model.kv_heads + head + 1) * dim]
        scale = 1 / math.sqrt(sum(x * x for x in key) / dim + self.eps_L[layer].item())
        key = [x * scale * weight for x, weight in zip(key, self.k_norm_LD[layer].tolist())]
        angle = self.cos_sin_PR[self.positions_N[token]].tolist()
        rotated = list(key)
        for i in range(half):
            cos, sin = angle[i], angle[half + i]
            rotated[i] = key[i] * cos - key[i + half] * sin
            rotated[i + half] = key[i + half] * cos + key[i] * sin
        # The op takes the scale as float32.
        factor = torch.tensor(value_scale, dtype=FP32).item()
        return rotated, [x * factor for x in value]

    def check(self, value_scale: float = 1.0) -> None:
        """Every token right in every layer and head; every other bit of every buffer as it was."""
        expected = [buffer.clone() for buffer in self.before]
        layers, heads = self.model.layers, self.model.kv_heads
        for token, slot in enumerate(self.slots_N.tolist()):
            for layer in range(layers):
                for head in range(heads):
                    key, value = self.naive(token, layer, head, value_scale)
                    self.check_head(self.buffers[layer][slot, head], key, FLOAT32_NOISE)
                    self.check_head(self.buffers[layers + layer][slot, head], value, 2.0**-24)
                for buffer, copy in ((self.buffers[i], expected[i]) for i in (layer, layers + layer)):
                    copy[slot] = buffer[slot]
        for buffer, copy in zip(self.buffers, expected):
            assert torch.equal(bits(buffer), bits(copy)), "a slot that no token has was written"

    def check_head(self, got, want, noise) -> None:
        wanted = torch.tensor(want, dtype=torch.float64)
        units = 2 if self.truncated else 1
        bound = units * UNIT_ROUNDOFF[self.cache_dtype] * wanted.abs() + noise * wanted.abs().max()
        error = (got.cpu().double() - wanted).abs()
        excess = error - bound - SUBNORMAL_STEP[self.cache_dtype]
        assert (excess <= 0).all(), f"error {error.max():.3g} above its bound by {excess.max():.3g}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == FP32 else torch.int16)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_stores_every_token(ops, device, model):
    case = Case(model, device, 5)
    case.run(ops)
    case.check()


@pytest.mark.parametrize("cache", [BF16, FP16, FP32])
@pytest.mark.parametrize("kv", [BF16, FP16, FP32])
@pytest.mark.parametrize("table", [BF16, FP32])
def test_dtypes(ops, device, kv, cache, table):
    case = Case(Model(3, 16, 12), device, 7, kv=kv, cache=cache, table=table)
    case.run(ops)
    case.check()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [1, 2, 13, 21, 32, 53])
def test_what_follows_the_tokens_is_not_stored(ops, device, num_tokens, index):
    """In memory more follow, of slots that no token has: the cache's own, and past its end."""
    case = Case(SMOLLM2, device, num_tokens + GUARD_SLOTS, index=index)
    case.slots_N[num_tokens::2] = torch.arange(NUM_SLOTS, NUM_SLOTS + GUARD_SLOTS, 2)
    case.kv_NLE[num_tokens:] = math.nan
    case.kv_NLE, case.positions_N, case.slots_N = (
        tensor[:num_tokens] for tensor in (case.kv_NLE, case.positions_N, case.slots_N)
    )
    case.run(ops)
    case.check()


@pytest.mark.parametrize("model", [SMOLLM2, Model(2, 80, 32)], ids=str)
def test_rows_of_wider_buffers(ops, device, model):
    case = Case(model, device, 6, spread=True)
    case.run(ops)
    case.check()


@pytest.mark.parametrize("value_scale", [0.5, 1.7, -2.0])
def test_value_scale(ops, device, value_scale):
    case = Case(SMOLLM2, device, 3)
    case.run(ops, value_scale=value_scale)
    case.check(value_scale)


def test_unscaled_values_are_copied_bit_for_bit(ops, device):
    case = Case(SMOLLM2, device, 6)
    case.run(ops)
    values = case.kv_NLE.unflatten(-1, (2, SMOLLM2.kv_heads, SMOLLM2.head_dim))[:, :, 1]
    for layer in range(SMOLLM2.layers):
        got = case.caches.value_caches[layer][case.slots_N.long()]
        assert torch.equal(bits(got), bits(values[:, layer].contiguous()))


def test_no_tokens(ops, device):
    case = Case(SMOLLM2, device, 0)
    case.run(ops)
    case.check()


def test_large_tiles(device, monkeypatch):
    """The tiles of a long prefill, on few tokens, and a last tile that is not full."""
    module = importlib.import_module("sglang_dflash_kernels.store_features")
    tiles = [module._tile(21 * model.kv_heads, model.layers, model.rotary_dim // 2) for model in MODELS]
    monkeypatch.setattr(module, "FULL_GRID", 1)
    for model, small in zip(MODELS, tiles):
        large = module._tile(21 * model.kv_heads, model.layers, model.rotary_dim // 2)
        assert large[0] > small[0]
        case = Case(model, device, 21)
        case.run(select(torch.device("cuda")))
        case.check()


@pytest.mark.parametrize("cache", [BF16, FP16])
def test_one_rounding(ops, device, cache):
    """RMS error of the keys: about 0.41 units for one rounding, sqrt(2) times that if the norm rounded too."""
    case = Case(QWEN3, device, 16, kv=FP32, cache=cache)
    case.run(ops)
    got, want = [], []
    for token in range(16):
        for head in range(QWEN3.kv_heads):
            got.append(case.buffers[0][case.slots_N[token], head].cpu().double())
            want.append(torch.tensor(case.naive(token, 0, head, 1.0)[0], dtype=torch.float64))
    error = torch.linalg.norm(torch.stack(got) - torch.stack(want)) / torch.linalg.norm(torch.stack(want))
    # Truncation has twice the RMS error of rounding to nearest.
    units = (2 if case.truncated else 1) * UNIT_ROUNDOFF[cache]
    assert 0.35 < error / units < 0.47


@pytest.mark.parametrize("cache", [FP16, FP32] if TRUNCATES_BF16 else [BF16, FP16, FP32])
def test_triton_differs_from_reference_by_at_most_one_rounding(device, cache):
    cases = [Case(QWEN3, device, 16, cache=cache) for _ in range(2)]
    for case, name in zip(cases, ("cpu", "cuda")):
        case.run(select(torch.device(name)), value_scale=1.3)
    for ours, oracle in zip(*(case.buffers for case in cases)):
        scale = oracle.float().abs().amax(dim=-1, keepdim=True)
        bound = 2 * UNIT_ROUNDOFF[cache] * oracle.float().abs() + FLOAT32_NOISE * scale
        assert ((ours.float() - oracle.float()).abs() <= bound).all()
        if cache != FP32:
            assert (ours != oracle).float().mean() < 0.01


class TestCachePointers:
    def caches(self, device, count=2, shape=(4, 2, 8), dtype=BF16):
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]

    def test_holds_addresses(self, device):
        keys, values = self.caches(device), self.caches(device)
        pointers = CachePointers(keys, values)
        assert pointers.key_pointers_L.tolist() == [key.data_ptr() for key in keys]
        assert pointers.value_pointers_L.tolist() == [value.data_ptr() for value in values]
        assert pointers.key_pointers_L.device.type == device.type

    def test_refuses_unequal_layers(self, device):
        keys = self.caches(device)
        for other in (
            self.caches(device, dtype=FP16),
            self.caches(device, shape=(5, 2, 8)),
            [cache[::2] for cache in self.caches(device, shape=(8, 2, 8))],
        ):
            with pytest.raises(ValueError, match="the dtype, shape, strides and device of the first"):
                CachePointers(keys, other)
            with pytest.raises(ValueError, match="the dtype, shape, strides and device of the first"):
                CachePointers([keys[0], other[1]], keys)

    def test_refuses_what_kernels_cannot_store_to(self, device):
        with pytest.raises(ValueError, match="one key cache and one value cache for each"):
            CachePointers(self.caches(device), self.caches(device, count=1))
        with pytest.raises(ValueError, match="one key cache and one value cache for each"):
            CachePointers([], [])
        flipped = [cache.transpose(1, 2) for cache in self.caches(device)]
        with pytest.raises(ValueError, match="contiguous in head_dim"):
            CachePointers(flipped, flipped)
        integers = self.caches(device, dtype=torch.uint8)
        with pytest.raises(ValueError, match="expected caches of bfloat16, float16 or float32"):
            CachePointers(integers, integers)
        odd = [cache[..., 1:] for cache in self.caches(device)]
        with pytest.raises(ValueError, match="divisible by 16"):
            CachePointers(odd, odd)
