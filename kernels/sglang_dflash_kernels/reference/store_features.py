"""Reference of `store_features`."""

from __future__ import annotations

import torch

from sglang_dflash_kernels import contracts
from sglang_dflash_kernels.cache_pointers import CachePointers


def store_features(
    kv_NLE: torch.Tensor,
    positions_N: torch.Tensor,
    slots_N: torch.Tensor,
    *,
    k_norm_LD: torch.Tensor,
    eps_L: torch.Tensor,
    cos_sin_PR: torch.Tensor,
    value_scale: float,
    caches: CachePointers,
) -> None:
    """Turn the projected target features into cached keys and values of every draft layer.

    Key of a token, layer l and head: x / sqrt(mean(x^2) + eps[l]) * k_norm[l] (RMSNorm, arXiv:1910.07467), then the
    rotation of the pairs (i, i + R/2), i < R/2, by the angle of the token's position (RoPE, arXiv:2104.09864, in the
    half-split order of GPT-NeoX); elements from R on pass through. Value: x * value_scale. All of it in float32, with
    one rounding, to the cache's dtype, at the end.

    Args:
        kv_NLE: bf16, fp16 or fp32, shape [N, L, 2 * kv_heads * head_dim]: per layer all key heads, then all value
            heads; any stride in N and L.
        positions_N: int32 or int64, shape [N], each below P.
        slots_N: int32 or int64, shape [N], distinct but for slots that nothing reads (padding's): what tokens write
            to the same slot may mix there.
        k_norm_LD: bf16, fp16 or fp32, shape [L, head_dim].
        eps_L: float32, shape [L], on the device.
        cos_sin_PR: bf16, fp16 or fp32, shape [P, R], R even and at most head_dim: R/2 cosines, then R/2 sines.
        caches: [num_slots, kv_heads, head_dim] for each layer.
    """
    num_tokens = contracts.store_features(
        kv_NLE,
        positions_N,
        slots_N,
        k_norm_LD=k_norm_LD,
        eps_L=eps_L,
        cos_sin_PR=cos_sin_PR,
        caches=caches,
    )
    if num_tokens == 0:
        return

    slots = slots_N.long()
    half = cos_sin_PR.shape[1] // 2
    cos, sin = cos_sin_PR[positions_N.long()].float()[:, None, :].split(half, dim=-1)
    for layer in range(caches.num_layers):
        heads = kv_NLE[:, layer].float().unflatten(-1, (2, caches.kv_heads, caches.head_dim))
        keys, values = heads.unbind(dim=1)
        keys = keys * torch.rsqrt(keys.square().mean(dim=-1, keepdim=True) + eps_L[layer]) * k_norm_LD[layer].float()
        first, second, rest = keys.split([half, half, caches.head_dim - 2 * half], dim=-1)
        keys = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
        caches.key_caches[layer][slots] = keys.to(caches.dtype)
        caches.value_caches[layer][slots] = (values * value_scale).to(caches.dtype)
