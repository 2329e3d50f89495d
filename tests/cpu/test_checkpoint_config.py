"""Reading a drafter's config in both forms, and refusing one that does not fit its target."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dflash.checkpoint import (
    DrafterConfig,
    TargetFacts,
    config_for_target,
    config_json,
    default_taps,
    last_tap,
    read_config,
    resolve_mask_token_id,
    validate,
)
from sglang_dflash.drafter_variants import VARIANTS

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
}
CONFIG = config_for_target(SMOLLM2, 5, 16, 16, None)
TARGET = TargetFacts(name="smollm2", hidden_size=576, num_hidden_layers=30, vocab_size=49152, last_tap=28)

ZLAB = config_json(CONFIG, "bfloat16")
SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "block_size": 8,
    "draft_vocab_size": 49152,
    "aux_hidden_state_layer_ids": [2, 9, 15, 21, 28],
    "mask_token_id": 16,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 576,
        "num_hidden_layers": 5,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
    },
}


def written(path: Path, raw: dict) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    return path


def changed(raw: dict, **changes) -> dict:
    """A copy with top-level keys replaced; None removes one, `nested__key` reaches inside."""
    result = json.loads(json.dumps(raw))
    for name, value in changes.items():
        *nests, key = name.split("__")
        scope = result
        for nest in nests:
            scope = scope[nest]
        if value is None:
            scope.pop(key, None)
        else:
            scope[key] = value
    return result


def test_zlab_form(tmp_path):
    config = read_config(written(tmp_path, ZLAB))
    assert config == CONFIG
    assert config.source == str(tmp_path)
    assert config.target_layer_ids == (1, 8, 14, 20, 27)
    assert (config.rope_theta, config.rms_norm_eps, config.head_dim) == (1e5, 1e-5, 64)
    assert (config.variant, config.form, config.served_by_stock) == ("dflash", "z-lab", True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_size": None, "dflash_config__block_size": 12}, {"block_size": 12}),
        ({"dflash_config__block_size": 12}, {"block_size": 12}),  # the nested key wins, as in SGLang
        ({"dflash_config": None, "target_layer_ids": [2, 5], "mask_token_id": 9}, {"mask_token_id": 9}),
        ({"dflash_config__target_layer_ids": None}, {"target_layer_ids": (1, 8, 14, 20, 27)}),
        ({"dflash_config__mask_token": "<m>"}, {"mask_token": "<m>"}),
        ({"dflash_config__attention_value_scale": 0.5}, {"attention_value_scale": 0.5}),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, {"rope_theta": 7.0}),
        ({"rope_theta": None}, {"rope_theta": 10000.0}),
        (
            {"rope_theta": 8.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 8.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        ({"rope_scaling": {"rope_theta": 6.0, "rope_type": "default"}}, {"rope_theta": 6.0, "rope_scaling": None}),
        ({"is_causal": True}, {"is_causal": True}),
        ({"attention_bias": True}, {"attention_bias": True}),
        ({"sliding_window": 64}, {"sliding_window": None}),  # dropped without use_sliding_window
        ({"head_dim": None}, {"head_dim": 128}),  # Qwen3Config's default, not hidden size / heads
        (
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4},
            {"layer_types": ("full_attention",) * 4 + ("sliding_attention",), "sliding_window": 64},
        ),
    ],
)
def test_zlab_keys(tmp_path, changes, expected):
    config = read_config(written(tmp_path, changed(ZLAB, **changes)))
    assert {key: getattr(config, key) for key in expected} == expected


def test_speculators_form_has_its_taps_one_higher(tmp_path):
    config = read_config(written(tmp_path, SPECULATORS))
    expected = replace(
        CONFIG,
        form="speculators",
        block_size=8,
        draft_vocab_size=49152,
        num_target_layers=None,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
    )
    assert config == expected
    assert config.target_layer_ids == (1, 8, 14, 20, 27)
    assert not config.served_by_stock


def test_speculators_sliding_layers_are_causal_unless_told_otherwise(tmp_path):
    sliding = {
        "transformer_layer_config__layer_types": ["full_attention", *["sliding_attention"] * 4],
        "transformer_layer_config__use_sliding_window": True,
        "transformer_layer_config__sliding_window": 2048,
    }
    config = read_config(written(tmp_path, changed(SPECULATORS, **sliding)))
    assert [config.layer_is_causal(i) for i in range(5)] == [False, True, True, True, True]
    assert [config.layer_window(i) for i in range(5)] == [None, 2048, 2048, 2048, 2048]
    both_ways = changed(SPECULATORS, **sliding, sliding_window_non_causal=True)
    config = read_config(written(tmp_path, both_ways))
    assert [config.layer_is_causal(i) for i in range(5)] == [False] * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": None}, "block_size: expected an integer, got no such key; add it"),
        ({"block_size": "16"}, "block_size: expected an integer of at least 1, got '16'; correct it"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected an integer of at least 1, got 0; correct it"),
        ({"dflash_config__mask_token_id": -1}, "mask_token_id: expected an integer of at least 0, got -1; correct it"),
        ({"dflash_config__mask_token_id": True}, "mask_token_id: expected an integer of at least 0, got True; corr"),
        ({"dflash_config__mask_token": 3}, "mask_token: expected a non-empty string, got 3; correct it or remove it"),
        ({"dflash_config__target_layer_ids": []}, r"target_layer_ids: expected a non-empty list of integers, got \[\]"),
        ({"dflash_config__target_layer_ids": [1, "2"]}, "target_layer_ids: expected a non-empty list of integers"),
        (
            {"dflash_config__target_layer_ids": None, "num_target_layers": None},
            "target_layer_ids: expected it or num_target_layers, got neither; add target_layer_ids",
        ),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a number, got 'small'; correct it"),
        ({"attention_bias": "false"}, "attention_bias: expected true or false, got 'false'; correct it"),
        ({"is_causal": 1}, "is_causal: expected true or false, got 1; correct it"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected a list of 5 names"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters: expected one set for all"),
        ({"dflash_config": [1]}, r"dflash_config: expected a JSON object, got \[1\]; restore it"),
        ({"architectures": ["Qwen3ForCausalLM"]}, r"architectures: expected DFlashDraftModel, got \['Qwen3ForCausalLM"),
        ({"model_type": "llama", "head_dim": None}, "head_dim: expected an integer, got no such key; add it"),
    ],
)
def test_zlab_config_refusals(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(written(tmp_path, changed(ZLAB, **changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"aux_hidden_state_layer_ids": None},
            "aux_hidden_state_layer_ids: expected a list of target layers, got none",
        ),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type: expected dflash, got 'eagle3'; pass a DFlash"),
    ],
)
def test_speculators_config_refusals(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(written(tmp_path, changed(SPECULATORS, **changes)))


def test_every_wrong_key_is_named_at_once(tmp_path):
    with pytest.raises(ValueError, match="block_size") as refusal:
        read_config(written(tmp_path, changed(ZLAB, block_size=None, num_hidden_layers="5", hidden_act=3)))
    assert all(key in str(refusal.value) for key in ("block_size", "num_hidden_layers", "hidden_act", str(tmp_path)))


def test_no_config_and_no_json(tmp_path):
    with pytest.raises(ValueError, match=r"expected a drafter directory with config\.json, got .*download"):
        read_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"expected JSON, got .*restore the file"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("raw", "variant"),
    [
        (changed(ZLAB, architectures=["LiLiCorrDraftModel"]), "lilicorr"),
        (changed(ZLAB, dflash_config__lilicorr_hidden_size=64), "lilicorr"),
        (changed(ZLAB, dflash_config__projector_type="domino", dflash_config__shift_label=True), "domino"),
        (changed(ZLAB, architectures=["Qwen3DSparkModel"]), "dspark"),
        (changed(ZLAB, markov_rank=64), "dspark"),
        (changed(ZLAB, dflash_config__selector_rank=256), "dflash2"),
        (changed(ZLAB, dflash_config__conv_kernel_size=2), "dflash2"),
        (changed(ZLAB, architectures=["MiniMaxDFlash2DraftModel"]), "dflash2"),
        (changed(ZLAB, architectures=["DFlashLagunaForCausalLM"]), "laguna"),
        (changed(ZLAB, architectures=["MuseGlimmerAssistantModel"]), "muse"),
        (changed(ZLAB, query_zero_predicts_next=True), "anchor-predicts"),
        (changed(SPECULATORS, sample_from_anchor=True), "anchor-predicts"),
        (changed(SPECULATORS, speculators_model_type="dflash2"), "dflash2"),
        (changed(ZLAB, has_embed_tokens=True, quantization_config={"quant_algo": "W4A16_NVFP4"}), "nemotron"),
        (changed(ZLAB, has_embed_tokens=True), "own-embedding"),
        (changed(ZLAB, quantization_config={"quant_method": "fp8"}), "quantized"),
        (changed(ZLAB, dflash_config__attention_sink_bias=True), "attention-sink"),
        (changed(ZLAB, dflash_config__final_logit_softcapping=30.0), "scaled-logits"),
        (changed(ZLAB, dflash_config__output_multiplier=0.5), "scaled-logits"),
        (changed(ZLAB, use_gemma_norm=True), "gemma-norm"),
        (changed(ZLAB, partial_rotary_factor=0.5), "rope-layout"),
        (changed(ZLAB, rope_is_neox_style=False), "rope-layout"),
        (changed(ZLAB, rope_parameters={"rope_theta": 1e5, "rope_dim": 32}), "rope-layout"),
    ],
)
def test_variants_are_named(tmp_path, raw, variant):
    config = read_config(written(tmp_path, raw))
    assert config.variant == variant
    assert config.served_by_stock == (VARIANTS[variant] and config.form == "z-lab")


def test_what_stock_sglang_does_not_serve():
    assert {name for name, served in VARIANTS.items() if not served} == {"anchor-predicts", "own-embedding", "dspark"}


def test_a_mask_embedding_file_makes_a_variant(tmp_path):
    (written(tmp_path, ZLAB) / "mask_embedding.pt").touch()
    assert read_config(tmp_path).variant == "mask-embedding"


@pytest.mark.parametrize(
    ("num_target_layers", "num_taps", "taps"),
    [(36, 5, (1, 9, 17, 25, 33)), (30, 5, (1, 8, 14, 20, 27)), (36, 1, (18,)), (4, 2, (1, 1))],
)
def test_default_taps(num_target_layers, num_taps, taps):
    assert default_taps(num_target_layers, num_taps) == taps


def test_default_taps_need_four_layers():
    with pytest.raises(ValueError, match="expected a target of at least 4 layers, got 3; list target_layer_ids"):
        default_taps(3, 2)


def test_last_tap():
    assert last_tap("Qwen3ForCausalLM", 36) == 34
    assert last_tap("LlamaForCausalLM", 30) == 28
    assert last_tap("GptOssForCausalLM", 24) == 23


def test_a_fitting_drafter_passes():
    validate(CONFIG, TARGET)
    validate(CONFIG, TARGET, 16)
    validate(CONFIG, TARGET, 2)
    validate(replace(CONFIG, num_target_layers=None), TARGET)
    validate(CONFIG, replace(TARGET, token_ids={"<|MASK|>": 16}))
    validate(replace(CONFIG, target_layer_ids=(0, 28)), TARGET)


@pytest.mark.parametrize(
    ("config", "target", "block_size", "message"),
    [
        (
            {"target_layer_ids": (1, 29)},
            {},
            None,
            r"target_layer_ids: expected layers 0 to 28, whose output SGLang hands out \(of 30\), got \[29\]; use",
        ),
        ({"target_layer_ids": (-1, 3)}, {}, None, r"target_layer_ids: expected layers 0 to 28.*got \[-1\]; use"),
        (
            {"target_layer_ids": (8, 1)},
            {},
            None,
            r"expected ascending, distinct layers.*got \[8, 1\]; reorder the list",
        ),
        ({"target_layer_ids": (8, 8)}, {}, None, r"expected ascending, distinct layers.*got \[8, 8\]"),
        ({"hidden_size": 512}, {}, None, "hidden_size: expected 576 as the target's, got 512; use the drafter made"),
        ({"vocab_size": 500}, {}, None, "vocab_size: expected 49152 as the target's, got 500; use the drafter made"),
        ({"num_target_layers": 36}, {}, None, "num_target_layers: expected 30 as the target's, got 36; use the"),
        ({"draft_vocab_size": 32000}, {}, None, r"draft_vocab_size: expected the whole.*\(49152\), got 32000; export"),
        ({"num_attention_heads": 8}, {}, None, r"expected a multiple of num_key_value_heads \(3\), got 8; correct"),
        ({"head_dim": 63}, {}, None, "head_dim: expected an even number, for RoPE, got 63; correct it"),
        ({"hidden_act": "gelu"}, {}, None, "hidden_act: expected silu, got gelu; use a drafter with SwiGLU layers"),
        (
            {"layer_types": ("full_attention", "linear")},
            {},
            None,
            r"layer_types: expected .*, got \['linear'\]; correct",
        ),
        (
            {"layer_types": ("sliding_attention",) * 5},
            {},
            None,
            r"sliding_window: expected at least block_size \(16\) .*, got None; set sliding_window and",
        ),
        ({"layer_types": ("sliding_attention",) * 5, "sliding_window": 15}, {}, None, r"block_size \(16\) .*, got 15"),
        (
            {},
            {},
            17,
            "block size: expected 2 to 16, the width the drafter was trained with, got 17; request at most 16",
        ),
        ({}, {}, 1, "block size: expected 2 to 16, the width the drafter was trained with, got 1"),
        ({"block_size": 65}, {}, None, "block size: expected at most 64, the widest .*, got 65; set --speculative"),
        ({"block_size": 1}, {}, None, r"block_size: expected at least 2 \(anchor and one draft\), got 1; correct"),
        ({"mask_token_id": 49152}, {}, None, "expected an id below the target's vocabulary size 49152, got 49152; use"),
        (
            {},
            {"token_ids": {"<|MASK|>": 3}},
            None,
            r"mask_token_id: expected 3, the tokenizer's id of '<\|MASK\|>', got 16; keep the id of the training",
        ),
        ({"mask_token": "<m>"}, {"token_ids": {"<m>": 4}}, None, "expected 4, the tokenizer's id of '<m>', got 16"),
        (
            {"mask_token_id": None},
            {},
            None,
            "mask_token_id: expected an id in .*, got no id, and no tokenizer; add the",
        ),
        (
            {"mask_token_id": None},
            {"token_ids": {}},
            None,
            r"got no id, and no '<\|MASK\|>' in the tokenizer; add the id",
        ),
    ],
)
def test_refusals(config, target, block_size, message):
    with pytest.raises(ValueError, match=message) as refusal:
        validate(replace(CONFIG, **config), replace(TARGET, **target), block_size)
    assert str(refusal.value).startswith("the drafter does not fit target smollm2:\n  - ")


def test_every_problem_is_in_one_message():
    wrong = replace(CONFIG, hidden_size=1, vocab_size=2, target_layer_ids=(29, 3), mask_token_id=5 * 10**6, source="d")
    with pytest.raises(ValueError, match="d does not fit target smollm2") as refusal:
        validate(wrong, TARGET, 99)
    lines = str(refusal.value).split("\n  - ")[1:]
    keys = [line.split(":")[0] for line in lines]
    assert keys == ["target_layer_ids"] * 2 + ["hidden_size", "vocab_size", "block size", "mask_token_id"]
    assert all("expected" in line and "got" in line and "; " in line for line in lines)


def test_mask_token_id_from_the_tokenizer():
    unnamed = replace(CONFIG, mask_token_id=None)
    assert resolve_mask_token_id(unnamed, replace(TARGET, token_ids={"<|MASK|>": 12})) == 12
    named = replace(unnamed, mask_token="<m>")
    assert resolve_mask_token_id(named, replace(TARGET, token_ids={"<|MASK|>": 12, "<m>": 13})) == 13
    assert resolve_mask_token_id(CONFIG, replace(TARGET, token_ids={"other": 1})) == 16


def test_sizes_of_a_drafter_for_a_target():
    qwen3 = {k: v for k, v in SMOLLM2.items() if k not in ("num_key_value_heads", "rope_theta")}
    qwen3 |= {"model_type": "qwen3", "rope_parameters": {"rope_theta": 5.0}}
    config = config_for_target(qwen3, 2, 8, 3, (4, 6))
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (128, 9, 5.0)
    assert (config.target_layer_ids, config.block_size, config.num_hidden_layers) == ((4, 6), 8, 2)
    assert isinstance(config, DrafterConfig)
