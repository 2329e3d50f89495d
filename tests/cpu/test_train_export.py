"""A drafter in the speculators form: the same config and bits when read back, and back again in SGLang's form."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.checkpoint import (
    DrafterConfig,
    check_tensors,
    config_for_target,
    expected_tensors,
    load_tensors,
    read_config,
    sglang_form,
    write_checkpoint,
)
from sglang_dflash.train.export import speculators_json, to_speculators

TARGET = {
    "hidden_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 50,
    "rope_theta": 1e5,
}
VERIFIER = {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]}
PLAIN = replace(config_for_target(TARGET, 2, 4, 3, None), is_causal=False)
SLIDING = replace(PLAIN, layer_types=("sliding_attention", "full_attention"), sliding_window=32)
YARN = {"rope_type": "yarn", "factor": 4.0}


def drafter(path: Path, config: DrafterConfig = PLAIN) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in expected_tensors(config).items()
    }
    return write_checkpoint(path, config, tensors)


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        SLIDING,
        replace(SLIDING, is_causal=None),
        replace(PLAIN, rope_scaling=YARN, mask_token="<|m|>", attention_bias=True, rms_norm_eps=1e-5),
    ],
    ids=["plain", "sliding", "sliding-causal", "other-keys"],
)
@pytest.mark.parametrize("link", [False, True])
def test_read_back_it_is_the_same_drafter(tmp_path, config, link):
    source = drafter(tmp_path / "source", config)
    exported = to_speculators(source, tmp_path / "out", VERIFIER, link=link)
    got = read_config(exported)
    assert got.form == "speculators"
    assert replace(got, form="z-lab", draft_vocab_size=None) == config
    assert check_tensors(exported, got) == {}
    before, after = load_tensors(source, config), load_tensors(exported, got)
    assert before.keys() == after.keys()
    assert all(after[name].dtype == torch.bfloat16 and torch.equal(after[name], before[name]) for name in before)
    assert (exported / "model.safetensors").is_symlink() == link

    again = sglang_form(exported, tmp_path / "cache")
    assert read_config(again) == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_tensors(again, config).items())


def test_config_of_the_form():
    raw = speculators_json(PLAIN, VERIFIER, "bfloat16")
    assert raw["aux_hidden_state_layer_ids"] == [tap + 1 for tap in PLAIN.target_layer_ids] == [2, 6]
    assert raw["speculators_config"] == {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": VERIFIER,
    }
    assert (raw["block_size"], raw["mask_token_id"], raw["sample_from_anchor"]) == (4, 3, False)
    assert (raw["draft_vocab_size"], raw["target_hidden_size"]) == (50, 16)
    # Transformers would take a top-level model_type for the class to load.
    assert "model_type" not in raw
    assert raw["transformer_layer_config"]["model_type"] == "qwen3"
    assert not raw["transformer_layer_config"].keys() & {"dflash_config", "block_size", "is_causal", "architectures"}


def test_layers_that_see_the_whole_block_say_so():
    """Some releases of vLLM make every layer causal where the flag is false."""

    def flag(**changes: object) -> bool:
        return speculators_json(replace(PLAIN, **changes), VERIFIER, "bfloat16")["sliding_window_non_causal"]

    sliding = ("sliding_attention",) * 2
    assert flag(is_causal=None)
    assert flag(is_causal=False, layer_types=sliding, sliding_window=32)
    assert not flag(is_causal=None, layer_types=sliding, sliding_window=32)
    assert not flag(is_causal=True, layer_types=sliding, sliding_window=32)


def test_other_names_and_tensors_beside_the_drafters_are_written_anew(tmp_path):
    source = drafter(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4).bfloat16()}
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()} | extra, source / "model.safetensors")
    exported = to_speculators(source, tmp_path / "out", VERIFIER, link=True)
    written = load_file(exported / "model.safetensors")
    assert written.keys() == expected_tensors(PLAIN).keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_shards_are_taken_with_their_index_and_nothing_else(tmp_path):
    source = drafter(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, source / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "optimizer.pt").write_bytes(b"")
    exported = to_speculators(source, tmp_path / "out", VERIFIER)
    assert {file.name for file in exported.iterdir()} == {*shards, "model.safetensors.index.json", "config.json"}
    got = load_tensors(exported, read_config(exported))
    assert all(torch.equal(got[name], tensors[name]) for name in names)


@pytest.mark.parametrize(
    ("config", "verifier", "told"),
    [
        (replace(PLAIN, mask_token_id=None, mask_token="<|m|>"), VERIFIER, ["mask_token_id", "'<|m|>'"]),
        (replace(PLAIN, attention_value_scale=2.0), VERIFIER, ["attention_value_scale: expected none, got 2.0"]),
        (replace(SLIDING, is_causal=True), VERIFIER, ["is_causal"]),
        (PLAIN, {}, ["verifier.name_or_path", "verifier.architectures"]),
        (PLAIN, {**VERIFIER, "architectures": "LlamaForCausalLM"}, ["verifier.architectures", "'LlamaForCausalLM'"]),
        (PLAIN, {**VERIFIER, "architectures": []}, ["verifier.architectures"]),
        (PLAIN, {**VERIFIER, "revision": "main"}, ["verifier", "revision"]),
    ],
)
def test_what_the_form_cannot_say_is_refused_before_anything_is_written(tmp_path, config, verifier, told):
    source = drafter(tmp_path / "source", config)
    with pytest.raises(ValueError, match="no export to the speculators form") as error:
        to_speculators(source, tmp_path / "out", verifier)
    assert all(part in str(error.value) for part in told)
    assert len(str(error.value).splitlines()) == 1 + (2 if verifier == {} else 1)
    assert not (tmp_path / "out").exists()


def test_wrong_folders_are_refused(tmp_path):
    source = drafter(tmp_path / "source")
    exported = to_speculators(source, tmp_path / "out", VERIFIER)
    with pytest.raises(ValueError, match="expected a drafter of the z-lab form, got the speculators form"):
        to_speculators(exported, tmp_path / "other", VERIFIER)
    with pytest.raises(ValueError, match="expected a new or empty folder"):
        to_speculators(source, exported, VERIFIER)
    with pytest.raises(ValueError, match="expected a new or empty folder"):
        to_speculators(source, source / "config.json", VERIFIER)
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"].float()}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected tensors of one of .*, got \['BF16', 'F32'\]"):
        to_speculators(source, tmp_path / "mixed", VERIFIER)
    save_file({}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm.weight: missing"):
        to_speculators(source, tmp_path / "empty", VERIFIER)
