"""A drafter in FP8: its layers say what SGLang's say, and injection's projections follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.quantization import fp8
from sglang.srt.models.dflash import DFlashDecoderLayer, DFlashDraftModel, DFlashMLP

import sglang_dflash_kernels as kernels
from sglang_dflash.draft.head import rounded
from sglang_dflash.host import fp8_drafter

OPS = kernels.select(torch.device("cpu"))
LAYERS, HIDDEN, INNER, Q_SIZE, KV_SIZE, FEATURES, TOKENS = 3, 32, 48, 32, 16, 64, 7
ROUNDING = 2.0**-4  # of an FP8 number, and less of many
FLOAT32 = 1e-3  # a sum in another order, that now and then is rounded to the next FP8 number


CALLS: list[str] = []


def apply_fp8_linear(
    input: Any, weight: Any, weight_scale: Any, input_scale: Any = None, bias: Any = None, **options: Any
) -> Any:
    """SGLang's product: of rows in FP8, or of rows that it rounds first."""
    dtype, rounds = options.get("pre_quant_output_dtype") or input.dtype, input.dtype != torch.float8_e4m3fn
    CALLS.append("rounds" if rounds else "takes rounded")
    rows, scale = rounded(input, OPS) if rounds else (input, input_scale)
    assert scale.shape == (rows.shape[0], 1)
    assert weight_scale.shape == (1, weight.shape[1])
    out = (rows.float() * scale) @ (weight.float() * weight_scale)
    return (out if bias is None else out + bias).to(dtype)


class Linear(torch.nn.Module):
    """SGLang's layer of a product in FP8, with its method: an (in, out) view of the weight, a scale for each output."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        weight, scale = rounded(torch.randn(outputs, inputs) * torch.logspace(-1, 1, outputs)[:, None], OPS)
        self.weight, self.weight_scale, self.input_scale = weight.T, scale.T.contiguous(), None
        self.bias = torch.randn(outputs).bfloat16() if bias else None
        self.quant_method = method = fp8.Fp8LinearMethod.__new__(fp8.Fp8LinearMethod)
        method.use_marlin = method.use_mxfp8 = method.block_quant = method.block_fp8_as_mxfp8 = False
        method.cutlass_fp8_supported, method.use_per_token_if_dynamic = True, False

    def forward(self, x: Any) -> Any:
        return self.quant_method.apply(self, x, self.bias), None


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

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = Linear(HIDDEN, Q_SIZE + 2 * KV_SIZE, bias), Linear(Q_SIZE, HIDDEN)

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any) -> Any:
        q, k, v = self.qkv_proj(hidden_states)[0].split([Q_SIZE, KV_SIZE, KV_SIZE], dim=-1)
        return self.o_proj(q * torch.tanh(torch.cat([k, v], dim=-1)))[0]


def drafter(bias: bool = False, act_fn: Any = None) -> Any:
    """SGLang's draft model with small parts of ours."""
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
        mlp.gate_up_proj, mlp.down_proj = Linear(HIDDEN, 2 * INNER), Linear(INNER, HIDDEN)
        mlp.act_fn = act_fn or SiluAndMul.__new__(SiluAndMul)
        if act_fn is None:
            torch.nn.Module.__init__(mlp.act_fn)
            mlp.act_fn.forward = mlp.act_fn.forward_native
        layer.input_layernorm, layer.post_attention_layernorm = Norm(), Norm()
        layer.self_attn, layer.mlp = Attention(bias), mlp
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
    CALLS.clear()
    monkeypatch.setattr(fp8_drafter, "apply_fp8_linear", apply_fp8_linear)
    monkeypatch.setattr(fp8, "apply_fp8_linear", apply_fp8_linear)


def test_the_layers_say_what_they_said() -> None:
    model, hidden = drafter(), torch.randn(TOKENS, HIDDEN)
    with torch.inference_mode():
        expected = through_layers(model, hidden)
        assert CALLS == ["rounds"] * 4 * LAYERS
        CALLS.clear()
        fp8_drafter.refit(model, OPS)
        got = through_layers(model, hidden.clone())
    # Of a layer's four products the attention's output alone has its rounding launched.
    assert CALLS == ["takes rounded", "rounds", "takes rounded", "takes rounded"] * LAYERS
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32
        assert error(ours, theirs) < FLOAT32


def test_another_activation_stays() -> None:
    gelu = lambda x: torch.nn.functional.gelu(x[:, :INNER]) * x[:, INNER:]  # noqa: E731
    model = drafter(act_fn=gelu)
    fp8_drafter.refit(model, OPS)
    with torch.inference_mode():
        through_layers(model, torch.randn(TOKENS, HIDDEN).bfloat16())
    assert CALLS == ["takes rounded", "rounds", "takes rounded", "rounds"] * LAYERS


@pytest.mark.parametrize("bias", [False, True])
def test_injection_projects_by_every_layers_keys_and_values(bias: bool) -> None:
    model, features = drafter(bias), torch.randn(TOKENS, FEATURES).bfloat16()
    with torch.inference_mode():
        expected = model.project_target_hidden(features)
        kv = [layer.self_attn.qkv_proj(expected)[0][:, Q_SIZE:] for layer in model.layers]
        project = fp8_drafter.refit(model, OPS)
        context = model.project_target_hidden(features)
        assert error(context, expected) < ROUNDING
        assert torch.equal(project(expected), torch.cat(kv, dim=1))


def _a_scale_of_all(layer: Any) -> None:
    layer.self_attn.qkv_proj.weight_scale = torch.ones(1)


def _a_scale_of_inputs(layer: Any) -> None:
    layer.mlp.gate_up_proj.input_scale = torch.ones(1)


def _blocks(layer: Any) -> None:
    layer.self_attn.o_proj.quant_method.block_quant = True


def _another_method(layer: Any) -> None:
    layer.mlp.down_proj.quant_method = object()


@pytest.mark.parametrize("change", [_a_scale_of_all, _a_scale_of_inputs, _blocks, _another_method])
def test_weights_by_another_rule_are_refused(change: Any) -> None:
    model = drafter()
    change(model.layers[1])
    with pytest.raises(ValueError, match="expected all of its layers' weights in FP8 with a scale for each output"):
        fp8_drafter.refit(model, OPS)
    assert isinstance(model.fc, torch.nn.Linear), "half of it was changed"
