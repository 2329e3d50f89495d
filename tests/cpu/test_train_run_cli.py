"""`sglang-dflash train run` on a tiny target, from the command line to the plots."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_dflash import checkpoint, cli
from sglang_dflash.train import dataset, report

pytest.importorskip("matplotlib")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    splits = ("train", "train", "train", "heldout")
    examples = [dataset.Example("chat", split, [i + 1], [*range(20)]) for i, split in enumerate(splits)]
    dataset.write(tmp_path / "data.jsonl", examples)
    paths = {"target": tmp_path / "target", "data": tmp_path / "data.jsonl", "output": tmp_path / "run"}
    numbers = {"mask_token_id": 63, "num_layers": 1, "block_size": 4, "max_tokens": 64, "batch_sequences": 2}
    run = {"anchors": 4, "steps": 3, "log_every": 1, "evaluate_every": 2, "compute_dtype": "float32"}
    flags = [flag for key, value in {**paths, **numbers, **run}.items() for flag in ("--set", f"{key}={value}")]
    return ["train", "run", *flags]


def test_a_run_leaves_drafter_record_and_plots(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'run' / 'drafter'}\n"
    assert "step 2: heldout loss" in err
    checkpoint.check_tensors(tmp_path / "run" / "drafter", checkpoint.read_config(tmp_path / "run" / "drafter"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["steps"] == 3
    rows = report.read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {split: [row.step for row in of_split] for split, of_split in rows.items()} == {
        "heldout": [2, 3],
        "train": [1, 2, 3],
    }
    for image in ("curves.png", "acceptance.png"):
        assert (tmp_path / "run" / image).read_bytes().startswith(b"\x89PNG")


def test_wrong_ends_of_pack_and_export_are_told_in_a_sentence(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--set", "steps=1"]) == 0
    drafter = str(tmp_path / "run" / "drafter")
    assert cli.main(["train", "pack", drafter, str(tmp_path)]) == 2
    assert "expected the name of a file to write, got a folder" in capsys.readouterr().err
    (tmp_path / "target" / "config.json").write_text("{}")
    assert cli.main(["train", "export", drafter, str(tmp_path / "out"), "--target", str(tmp_path / "target")]) == 2
    assert "verifier.architectures: expected" in capsys.readouterr().err


def test_a_dry_run_tells_the_cost_and_leaves_nothing(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--dry-run"]) == 0
    assert "3 sequences" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("steps=0", "steps: expected greater than or equal to 1, got 0"),
        ("steps", "steps: expected a valid integer, got None"),
        ("step=1", "step: expected a known key, got an unknown one"),
        ("steps=[", "--set: expected KEY=VALUE"),
        ("1=2", "1: expected"),
        ("target=nowhere", "target: expected a folder with config.json, got nowhere"),
    ],
)
def test_a_wrong_setting_is_told_in_a_sentence(
    command: list[str], capsys: pytest.CaptureFixture[str], flag: str, complaint: str
) -> None:
    assert cli.main([*command, "--set", flag]) == 2
    assert complaint in capsys.readouterr().err


def test_without_matplotlib_nothing_is_trained(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(command) == 2
    assert "expected matplotlib installed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
