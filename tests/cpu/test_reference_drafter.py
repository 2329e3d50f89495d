"""The reference drafter against an independent dense formulation built from Transformers' own parts."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from sglang_dflash.checkpoint import DrafterConfig, expected_tensors, write_checkpoint
from sglang_dflash.reference import Drafter, load_drafter

CONFIG = DrafterConfig(
    block_size=6,
    mask_token_id=7,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    vocab_size=500,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
)
SLIDING = {"layer_types": ("full_attention", "sliding_attention", "sliding_attention"), "sliding_window": 8}
CONFIGS = {
    "plain": CONFIG,
    "causal": replace(CONFIG, is_causal=True),
    "sliding-causal": replace(CONFIG, **SLIDING),
    "sliding-bidirectional": replace(CONFIG, **SLIDING, is_causal=False),
    "value-scale": replace(CONFIG, attention_value_scale=0.6),
    "bias": replace(CONFIG, attention_bias=True),
    "yarn": replace(CONFIG, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    "linear-old-key": replace(CONFIG, rope_scaling={"type": "linear", "factor": 2.0}),
}


def random_tensors(config: DrafterConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights large enough that every norm, bias and projection shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.empty(shape).normal_(std=0.25, generator=generator)
        tensors[name] = noise + 1 if "norm" in name else noise
    return tensors


def make_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    drafter = Drafter(config).eval()
    drafter.load_state_dict(random_tensors(config, seed))
    return drafter


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    norm = Qwen3RMSNorm(weight.shape[0], eps=eps)
    norm.load_state_dict({"weight": weight})
    return norm(x)


def dense_hidden(
    config: DrafterConfig, w: dict[str, torch.Tensor], features: torch.Tensor, embeds: torch.Tensor
) -> torch.Tensor:
    """The block's hidden states by one dense attention over [context; block] with an explicit mask, nothing cached."""
    n, k, eps, head = features.shape[0], embeds.shape[0], config.rms_norm_eps, config.head_dim
    rotary = Qwen3RotaryEmbedding(
        Qwen3Config(
            head_dim=head,
            max_position_embeddings=config.max_position_embeddings,
            rope_theta=config.rope_theta,
            rope_scaling=None if config.rope_scaling is None else dict(config.rope_scaling),
        )
    )
    cos, sin = rotary(embeds, torch.arange(n + k)[None])
    fused = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = embeds
    for i in range(config.num_hidden_layers):
        layer = {name.removeprefix(f"layers.{i}."): t for name, t in w.items() if name.startswith(f"layers.{i}.")}

        def linear(name: str, x: torch.Tensor, layer: dict[str, torch.Tensor] = layer) -> torch.Tensor:
            return x @ layer[f"{name}.weight"].T + layer.get(f"{name}.bias", 0.0)

        def heads(name: str, x: torch.Tensor, linear=linear) -> torch.Tensor:
            return linear(f"self_attn.{name}", x).view(len(x), -1, head).transpose(0, 1)

        normed = rms(x, layer["input_layernorm.weight"], eps)
        both = torch.cat((fused, normed))
        # Queries of the context are computed too and thrown away: what remains must not depend on them.
        q = rms(heads("q_proj", both), layer["self_attn.q_norm.weight"], eps)
        key = rms(heads("k_proj", both), layer["self_attn.k_norm.weight"], eps)
        q, key = apply_rotary_pos_emb(q[None], key[None], cos, sin)
        value = heads("v_proj", both) * (config.attention_value_scale or 1.0)
        groups = config.num_attention_heads // config.num_key_value_heads
        key, value = key[0].repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        scores = q[0, :, n:] @ key.transpose(1, 2) / head**0.5
        for slot in range(k):
            for token in range(n + k):
                if not visible(config, i, n + slot, token):
                    scores[:, slot, token] = -torch.inf
        attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(k, -1)
        x = x + linear("self_attn.o_proj", attended)
        normed = rms(x, layer["post_attention_layernorm.weight"], eps)
        gate = linear("mlp.gate_proj", normed)
        x = x + linear("mlp.down_proj", gate * gate.sigmoid() * linear("mlp.up_proj", normed))
    return rms(x, w["norm.weight"], eps)


def visible(config: DrafterConfig, layer: int, query: int, key: int) -> bool:
    sliding = bool(config.layer_types) and config.layer_types[layer] == "sliding_attention"
    causal = sliding if config.is_causal is None else config.is_causal
    if causal and key > query:
        return False
    return not sliding or abs(query - key) < config.sliding_window


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", [2, 6])
def test_forward_equals_dense_formulation(name, block_size):
    config, generator = CONFIGS[name], torch.Generator().manual_seed(1)
    drafter = make_drafter(config)
    features = torch.randn(11, 2 * config.hidden_size, generator=generator)
    embeds = torch.randn(block_size, config.hidden_size, generator=generator)
    context = drafter.new_context()
    drafter.inject(features, context)
    with torch.no_grad():
        hidden = drafter(embeds, context)
        expected = dense_hidden(config, random_tensors(config), features, embeds)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


def test_the_configs_differ_in_what_they_compute():
    """Each variation above changes the output, so that a drafter that ignores its key fails the test above."""
    generator = torch.Generator().manual_seed(1)
    features, embeds = torch.randn(11, 64, generator=generator), torch.randn(6, 32, generator=generator)
    plain = dense_hidden(CONFIG, random_tensors(CONFIG), features, embeds)
    for name, config in CONFIGS.items():
        hidden = dense_hidden(config, random_tensors(CONFIG), features, embeds)
        assert name in ("plain", "bias") or (hidden - plain).abs().max() > 1e-2, name


@pytest.mark.parametrize("sizes", [(1, 1, 9), (4, 7), (10, 1)])
def test_context_injected_in_parts_equals_injected_at_once(sizes):
    drafter = make_drafter(CONFIG)
    features = torch.randn(11, 64, generator=torch.Generator().manual_seed(2))
    whole, parts = drafter.new_context(), drafter.new_context()
    drafter.inject(features, whole)
    for part in features.split(sizes):
        drafter.inject(part, parts)
    assert parts.num_tokens == whole.num_tokens == 11
    for (keys, values), (keys_parts, values_parts) in zip(whole.kv, parts.kv, strict=True):
        torch.testing.assert_close(keys_parts, keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values_parts, values, rtol=1e-5, atol=1e-5)


def test_drafting_leaves_the_context_alone():
    drafter = make_drafter(CONFIG)
    context = drafter.new_context()
    drafter.inject(torch.randn(5, 64), context)
    before = [(keys.clone(), values.clone()) for keys, values in context.kv]
    drafter(torch.randn(6, 32), context)
    assert all(torch.equal(a, b) for old, new in zip(before, context.kv, strict=True) for a, b in zip(old, new))


@pytest.mark.parametrize("form_of_tensor_names", ["", "model."])
def test_load_drafter_reads_what_was_written(tmp_path, form_of_tensor_names):
    from safetensors.torch import load_file, save_file

    tensors = random_tensors(CONFIG)
    write_checkpoint(tmp_path, CONFIG, tensors)
    file = tmp_path / "model.safetensors"
    save_file({form_of_tensor_names + name: t for name, t in load_file(file).items()}, file)
    drafter = load_drafter(tmp_path)
    assert drafter.config == CONFIG
    assert {name: tuple(p.shape) for name, p in drafter.named_parameters()} == expected_tensors(CONFIG)
    assert all(torch.equal(tensors[name], p) for name, p in drafter.named_parameters())
    assert load_drafter(tmp_path, torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_another_variant_is_refused():
    with pytest.raises(ValueError, match="got variant domino"):
        Drafter(replace(CONFIG, variant="domino"))


def test_unknown_rope_scaling_is_refused():
    drafter = make_drafter(replace(CONFIG, rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    with pytest.raises(ValueError, match="expected linear, yarn or llama3, got dynamic"):
        drafter(torch.zeros(2, 32), drafter.new_context())
