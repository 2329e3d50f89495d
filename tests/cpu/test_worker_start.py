"""What the worker asks of drafter and settings when it starts, before a round runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglang_dflash_kernels as kernels
from sglang_dflash import checkpoint, cpu, demo, plugin
from sglang_dflash.accept.forced import ForcedAcceptor
from sglang_dflash.accept.rejection import RejectionAcceptor
from sglang_dflash.buffers import Buffers
from sglang_dflash.cpu import bootstrap

if bootstrap.wanted():
    bootstrap.install()

from sglang_dflash import worker
from sglang_dflash.host import arguments, draft_model

CPU = torch.device("cpu")


def attention(**changes: Any) -> SimpleNamespace:
    """What injection reads of one attention layer of SGLang's drafter."""
    parts = {
        "use_gemma_norm": False,
        "rotary_emb": SimpleNamespace(is_neox_style=True, cos_sin_cache=torch.zeros(2, 4)),
        "qkv_proj": SimpleNamespace(weight=torch.zeros(6, 4)),
        "attn": SimpleNamespace(k_scale=None, v_scale=1.0),
    }
    return SimpleNamespace(**parts | changes)


def test_dense_layers_pass() -> None:
    draft_model._require_served([attention(), attention()])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"use_gemma_norm": True}, "expected RMSNorm, got Gemma norms"),
        ({"rotary_emb": SimpleNamespace(is_neox_style=False, cos_sin_cache=0)}, "expected neox-style RoPE"),
        # As SGLang's LongRoPE: neither the one table nor the flag.
        ({"rotary_emb": SimpleNamespace(long_short_cos_sin_cache=0)}, "expected neox-style RoPE from one table, got "),
        (
            {"qkv_proj": SimpleNamespace(weight=torch.zeros(6, 4, dtype=torch.int8))},
            "expected dense or FP8 attention weights",
        ),
        ({"qkv_proj": SimpleNamespace(weight=torch.zeros(6, 4), use_intel_amx_backend=True)}, "repacked for AMX"),
        ({"attn": SimpleNamespace(k_scale=0.5, v_scale=None)}, "expected key and value scales of 1"),
    ],
)
def test_a_layer_that_injection_would_read_wrong_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        draft_model._require_served([attention(), attention(**changes)])


def test_drafter_and_target_share_a_dtype() -> None:
    draft_model._require_dtype(torch.bfloat16, torch.bfloat16)
    complaint = (
        r"expected the target's dtype torch\.float16, got torch\.bfloat16; start the server with --dtype float16"
    )
    with pytest.raises(ValueError, match=complaint):
        draft_model._require_dtype(torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("mode", "keep_drafts"), [("fixed", False), ("real-draft-token", True)])
def test_forced_acceptance_follows_sglangs_settings(
    monkeypatch: pytest.MonkeyPatch, mode: str, keep_drafts: bool
) -> None:
    monkeypatch.setattr(worker, "SIMULATE_ACC_LEN", 3.0)
    monkeypatch.setattr(worker, "SIMULATE_ACC_TOKEN_MODE", mode)
    made = worker._make_acceptor(kernels.select(CPU), Buffers(2, 4, CPU))
    assert isinstance(made, ForcedAcceptor)
    assert made._keep_drafts == keep_drafts


def test_an_unknown_mode_of_forced_acceptance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SIMULATE_ACC_TOKEN_MODE", "drafts")
    assert isinstance(worker._make_acceptor(kernels.select(CPU), Buffers(2, 4, CPU)), RejectionAcceptor)
    monkeypatch.setattr(worker, "SIMULATE_ACC_LEN", 3.0)
    with pytest.raises(ValueError, match="expected fixed or real-draft-token, got 'drafts'"):
        worker._make_acceptor(kernels.select(CPU), Buffers(2, 4, CPU))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target_config = json.loads((demo.prepare_target() / "config.json").read_text())
    path = tmp_path_factory.mktemp("models") / "drafter"
    return checkpoint.random_drafter(path, target_config, num_layers=1, block_size=4, mask_token_id=16, seed=0)


def server_args(drafter: Path, **options: Any) -> Any:
    plugin.register()
    from sglang.srt.server_args import ServerArgs

    base = {
        "model_path": str(demo.prepare_target()),
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(drafter),
        **cpu.engine_arguments(),
    }
    return ServerArgs(**base | options)


def test_a_mask_token_is_found_without_the_servers_tokenizer(drafter: Path, tmp_path: Path) -> None:
    assert arguments.mask_token_id(server_args(drafter)) == 16
    named = Path(shutil.copytree(drafter, tmp_path / "named"))
    config = json.loads((named / "config.json").read_text())
    config["dflash_config"] |= {"mask_token": "<empty_output>", "mask_token_id": None}
    (named / "config.json").write_text(json.dumps(config))
    assert arguments.mask_token_id(server_args(named, skip_tokenizer_init=True)) == 16


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"radix_cache_backend": "flexkv"}, "--radix-cache-backend flexkv"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
    ],
)
def test_a_cache_that_knows_no_drafter_is_left_to_stock(drafter: Path, options: dict[str, Any], reason: str) -> None:
    assert arguments.reasons_for_stock(server_args(drafter, **options)) == [reason]


@pytest.mark.parametrize(
    ("planned", "served", "ours"),
    [
        ({"target", "drafter"}, True, True),
        ({"target", "drafter"}, False, False),
        ({"target"}, True, False),
        ({"drafter"}, True, False),
    ],
)
def test_a_rounds_graphs_are_made_where_both_models_allow_it(
    planned: set[str], served: bool, ours: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before SGLang captures either model's graphs, and with the buffer that the proposer fills."""
    made: list[Any] = []

    class Graphs:
        def __init__(self, *parts: Any) -> None:
            made.append(parts)
            self.checked = False

        def check(self) -> None:
            assert given["drafter"] == (started.layout, "score", self), "captured first"
            self.checked = True

    given: dict[str, Any] = {}

    def model(name: str) -> Any:
        def init_graphs(*parts: Any) -> None:
            given[name] = parts

        return SimpleNamespace(runner=name, init_graphs=init_graphs)

    started: Any = worker.DFlashWorker.__new__(worker.DFlashWorker)
    started.target, started.drafter = model("target"), model("drafter")
    started.layout, started._choices, started._ops = "layout", "choices", "ops"
    started.block_size = 24
    started._buffers = SimpleNamespace(drafted_BK="drafted")
    started.injector, started.proposer = SimpleNamespace(inject="inject"), SimpleNamespace(score="score")
    monkeypatch.setattr(worker.BaseSpecWorker, "init_attention_backends", lambda self: None)
    monkeypatch.setattr(worker.attention, "plan_once", lambda runner: runner in planned)
    monkeypatch.setattr(worker.round_graphs, "serve", lambda *runners: served and set(runners) == {"target", "drafter"})
    monkeypatch.setattr(worker, "RoundGraphs", Graphs)
    monkeypatch.setattr(worker.rope_store, "fuse", lambda runner: {"target": 36}[runner])
    num_dense = {("target", "ops", range(24, 65, 24)): 144, ("drafter", "ops", None): 20}
    monkeypatch.setattr(worker.few_rows, "serve", lambda runner, ops, decoded=None: num_dense[runner, ops, decoded])
    with caplog.at_level("INFO", logger=worker.logger.name):
        started.init_attention_backends()
    assert "few rows by our kernel: 144 of the target, 20 of the drafter" in caplog.text
    assert f"replayed by {'sglang-dflash.' if ours else 'SGLang, '}" in caplog.text
    assert f"The keys of {36 if ours else 0} target layers" in caplog.text
    assert made == ([("drafter", "target", "layout", "drafted")] if ours else [])
    assert given["target"] == ("inject", "choices", started._graphs)
    started.init_cuda_graphs()
    assert given["drafter"] == ("layout", "score", started._graphs)
    if ours:
        assert started._graphs.checked
