"""DFLASH arguments through SGLang's own resolution, for the CPU engine: what is settled, refused, or left to stock."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash import checkpoint, config, cpu, demo, hooks, plugin
from sglang_dflash.cpu import bootstrap
from sglang_dflash.host import arguments

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: SGLang resolves for it")

TRAINED_BLOCK = 8
LAYERS = 2

# Resolved arguments, read as SGLang reads them.
Resolve = Callable[..., Any]


@pytest.fixture(scope="module")
def target() -> Path:
    return demo.prepare_target()


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_drafter(tmp_path_factory.mktemp("models") / "drafter", target)


def make_drafter(path: Path, target: Path, **overrides: Any) -> Path:
    """A random drafter for the target, or for one whose config differs as given."""
    options = {"num_layers": LAYERS, "block_size": TRAINED_BLOCK, "mask_token_id": 16, "seed": 0}
    options |= {name: overrides.pop(name) for name in ("mask_token_id", "target_layer_ids") if name in overrides}
    return checkpoint.random_drafter(path, json.loads((target / "config.json").read_text()) | overrides, **options)


def change_config(source: Path, path: Path, **changes: Any) -> Path:
    """A drafter's copy whose config.json has other keys; None removes one, nested objects are merged."""
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) and key in config else value
    config = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def raw(target: Path, drafter: Path) -> Callable[..., Any]:
    """Arguments of a DFLASH server on the CPU engine, not yet resolved."""
    bootstrap.install()
    plugin.register()
    from sglang.srt.server_args import ServerArgs

    base = {
        "model_path": str(target),
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(drafter),
        **cpu.engine_arguments(),
    }
    return lambda **options: ServerArgs(**base | options)


@pytest.fixture
def resolve(raw: Callable[..., Any]) -> Resolve:
    from sglang.srt.arg_groups.overrides import resolving_view

    def resolve(**options: Any) -> Any:
        server_args = raw(**options)
        server_args.resolve_once()
        return resolving_view(server_args)

    return resolve


# -- what is settled --------------------------------------------------------------------------------------------------


def test_defaults(resolve: Resolve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sglang_dflash"):
        cfg = resolve()
    assert cfg.speculative_num_draft_tokens == TRAINED_BLOCK
    assert cfg.speculative_num_steps == 1
    assert cfg.speculative_eagle_topk == 1
    assert cfg.speculative_draft_attention_backend == cpu.ATTENTION_BACKEND
    assert cfg.max_running_requests == 48
    assert cfg.min_free_slots_delay == 0
    assert [r.message for r in caplog.records] == [
        "At most 48 requests run at once; set --max-running-requests to change it."
    ]


@pytest.mark.parametrize(
    ("memory_mib", "captured", "proposer", "limit"),
    [
        (80_000, 256, "argmax", 256),  # 333 would fit
        (80_000, 32, "argmax", 48),
        (80_000, 256, "sampled", 216),  # 222 fit, of which whole eights are taken
        (80_000, 256, "package.module:Class", 216),
        (30_000, 256, "argmax", 120),  # 125 do
        (9_000, 256, "argmax", 48),  # 37 would
        (80_000, None, "argmax", 48),
        (None, 256, "argmax", 48),
    ],
)
def test_as_many_requests_run_as_fit(
    memory_mib: int | None, captured: int | None, proposer: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.utils.common.get_device_memory_capacity", lambda device: memory_mib)
    monkeypatch.setattr(
        "sglang.srt.arg_groups.model_override_base.model_config_of",
        lambda args: SimpleNamespace(hf_text_config=SimpleNamespace(vocab_size=49_152)),
    )
    monkeypatch.setenv(config.CONFIG_VARIABLE, json.dumps({"proposer": proposer}))
    monkeypatch.setattr(arguments, "_view", lambda server_args: server_args)
    graphs = SimpleNamespace(decode=SimpleNamespace(max_bs=captured))
    args = SimpleNamespace(device="cuda", speculative_num_draft_tokens=16, cuda_graph_config=graphs)
    assert arguments._default_max_running_requests(args) == limit


def test_the_users_values_stay(resolve: Resolve, caplog: pytest.LogCaptureFixture) -> None:
    cfg = resolve(
        max_running_requests=3,
        min_free_slots_delay=2,
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_draft_model_revision="v2",
    )
    assert (cfg.max_running_requests, cfg.min_free_slots_delay) == (3, 2)
    assert cfg.speculative_draft_model_revision == "v2"
    assert not [r for r in caplog.records if r.name.startswith("sglang_dflash")]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, False),
        ({"enable_memory_saver": True}, True),
        # All weights are kept already.
        ({"enable_memory_saver": True, "enable_weights_cpu_backup": True}, False),
    ],
)
def test_a_sleeping_servers_drafter_is_kept(raw: Callable[..., Any], options: dict[str, Any], kept: bool) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    server_args = raw(**options)
    arguments.resolve(server_args)
    assert resolving_view(server_args).enable_draft_weights_cpu_backup == kept


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"attention_backend": "triton"}, "triton"),
        ({"attention_backend": "triton", "speculative_draft_attention_backend": "fa3"}, "fa3"),
    ],
)
def test_on_a_gpu_sglang_chooses_the_drafters_attention(
    raw: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], backend: str
) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    monkeypatch.setattr(cpu, "is_cpu_engine", lambda: False)
    server_args = raw(**options)
    arguments.resolve(server_args)
    assert resolving_view(server_args).speculative_draft_attention_backend == backend


@pytest.mark.parametrize("algorithm", ["DFLASH", "dflash"])
def test_the_algorithms_case_does_not_matter(resolve: Resolve, algorithm: str) -> None:
    assert resolve(speculative_algorithm=algorithm).speculative_num_draft_tokens == TRAINED_BLOCK


@pytest.mark.parametrize("width", [2, 5, TRAINED_BLOCK])
@pytest.mark.parametrize(
    "names", [["num_draft_tokens"], ["dflash_block_size"], ["num_draft_tokens", "dflash_block_size"]]
)
def test_a_block_up_to_the_trained_one_is_served(resolve: Resolve, width: int, names: list[str]) -> None:
    cfg = resolve(**{f"speculative_{name}": width for name in names})
    assert cfg.speculative_num_draft_tokens == width


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"speculative_num_draft_tokens": 9},
            "block size: expected 2 to 8, the width the drafter was trained with, got 9",
        ),
        (
            {"speculative_dflash_block_size": 16},
            "block size: expected 2 to 8, .* got 16; request at most 8 draft tokens",
        ),
        ({"speculative_num_draft_tokens": 1}, "expected at least 2 .the anchor and one draft., got 1"),
        ({"speculative_dflash_block_size": 0}, "expected at least 2 .the anchor and one draft., got 0"),
        (
            {"speculative_num_draft_tokens": 4, "speculative_dflash_block_size": 5},
            "--speculative-num-draft-tokens 4 and --speculative-dflash-block-size 5 name the same thing: expected one",
        ),
        ({"speculative_token_map": "t.pt"}, "--speculative-token-map: expected a file, got t.pt, which is none"),
        ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single: expected only"),
        ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc: expected only"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling: expected only"),
        ({"speculative_num_steps": 3}, "--speculative-num-steps: expected 1 or nothing, got 3; .* Leave the flag out"),
        (
            {"speculative_eagle_topk": 4},
            "--speculative-eagle-topk: expected 1 or nothing, got 4; .* Leave the flag out",
        ),
        ({"speculative_draft_model_path": None}, "expected --speculative-draft-model-path, got none; name a DFlash"),
    ],
)
def test_contradictory_flags_are_refused(resolve: Resolve, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        resolve(**options)


def test_block_verification_is_refused_where_sglang_takes_it() -> None:
    """On a GPU."""
    cfg = {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0}
    cfg |= {"speculative_use_rejection_sampling": False, "speculative_use_block_verification": True}
    with pytest.raises(ValueError, match="--speculative-use-block-verification: expected only flags that DFlash reads"):
        arguments._refuse_unused(SimpleNamespace(**cfg))


def test_a_token_map_is_of_the_targets_vocabulary(resolve: Resolve, raw: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "map.pt"
    torch.save([49151, 3], path)
    assert resolve(speculative_token_map=str(path)).speculative_token_map == str(path)
    tokens_S = arguments.drafted_tokens(raw(speculative_token_map=str(path)))
    assert tokens_S is not None
    assert tokens_S.tolist() == [49151, 3]
    assert arguments.drafted_tokens(raw()) is None
    torch.save([49152], path)
    with pytest.raises(ValueError, match="expected ids below the target's vocabulary of 49152, got 49152"):
        resolve(speculative_token_map=str(path))


# -- the drafter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nowhere/drafter", "./drafter", "a/b/c"])
def test_a_drafter_that_is_nowhere_is_refused(resolve: Resolve, path: str) -> None:
    complaint = f"--speculative-draft-model-path: expected a directory or a model of the hub, got {path}; correct"
    with pytest.raises(ValueError, match=complaint):
        resolve(speculative_draft_model_path=path)


def test_a_drafter_that_the_hub_has_not_is_refused(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*args: Any, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"got some/drafter; correct the path or download the drafter \(not cached\)"):
        resolve(speculative_draft_model_path="some/drafter")


def test_a_drafter_of_the_hub_is_fetched_and_checked(
    raw: Callable[..., Any], drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked = []

    def fetch(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(drafter)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    server_args = raw(speculative_draft_model_path="some/drafter", speculative_draft_model_revision="v2")
    arguments.resolve(server_args)
    assert set(asked) == {("some/drafter", "v2")}
    assert server_args.speculative_draft_model_path == "some/drafter"


def test_a_directory_without_a_config_is_refused(resolve: Resolve, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a drafter directory with config\.json"):
        resolve(speculative_draft_model_path=str(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"hidden_size": 512}, "hidden_size: expected 576 as the target's, got 512; use the drafter made for this"),
        ({"vocab_size": 1000}, "vocab_size: expected 49152 as the target's, got 1000"),
        ({"num_hidden_layers": 12}, "num_target_layers: expected 30 as the target's, got 12"),
        ({"target_layer_ids": (1, 29)}, r"target_layer_ids: expected layers 0 to 28, .* got \[29\]"),
        ({"target_layer_ids": (5, 2)}, r"target_layer_ids: expected ascending, distinct layers .* got \[5, 2\]"),
        ({"mask_token_id": 49152}, "mask_token_id: expected an id below the target's vocabulary size 49152, got 49152"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    resolve: Resolve, target: Path, tmp_path: Path, overrides: dict[str, Any], complaint: str
) -> None:
    other = make_drafter(tmp_path / "drafter", target, **overrides)
    with pytest.raises(ValueError, match=complaint) as caught:
        resolve(speculative_draft_model_path=str(other))
    assert str(other) in str(caught.value)
    assert str(target) in str(caught.value)


def test_a_mask_token_is_looked_up_in_the_targets_tokenizer(resolve: Resolve, drafter: Path, tmp_path: Path) -> None:
    token = {"mask_token": "<empty_output>"}
    named = change_config(drafter, tmp_path / "named", dflash_config=token | {"mask_token_id": None})
    resolve(speculative_draft_model_path=str(named))
    contradicting = change_config(drafter, tmp_path / "other", dflash_config=token | {"mask_token_id": 17})
    with pytest.raises(ValueError, match="mask_token_id: expected 16, the tokenizer's id of '<empty_output>', got 17"):
        resolve(speculative_draft_model_path=str(contradicting))
    unnamed = change_config(drafter, tmp_path / "unnamed", dflash_config={"mask_token_id": None})
    with pytest.raises(ValueError, match=r"mask_token_id: expected an id .* got no id, and no '<\|MASK\|>' in the tok"):
        resolve(speculative_draft_model_path=str(unnamed))


def test_a_missing_tensor_is_refused_before_weights_load(resolve: Resolve, drafter: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(drafter, tmp_path / "drafter"))
    tensors = load_file(broken / "model.safetensors")
    del tensors["layers.1.self_attn.k_norm.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_norm\.weight: missing; export the drafter"):
        resolve(speculative_draft_model_path=str(broken))
    # Dummy weights are drawn, not read.
    resolve(speculative_draft_model_path=str(broken), speculative_draft_load_format="dummy")
    (broken / "model.safetensors").unlink()
    resolve(speculative_draft_model_path=str(broken), load_format="dummy")


def speculators_form(source: Path, path: Path) -> Path:
    """The same drafter as the Speculators library writes it: sizes nested, taps one higher."""
    config = checkpoint.read_config(source)
    sizes = dataclasses.asdict(config)
    nested = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    nested += ("intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings", "hidden_act")
    path.mkdir()
    written = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "transformer_layer_config": {"model_type": "qwen3"} | {key: sizes[key] for key in nested},
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
    }
    (path / "config.json").write_text(json.dumps(written))
    shutil.copy(source / "model.safetensors", path)
    return path


def test_a_drafter_in_the_speculators_form_is_rewritten(
    resolve: Resolve, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_HOME", str(tmp_path / "home"))
    source = speculators_form(drafter, tmp_path / "speculators")
    cfg = resolve(speculative_draft_model_path=str(source))
    readable = Path(cfg.speculative_draft_model_path)
    assert readable.is_relative_to(tmp_path / "home")
    expected, got = checkpoint.read_config(drafter), checkpoint.read_config(readable)
    assert got.form == "z-lab"
    for key in ("target_layer_ids", "block_size", "mask_token_id", "hidden_size", "num_hidden_layers", "rope_theta"):
        assert getattr(got, key) == getattr(expected, key), key
    theirs = checkpoint.load_tensors(readable, got)
    for name, tensor in checkpoint.load_tensors(drafter, expected).items():
        assert torch.equal(theirs[name], tensor), name
    assert cfg.speculative_num_draft_tokens == TRAINED_BLOCK
    again = resolve(speculative_draft_model_path=str(source), speculative_algorithm="dflash")
    assert again.speculative_draft_model_path == str(readable)


def test_other_algorithms_drafters_are_not_looked_at(raw: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "drafter_dir", lambda cfg: pytest.fail("the drafter was looked at"))
    for options in (
        {"speculative_algorithm": "EAGLE"},
        {"speculative_algorithm": None},
        {"speculative_draft_model_path": None},
    ):
        server_args = raw(**options)
        arguments.point_to_readable_drafter(server_args)
        assert not getattr(server_args, "_resolved_overrides", None)


# -- what is left to the stock worker ---------------------------------------------------------------------------------

UNSERVED: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 2}, "--tp-size 2"),
    ({"pp_size": 2}, "--pp-size 2"),
    ({"tp_size": 2, "attn_dp_size": 2}, "attention data parallelism"),
    ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
    ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
    ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
    ({"enable_flexkv": True}, "--enable-flexkv"),
    ({"enable_lora": True}, "--enable-lora"),
    ({"lora_paths": ["name=/path"]}, "--enable-lora"),
    ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
    ({"enable_unified_memory": True}, "--enable-unified-memory"),
    ({"enable_strict_thinking": True}, "--enable-strict-thinking"),
    ({"speculative_draft_window_size": 64}, "--speculative-draft-window-size"),
    ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3"),
    ({"speculative_draft_kv_cache_dtype": "fp8_e4m3"}, "--speculative-draft-kv-cache-dtype fp8_e4m3"),
    ({"speculative_draft_model_quantization": "awq"}, "a drafter quantized with awq"),
    # SGLang quantizes the drafter with the target.
    ({"quantization": "fp8"}, "a drafter quantized with fp8"),
]
IDS = [" ".join(f"{k}={v}" for k, v in options.items()) for options, _ in UNSERVED]


@pytest.mark.parametrize(("options", "phrase"), UNSERVED, ids=IDS)
def test_an_unserved_configuration_is_refused_in_strict_mode(
    resolve: Resolve, options: dict[str, Any], phrase: str
) -> None:
    with pytest.raises(ValueError, match="sglang-dflash does not serve this configuration: ") as caught:
        resolve(**options)
    assert phrase in str(caught.value)


@pytest.mark.parametrize(("options", "phrase"), UNSERVED, ids=IDS)
def test_an_unserved_configuration_is_left_to_stock_with_one_line(
    resolve: Resolve,
    options: dict[str, Any],
    phrase: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_STRICT", "0")
    # On a CPU there is no stock worker, which SGLang's own resolution says.
    with pytest.raises(ValueError, match="DFLASH speculative decoding is not supported by CpuSRTPlatform"):
        resolve(**options)
    [line] = [r.message for r in caplog.records if r.name == hooks.__name__]
    assert line.startswith("SGLang's built-in DFLASH worker serves, not sglang-dflash ")
    assert phrase in line


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "bf16"},
        {"speculative_draft_kv_cache_dtype": "bfloat16"},
        {"quantization": "fp8", "speculative_draft_model_quantization": "unquant"},
        {"page_size": 16},
        {"disable_radix_cache": True},
        {"disable_overlap_schedule": True},
        {"chunked_prefill_size": 128},
    ],
    ids=str,
)
def test_a_served_configuration(resolve: Resolve, options: dict[str, Any]) -> None:
    assert resolve(**options).speculative_num_draft_tokens == TRAINED_BLOCK


def test_every_reason_is_named_at_once(raw: Callable[..., Any]) -> None:
    reasons = arguments.reasons_for_stock(raw(enable_mixed_chunk=True, enable_lora=True, device="xpu"))
    assert reasons == ["--enable-lora", "--enable-mixed-chunk", "device xpu"]


def test_a_target_with_recurrent_layers_is_left_to_stock(raw: Callable[..., Any], tmp_path: Path) -> None:
    config = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 2, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "layer_types": ["conv", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    [reason] = arguments.reasons_for_stock(raw(model_path=str(tmp_path)))
    assert "recurrent layers" in reason


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        ({"dflash_config": {"selector_rank": 8, "selector_top_k": 4}}, "dflash2"),
        ({"dflash_config": {"projector_type": "domino"}}, "domino"),
        ({"dflash_config": {"lilicorr_rank": 8}}, "lilicorr"),
    ],
)
def test_a_drafter_that_stock_serves_is_left_to_it(
    raw: Callable[..., Any], drafter: Path, tmp_path: Path, changes: dict[str, Any], variant: str
) -> None:
    other = change_config(drafter, tmp_path / "drafter", **changes)
    reasons = arguments.reasons_for_stock(raw(speculative_draft_model_path=str(other)))
    assert reasons == [f"a drafter of the variant {variant}"]


def test_a_drafter_that_nobody_serves_right_is_refused(resolve: Resolve, drafter: Path, tmp_path: Path) -> None:
    other = change_config(drafter, tmp_path / "drafter", dflash_config={"query_zero_predicts_next": True})
    with pytest.raises(
        ValueError, match="the variant anchor-predicts, which neither sglang-dflash nor SGLang's DFLASH"
    ):
        resolve(speculative_draft_model_path=str(other))
