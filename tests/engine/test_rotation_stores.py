"""SGLang's rotation that stores keys and values, as `host.rope_store` uses it: the bits of two kernels."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang's rotary kernel needs a GPU"),
]

SLOTS, POSITIONS = 3000, 5000


@pytest.mark.parametrize("shape", [(32, 8, 128), (9, 3, 64), (16, 2, 128)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 16, 128, 1100])
def test_one_kernel_leaves_the_bits_of_two(shape: tuple[int, int, int], num_tokens: int) -> None:
    from sglang.kernels.ops.attention.rope import FusedSetKVBufferArg, apply_rope_with_cos_sin_cache_inplace

    torch.manual_seed(num_tokens)
    heads, kv_heads, head_dim = shape
    device = torch.device("cuda")
    angles = torch.rand(POSITIONS, head_dim // 2, device=device) * 6.3
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(POSITIONS, (num_tokens,), device=device)
    slots = torch.randperm(SLOTS, device=device)[:num_tokens]
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim, device=device, dtype=torch.bfloat16)
    poison = torch.full((SLOTS, kv_heads * head_dim), 7.0, device=device, dtype=torch.bfloat16)

    def rotated(stores: bool) -> tuple[torch.Tensor, ...]:
        """Queries, keys, and the two caches."""
        q, k, v = qkv.clone().split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
        keys, values = poison.clone(), poison.clone()
        apply_rope_with_cos_sin_cache_inplace(
            q=q.view(num_tokens, -1, head_dim),
            k=k.view(num_tokens, -1, head_dim),
            cos_sin_cache=cos_sin,
            positions=positions,
            is_neox=True,
            fused_args=FusedSetKVBufferArg(v, keys, values, slots) if stores else None,
        )
        if not stores:
            keys[slots], values[slots] = k, v
        return q, k, keys, values

    for got, expected in zip(rotated(True), rotated(False), strict=True):
        assert torch.equal(got, expected)
