"""oneDNN's products against PyTorch's, and that linear layers come to them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sglang_dflash.cpu import products


@pytest.mark.parametrize("rows", [1, 3, 16, 65])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (64, 1), (1, 7)])
def test_products_with_a_transposed_weight(rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    a, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    for left in (a, torch.randn(inputs, rows).T):
        expected = (left.double() @ weight.double().T).float()
        # Sums of up to 576 products of about 1, one after the other in float32.
        torch.testing.assert_close(products.mm(left, weight.T), expected, atol=3e-4, rtol=1e-5)


def test_other_products_stay_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(5, 8), torch.randn(8, 6)
    half = products.mm(a.bfloat16(), b.T.contiguous().T.bfloat16())
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None)
    torch.testing.assert_close(products.mm(a, b), (a.double() @ b.double()).float())
    torch.testing.assert_close(half, a.bfloat16() @ b.bfloat16())
    assert products.mm(a[:0], b).shape == (0, 6)


def test_linear_layers_come_to_onednn_once_registered() -> None:
    """In a process of its own: the registration holds until the process ends."""
    code = """
import torch
from sglang_dflash.cpu import products
calls = []
plain = products.mm
products.mm = lambda a, b: calls.append(a.shape) or plain(a, b)
layer, x = torch.nn.Linear(576, 960, bias=False), torch.randn(4, 576)
expected = layer(x)
products.register()
products.register()
with torch.inference_mode():
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(torch.matmul(x, layer.weight.T), expected)
assert len(calls) == 2, calls
(gradient,) = torch.autograd.grad(layer(x).sum(), layer.weight)
torch.testing.assert_close(gradient, x.sum(0).expand_as(gradient))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
