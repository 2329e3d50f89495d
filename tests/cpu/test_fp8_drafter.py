"""A drafter in FP8: its layers say what SGLang's say, and injection's projections follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.models.dflash import DFlashDecoderLayer, DFlashDraftModel, DFlashMLP

import sglang_dflash_kernels as kernels
from sglang_dflash.draft.head import rounded
from sglang_dflash.host import fp8_drafter

OPS = kernels.select(torch.device("cpu"))
LAYERS, HIDDEN, INNER, Q_SIZE, KV_SIZE, FEATURES, TOKENS = 3, 32, 48, 32, 16, 64, 7
ROUNDING = 2.0**-4  # of an FP8 number, and less of many
FLOAT32 = 1e-3  # a sum in another order, that now and then is rounded to the next FP8 number


def product(input: Any, weight: Any, weight_scale: Any, bias: Any = None, calls: list[str] | None = None) -> Any:
    """SGLang's `apply_fp8_linear`, and its method's: rows in FP8, rounded here where they are not."""
    if isinstance(input, tuple):
        rows, scale, dtype = input
        assert rows.dtype == torch.float8_e4m3fn
        assert scale.shape == (rows.shape[0], 1)
    else:
        (rows, scale), dtype = rounded(input), input.dtype
    assert weight_scale.shape == (1, weight.shape[1])
    if calls is not None:
        calls.append("rounds" if not isinstance(input, tuple) else "takes rounded")
    out = (rows.float() * scale) @ (weight.float() * weight_scale)
    return (out if bias is None else out + bias).to(dtype)


class Linear(torch.nn.Module):
    """SGLang's layer of a product in FP8: an (in, out) view of the weight, a scale for each output."""

    def __init__(self, inputs: int, outputs: int, calls: list[str], bias: bool = False) -> None:
        super().__init__()
        weight, scale = rounded(torch.randn(outputs, inputs) * torch.logspace(-1, 1, outputs)[:, None])
        self.weight, self.weight_scale, self.input_scale = weight.T, scale.T.contiguous(), None
        self.bias = torch.randn(outputs).bfloat16() if bias else None
        self.calls = calls

    def forward(self, x: Any) -> Any:
        return product(x, self.weight, self.weight_scale, self.bias, self.calls), None


class Norm(torch.nn.Module):
    variance_epsilon = 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(HIDDEN).bfloat16(), requires_grad=False)

    def forward(self, x: Any, residual: Any = None) -> Any:
        total = x if residual is None else x + residual
        out = torch.nn.functional.rms_norm(total.float(), (HIDDEN,), self.weight.float(), self.variance_epsilon)
        return out.to(x.dtype) if residual is None else (out.to(x.dtype), total)


class Attention(torch.nn.Module):
    """Of each token alone: its queries, weighed by its keys and values."""

    q_size = Q_SIZE

    def __init__(self, calls: list[str], bias: bool) -> None:
        super().__init__()
        self.qkv_proj = Linear(HIDDEN, Q_SIZE + 2 * KV_SIZE, calls, bias)
        self.o_proj = Linear(Q_SIZE, HIDDEN, calls)

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any) -> Any:
        q, k, v = self.qkv_proj(hidden_states)[0].split([Q_SIZE, KV_SIZE, KV_SIZE], dim=-1)
        return self.o_proj(q * torch.tanh(torch.cat([k, v], dim=-1)))[0]


def drafter(calls: list[str], bias: bool = False, act_fn: Any = None) -> Any:
    """SGLang's draft model with small parts of ours, which say what they are given."""
    torch.manual_seed(0)
    model = DFlashDraftModel.__new__(DFlashDraftModel)
    torch.nn.Module.__init__(model)
    model.quantizable, model.fc, model.hidden_norm = False, torch.nn.Linear(FEATURES, HIDDEN, bias=False), Norm()
    model.fc.bfloat16()
    model.config, model.num_context_features = SimpleNamespace(hidden_size=HIDDEN), FEATURES // HIDDEN
    model.layers = torch.nn.ModuleList()
    for _ in range(LAYERS):
        layer, mlp = DFlashDecoderLayer.__new__(DFlashDecoderLayer), DFlashMLP.__new__(DFlashMLP)
        torch.nn.Module.__init__(layer)
        torch.nn.Module.__init__(mlp)
        mlp.gate_up_proj, mlp.down_proj = Linear(HIDDEN, 2 * INNER, calls), Linear(INNER, HIDDEN, calls)
        mlp.act_fn = act_fn or SiluAndMul.__new__(SiluAndMul)
        if act_fn is None:
            torch.nn.Module.__init__(mlp.act_fn)
            mlp.act_fn.forward = mlp.act_fn.forward_native
        layer.input_layernorm, layer.post_attention_layernorm = Norm(), Norm()
        layer.self_attn, layer.mlp = Attention(calls, bias), mlp
        layer.attention_conv = layer.mlp_conv = None
        model.layers.append(layer)
    return model


def through_layers(model: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    residual = None
    for layer in model.layers:
        hidden, residual = layer(None, hidden, None, residual)
    return hidden, residual


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(autouse=True)
def _product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_drafter, "apply_fp8_linear", product)


def test_the_layers_say_what_they_said() -> None:
    calls: list[str] = []
    model, hidden = drafter(calls), torch.randn(TOKENS, HIDDEN)
    with torch.inference_mode():
        expected = through_layers(model, hidden)
        assert calls == ["rounds"] * 4 * LAYERS
        calls.clear()
        fp8_drafter.refit(model, OPS)
        got = through_layers(model, hidden.clone())
    # Of a layer's four products the attention's output alone has its rounding launched.
    assert calls == ["takes rounded", "rounds", "takes rounded", "takes rounded"] * LAYERS
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32
        assert error(ours, theirs) < FLOAT32


def test_another_activation_stays() -> None:
    calls: list[str] = []
    gelu = lambda x: torch.nn.functional.gelu(x[:, :INNER]) * x[:, INNER:]  # noqa: E731
    model = drafter(calls, act_fn=gelu)
    fp8_drafter.refit(model, OPS)
    with torch.inference_mode():
        through_layers(model, torch.randn(TOKENS, HIDDEN).bfloat16())
    assert calls == ["takes rounded", "rounds", "takes rounded", "rounds"] * LAYERS


@pytest.mark.parametrize("bias", [False, True])
def test_injection_projects_by_every_layers_keys_and_values(bias: bool) -> None:
    model, features = drafter([], bias), torch.randn(TOKENS, FEATURES).bfloat16()
    with torch.inference_mode():
        expected = model.project_target_hidden(features)
        kv = [layer.self_attn.qkv_proj(expected)[0][:, Q_SIZE:] for layer in model.layers]
        project = fp8_drafter.refit(model, OPS)
        context = model.project_target_hidden(features)
        assert error(context, expected) < ROUNDING
        assert torch.equal(project(expected), torch.cat(kv, dim=1))


@pytest.mark.parametrize(("name", "value"), [("weight_scale", torch.ones(1)), ("input_scale", torch.ones(1))])
def test_weights_by_another_rule_are_refused(name: str, value: torch.Tensor) -> None:
    model = drafter([])
    setattr(model.layers[1].self_attn.qkv_proj, name, value)
    with pytest.raises(ValueError, match="expected FP8 weights with a scale for each output"):
        fp8_drafter.refit(model, OPS)
    assert isinstance(model.fc, torch.nn.Linear), "half of it was changed"
