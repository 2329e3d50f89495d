"""A drafter's tensors: every one accounted for from the headers alone, written and read back, and in SGLang's form."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint_config import SPECULATORS, changed, written

from sglang_dflash import checkpoint
from sglang_dflash.checkpoint import (
    DrafterConfig,
    check_tensors,
    config_for_target,
    expected_tensors,
    load_tensors,
    random_drafter,
    read_config,
    read_headers,
    sglang_form,
    write_checkpoint,
)

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
CONFIG = config_for_target(TARGET, 2, 4, 3, None)
TENSORS = {
    name: torch.full(shape, float(i), dtype=torch.bfloat16)
    for i, (name, shape) in enumerate(expected_tensors(CONFIG).items())
}
SPECULATORS_SMALL = changed(
    SPECULATORS,
    draft_vocab_size=50,
    aux_hidden_state_layer_ids=[2, 6],
    transformer_layer_config={k: v for k, v in TARGET.items() if k != "rope_theta"} | {"num_hidden_layers": 2},
)


def speculators(path: Path, extra: dict[str, torch.Tensor] | None = None, **config) -> Path:
    written(path, changed(SPECULATORS_SMALL, **config))
    save_file(TENSORS | (extra or {}), path / "model.safetensors")
    return path


def sharded(path: Path) -> Path:
    """The drafter in two shards with an index, and a stray file that the index does not name."""
    write_checkpoint(path, CONFIG, TENSORS)
    (path / "model.safetensors").unlink()
    names, shards = sorted(TENSORS), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    parts = {shards[0]: names[:9], shards[1]: names[9:]}
    for file, part in parts.items():
        save_file({name: TENSORS[name] for name in part}, path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"consolidated": torch.zeros(1)}, path / "consolidated.safetensors")
    return path


def test_expected_tensors():
    assert len(expected_tensors(replace(CONFIG, num_hidden_layers=5))) == 58
    assert len(expected_tensors(replace(CONFIG, num_hidden_layers=5, attention_bias=True))) == 78
    shapes = expected_tensors(replace(CONFIG, attention_bias=True))
    assert shapes["fc.weight"] == (16, 32)
    assert shapes["layers.1.self_attn.q_proj.weight"] == (32, 16)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (16, 16)
    assert shapes["layers.1.self_attn.o_proj.weight"] == (16, 32)
    assert shapes["layers.1.self_attn.o_proj.bias"] == (16,)
    assert shapes["layers.1.self_attn.v_proj.bias"] == (16,)
    assert shapes["layers.0.mlp.down_proj.weight"] == (16, 24)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_value_scale": 0.7, "mask_token": "<m>"},
        {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 32, "is_causal": False},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "is_causal": True},
        {"mask_token_id": None, "num_target_layers": None},
    ],
)
def test_what_is_written_is_read_again(tmp_path, changes):
    config = replace(CONFIG, **changes)
    assert write_checkpoint(tmp_path / "new" / "d", config, TENSORS) == tmp_path / "new" / "d"
    assert read_config(tmp_path / "new" / "d") == config
    assert check_tensors(tmp_path / "new" / "d", config) == {}
    tensors = load_tensors(tmp_path / "new" / "d", config)
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) and tensors[name].dtype == torch.bfloat16 for name in TENSORS)
    assert all(t.dtype == torch.float32 for t in load_tensors(tmp_path / "new" / "d", config, torch.float32).values())


def test_writing_refuses_other_tensors(tmp_path):
    with pytest.raises(ValueError, match=r"got a difference in \['fc.weight'\]"):
        write_checkpoint(tmp_path, CONFIG, TENSORS | {"fc.weight": torch.zeros(16, 16)})
    with pytest.raises(ValueError, match=r"expected one dtype, got .*float16.*float32"):
        write_checkpoint(tmp_path, CONFIG, TENSORS | {"norm.weight": torch.zeros(16)})
    assert not (tmp_path / "config.json").exists()


def test_sharded_checkpoint_reads_only_what_the_index_names(tmp_path):
    sharded(tmp_path)
    assert check_tensors(tmp_path, CONFIG) == {}
    assert {header.name for header in read_headers(tmp_path)} == TENSORS.keys()
    assert all(torch.equal(t, TENSORS[name]) for name, t in load_tensors(tmp_path, CONFIG).items())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"expected the shards of .*, got none of \['model-00002-of-00002.safetensors'\]"
    ):
        check_tensors(tmp_path, CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="expected a weight_map, got None; download the index again"):
        check_tensors(tmp_path, CONFIG)


def test_headers_are_read_without_the_weights(tmp_path):
    write_checkpoint(tmp_path, CONFIG, TENSORS)
    file = tmp_path / "model.safetensors"
    whole = read_headers(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    assert read_headers(tmp_path) == whole
    assert {h.name: (h.shape, h.dtype) for h in whole} == {n: (s, "BF16") for n, s in expected_tensors(CONFIG).items()}
    with pytest.raises(
        ValueError, match=rf"model.safetensors: expected {len(data)} bytes, got .*; download the file again"
    ):
        check_tensors(tmp_path, CONFIG)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"])
def test_no_safetensors_header(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="expected a safetensors header, got none; download the file again"):
        check_tensors(tmp_path, CONFIG)


def test_other_weight_formats_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected \*\.safetensors, got no weight file; download the weights"):
        check_tensors(tmp_path, CONFIG)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"got \['pytorch_model.bin'\]; convert them with safetensors.torch.save_file"):
        check_tensors(tmp_path, CONFIG)


def test_prefix_and_encoder_names_are_the_same_tensors(tmp_path):
    renamed = {f"model.{name}": tensor for name, tensor in TENSORS.items()}
    renamed["encoder.fc.weight"] = renamed.pop("model.fc.weight")
    renamed["encoder.output_norm_enc.weight"] = renamed.pop("model.hidden_norm.weight")
    renamed["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(renamed, tmp_path / "model.safetensors")
    assert check_tensors(tmp_path, CONFIG) == {"layers.0.self_attn.rotary_emb.inv_freq": "recomputed from rope_theta"}
    assert all(torch.equal(t, TENSORS[name]) for name, t in load_tensors(tmp_path, CONFIG).items())


@pytest.mark.parametrize(
    ("remove", "add", "config", "lines"),
    [
        (["norm.weight"], {}, {}, ["norm.weight: missing; export the drafter again"]),
        ([], {}, {"num_hidden_layers": 3}, [r"layers.2.*: missing; num_hidden_layers in config.json may be too large"]),
        (
            [],
            {},
            {"num_hidden_layers": 1},
            ["layers.1.mlp.up_proj.weight [24, 16]: unexpected; num_hidden_layers in"] * 11,
        ),
        (
            [],
            {},
            {"target_layer_ids": (1, 2, 3)},
            ["fc.weight: expected [16, 48], got [16, 32]; trained with 2 taps, target"],
        ),
        ([], {"fc.weight": (16, 33)}, {}, ["fc.weight: expected [16, 32], got [16, 33]; correct hidden_size in"]),
        (
            [],
            {"norm.weight": (16, 1)},
            {},
            ["norm.weight: expected [16], got [16, 1]; correct hidden_size in config.json"],
        ),
        (
            [],
            {"layers.0.self_attn.k_proj.weight": (8, 16)},
            {},
            ["layers.0.self_attn.k_proj.weight: expected [16, 16], got [8, 16]; correct num_attention_heads, num_key"],
        ),
        ([], {"layers.1.mlp.up_proj.weight": (9, 16)}, {}, ["got [9, 16]; correct intermediate_size and hidden_size"]),
        ([], {"layers.0.self_attn.q_proj.bias": (32,)}, {}, ["q_proj.bias [32]: unexpected; attention_bias in config"]),
        (
            [],
            {},
            {"attention_bias": True},
            ["layers.1.self_attn.v_proj.bias: missing; export"] + [".bias: missing"] * 7,
        ),
        (
            [],
            {"lm_head.weight": (50, 16)},
            {},
            ["lm_head.weight [50, 16]: unexpected; a drafter with its own embedding"],
        ),
        (
            [],
            {"d2t": (20,)},
            {},
            ["d2t [20]: unexpected; a reduced draft vocabulary is not served; export the drafter"],
        ),
        (
            [],
            {"prefix_gru.weight_ih_l0": (3, 3)},
            {},
            ["unexpected; a Domino drafter whose config lost projector_type"],
        ),
        (
            [],
            {"candidate_selector.successor_codebook": (3,)},
            {},
            ["unexpected; a DFlash2 drafter whose config lost sel"],
        ),
        (
            [],
            {"layers.0.attention_conv.base_kernel": (3,)},
            {},
            ["unexpected; a DFlash2 drafter whose config lost conv"],
        ),
        ([], {"lilicorr.x": (3,)}, {}, ["unexpected; a LiLiCorr drafter whose config lost its lilicorr_* keys"]),
        ([], {"markov_head.w1": (3,)}, {}, ["unexpected; a DSpark drafter whose config lost markov_rank"]),
        ([], {"aux_hidden_norms.0.weight": (3,)}, {}, ["unexpected; a Laguna drafter"]),
        (
            [],
            {"layers.0.self_attn.qkv_proj.weight": (3,)},
            {},
            ["unexpected; fused projections; split them into q/k/v_"],
        ),
        (
            [],
            {"fc.weight_scale": (1,)},
            {},
            ["fc.weight_scale [1]: unexpected; a quantized drafter; use the unquantized"],
        ),
        ([], {"whatever": (1,)}, {}, ["whatever [1]: unexpected; no part of a DFlash drafter"]),
    ],
)
def test_tensor_refusals(tmp_path, remove, add, config, lines):
    tensors = {name: t for name, t in TENSORS.items() if name not in remove}
    save_file(tensors | {name: torch.zeros(shape) for name, shape in add.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"the tensors do not fit config\.json") as refusal:
        check_tensors(tmp_path, replace(CONFIG, **config))
    problems = str(refusal.value).split("\n  - ")[1:]
    assert len(problems) == len(lines), problems
    assert all(any(line in problem for problem in problems) for line in lines), problems
    with pytest.raises(ValueError, match=r"the tensors do not fit config\.json"):
        load_tensors(tmp_path, replace(CONFIG, **config))


def test_every_wrong_tensor_is_named_at_once(tmp_path):
    tensors = {name: t for name, t in TENSORS.items() if name != "norm.weight"}
    save_file(tensors | {"fc.weight": torch.zeros(1), "d2t": torch.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"model.hidden_norm.weight": torch.zeros(16)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight: missing") as refusal:
        check_tensors(tmp_path, CONFIG)
    assert all(
        part in str(refusal.value) for part in ("fc.weight: exp", "d2t [2]: un", "hidden_norm.weight: expected once")
    )


def test_another_variant_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a plain DFlash drafter, got variant domino; serve it another way"):
        check_tensors(tmp_path, replace(CONFIG, variant="domino"))


def test_the_targets_tensors_in_a_speculators_checkpoint_are_named_and_not_read(tmp_path):
    names = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
    extra = {name: torch.zeros((50, 16) if "norm" not in name else (16,)) for name in names}
    config = read_config(speculators(tmp_path, extra))
    assert set(check_tensors(tmp_path, config)) == set(names)
    assert load_tensors(tmp_path, config).keys() == TENSORS.keys()


@pytest.mark.parametrize("extra", [{"t2d": (50,)}, {"d2t": (20,)}, {"lm_head.weight": (20, 16)}])
def test_a_reduced_vocabulary_is_refused(tmp_path, extra):
    config = read_config(speculators(tmp_path, {name: torch.zeros(shape) for name, shape in extra.items()}))
    with pytest.raises(ValueError, match=next(iter(extra)) + r" \[.*unexpected; a (reduced|drafter with its own)"):
        check_tensors(tmp_path, config)


def test_sglang_form_leaves_the_zlab_form_alone(tmp_path):
    path = random_drafter(tmp_path / "d", TARGET, seed=0, mask_token_id=3, num_layers=2, block_size=4)
    assert sglang_form(path, tmp_path / "cache") == path
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "extra", [{}, {"rotary_emb.inv_freq": torch.zeros(4)}, {"embed_tokens.weight": torch.zeros(50, 16)}]
)
def test_sglang_form_of_the_speculators_form(tmp_path, extra):
    source = speculators(tmp_path / "s", extra)
    form = sglang_form(source, tmp_path / "cache")
    assert form.parent == tmp_path / "cache"
    config = read_config(form)
    assert config == replace(read_config(source), form="z-lab", draft_vocab_size=None)
    assert config.target_layer_ids == (1, 5)
    raw = json.loads((form / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["dflash_config"] == {"target_layer_ids": [1, 5], "mask_token_id": 16}
    assert raw["dtype"] == "bfloat16"
    assert "embed_tokens.weight" not in load_file(form / "model.safetensors")
    assert (form / "model.safetensors").is_symlink() == ("embed_tokens.weight" not in extra)
    assert all(torch.equal(t, TENSORS[name]) for name, t in load_tensors(form, config).items())


def test_sglang_form_is_made_once_and_again_when_the_checkpoint_changes(tmp_path, monkeypatch):
    source = speculators(tmp_path / "s", {"embed_tokens.weight": torch.zeros(50, 16)})
    form = sglang_form(source, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_checkpoint", None)
        assert sglang_form(source, tmp_path / "cache") == form
    speculators(tmp_path / "s", block_size=4)
    assert read_config(sglang_form(source, tmp_path / "cache")).block_size == 4


def test_sglang_form_keeps_the_mask_embedding(tmp_path):
    source = speculators(tmp_path / "s")
    plain = sglang_form(source, tmp_path / "cache")
    torch.save({"embedding": torch.ones(16), "mask_token_id": 16}, source / "mask_embedding.pt")
    form = sglang_form(source, tmp_path / "cache")
    assert form != plain
    assert torch.equal(checkpoint.load_mask_embedding(form, read_config(form), 16), torch.ones(16))


def test_sglang_form_links_shards_and_their_index(tmp_path):
    written(sharded(tmp_path / "s"), SPECULATORS_SMALL)
    form = sglang_form(tmp_path / "s", tmp_path / "cache")
    assert (form / "model.safetensors.index.json").is_symlink()
    assert not (form / "consolidated.safetensors").exists()
    assert all(torch.equal(t, TENSORS[name]) for name, t in load_tensors(form, read_config(form)).items())


def test_sglang_form_recovers_from_an_interrupted_run(tmp_path):
    source = speculators(tmp_path / "s")
    form = sglang_form(source, tmp_path / "cache")
    (form / "config.json").unlink()
    (form / "model.safetensors").unlink()
    (form / "model.safetensors").symlink_to(tmp_path / "gone")
    assert sglang_form(source, tmp_path / "cache") == form
    assert check_tensors(form, read_config(form)) == {}


def test_sglang_form_refuses_what_it_cannot_express(tmp_path):
    save_file(
        {name: t.double() for name, t in TENSORS.items()}, written(tmp_path, SPECULATORS_SMALL) / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"expected tensors of one of \['BF16', 'F16', 'F32'\], got \['F64'\]"):
        sglang_form(tmp_path, tmp_path / "cache")


def test_random_drafter_is_the_seeds(tmp_path):
    def make(name: str, **changes) -> Path:
        return random_drafter(tmp_path / name, TARGET, **({"seed": 0, "mask_token_id": 3, "num_layers": 2} | changes))

    first, again, other = make("a"), make("b"), make("c", seed=1)
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    config = read_config(first)
    assert config == replace(CONFIG, block_size=16)
    weights = load_tensors(first, config, torch.float32)
    assert all(torch.equal(t, torch.ones_like(t)) for name, t in weights.items() if "norm" in name)
    matrices = torch.cat([t.flatten() for name, t in weights.items() if "norm" not in name])
    assert matrices.std() == pytest.approx(0.02, rel=0.05)
    taps = read_config(make("d", target_layer_ids=(2, 3, 4), block_size=7, dtype=torch.float32))
    assert (taps.target_layer_ids, taps.block_size) == ((2, 3, 4), 7)
    assert {header.dtype for header in read_headers(tmp_path / "d")} == {"F32"}


def test_sglang_reads_what_is_written(tmp_path):
    """SGLang's own parser of the written config gives the same drafter."""
    from sglang.srt.speculative.dflash_utils import (
        get_dflash_attention_sliding_window_size,
        get_dflash_layer_types,
        parse_dflash_draft_config,
    )
    from sglang.srt.utils.hf_transformers_utils import get_config, get_rope_config

    layer_types = ("full_attention", "sliding_attention")
    config: DrafterConfig = replace(
        CONFIG, mask_token="<m>", attention_value_scale=0.5, layer_types=layer_types, sliding_window=32, is_causal=False
    )
    read = get_config(str(write_checkpoint(tmp_path, config, TENSORS)), trust_remote_code=False)
    parsed = parse_dflash_draft_config(draft_hf_config=read)
    assert read.architectures == ["DFlashDraftModel"]
    assert parsed.block_size == 4
    assert tuple(parsed.target_layer_ids) == config.target_layer_ids
    assert (parsed.mask_token, parsed.mask_token_id, parsed.attention_value_scale) == ("<m>", 3, 0.5)
    assert (parsed.num_hidden_layers, parsed.num_target_layers) == (2, 8)
    assert (parsed.selector_rank, parsed.conv_kernel_size, parsed.projector_type) == (0, 0, None)
    assert tuple(get_dflash_layer_types(read)) == layer_types
    assert get_dflash_attention_sliding_window_size(read) == 31  # SGLang counts the tokens before the query
    assert get_rope_config(read)[0] == 1e5
    assert read.get_text_config().is_causal is False
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
    assert all(
        getattr(read, key) == getattr(config, key) for key in (*sizes, "rms_norm_eps", "max_position_embeddings")
    )
