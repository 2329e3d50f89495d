"""On a Hopper card dense layers of a captured pass over a few rows have the bits of a token decoded alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_dflash.host import few_rows
from sglang_dflash_kernels import select

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

CUDA = torch.device("cuda")
# Hidden size, that of queries, keys and values, that of heads, intermediate size.
MODELS = {
    "SmolLM2-135M": (576, 960, 576, 1536),
    "Qwen3-0.6B": (1024, 4096, 2048, 3072),
    "Qwen3-1.7B": (2048, 4096, 2048, 6144),
    "Qwen3-4B": (2560, 6144, 4096, 9728),
    "Qwen3-8B": (4096, 6144, 4096, 12_288),
    "Llama-3.1-8B": (4096, 6144, 4096, 14_336),
    "Qwen3-14B": (5120, 7168, 5120, 17_408),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("product", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("model", list(MODELS))
def test_rows_of_blocks_are_decoded_rows(monkeypatch: pytest.MonkeyPatch, model: str, product: str, bias: bool) -> None:
    """Of blocks of 8. Prints how many of 10,000 numbers cuBLAS rounds otherwise for as many rows."""
    if not few_rows._is_hopper(CUDA):
        pytest.skip("other cards are left to SGLang")
    hidden, qkv, heads, inner = MODELS[model]
    shapes = {"qkv": (hidden, qkv), "o": (heads, hidden), "gate_up": (hidden, 2 * inner), "down": (inner, hidden)}
    inputs, outputs = shapes[product]
    torch.manual_seed(0)
    layer: Any = ReplicatedLinear(inputs, outputs, bias=bias, params_dtype=torch.bfloat16).to(CUDA)
    layer.weight.data = (torch.randn(outputs, inputs, device=CUDA) / inputs**0.5).bfloat16()
    if bias:
        layer.bias.data = torch.randn(outputs, device=CUDA).bfloat16()
    x_NI = torch.randn(64, inputs, device=CUDA).bfloat16()

    def multiply(num_rows: int) -> torch.Tensor:
        return torch.cat([layer(rows)[0] for rows in x_NI.split(num_rows)])

    decoded_NO = multiply(1)
    sizes = range(8, 65, 8)
    cublas = {n: round((multiply(n) != decoded_NO).float().mean().item() * 10_000, 1) for n in (2, 4, *sizes)}
    parts = few_rows.parts_of_decoding(layer, select(CUDA), sizes)
    print(f"{model} {product} {outputs}x{inputs}{' bias' * bias}: {parts or 'cuBLAS'}; of 10,000 cuBLAS: {cublas}")
    assert type(layer.quant_method) is UnquantizedLinearMethod
    if parts:
        monkeypatch.setattr(few_rows, "get_is_capture_mode", lambda: True)
        layer.quant_method = few_rows.FewRowsMethod(layer.weight, parts, select(CUDA))
    for num_rows in sizes:
        assert torch.equal(multiply(num_rows), decoded_NO), num_rows
