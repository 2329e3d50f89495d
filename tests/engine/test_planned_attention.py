"""FlashAttention 3 with a plan made ahead, as `host.attention` uses it: the numbers of a call that plans itself."""

from __future__ import annotations

import itertools

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention 3 needs a GPU"),
]

CACHED_TOKENS = 20_000
SHAPES = ((16, 32, 8, 128), (16, 9, 3, 64), (5, 16, 2, 128))  # width, query heads, key heads, head size


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("columns", [24, 400, 8192])  # of the page table: the fewest are not split
def test_a_plan_changes_no_bit(causal: bool, page_size: int, columns: int) -> None:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

    torch.manual_seed(0)
    longest, device = min(columns * page_size, 5000), torch.device("cuda")
    for size, (width, heads, kv_heads, head_dim) in itertools.product((1, 3, 8, 33), SHAPES):
        lens = torch.randint(width, longest + 1, (size,), device=device, dtype=torch.int32)
        lens[0] = longest
        pages = CACHED_TOKENS // page_size
        keys = torch.randn(pages, page_size, kv_heads, head_dim, device=device, dtype=torch.bfloat16)
        values = torch.randn_like(keys)
        table = torch.randint(0, pages, (size, columns), device=device, dtype=torch.int32)
        # Queries are a part of wider rows, as they come out of the projection.
        qkv = torch.randn(size * width, heads * head_dim + 64, device=device, dtype=torch.bfloat16)
        q = qkv[:, : heads * head_dim].view(-1, heads, head_dim)
        common = {
            "cache_seqlens": lens,
            "cu_seqlens_q": torch.arange(0, size * width + 1, width, device=device, dtype=torch.int32),
            "max_seqlen_q": width,
            "causal": causal,
            "num_splits": 0,
        }
        call = {"k_cache": keys, "v_cache": values, "page_table": table, "softmax_scale": head_dim**-0.5, **common}
        plan = get_scheduler_metadata(
            batch_size=size,
            max_seqlen_k=columns * page_size,
            num_heads=heads,
            num_heads_k=kv_heads,
            headdim=head_dim,
            headdim_v=head_dim,
            qkv_dtype=q.dtype,
            page_size=page_size,
            has_softcap=False,
            **common,
        )
        expected = flash_attn_with_kvcache(q=q.contiguous(), **call)
        for _ in range(3):  # a plan serves every layer
            assert torch.equal(flash_attn_with_kvcache(q=q, scheduler_metadata=plan, **call), expected)
