"""`sglang-dflash train evaluate` with an engine that is played: which prompts it gets, what is printed and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_dflash import checkpoint, cli
from sglang_dflash.cpu import bootstrap
from sglang_dflash.offline import Answer
from sglang_dflash.train import dataset, engine_evaluation, evaluate
from tests.cpu.played import BLOCK_SIZE, TARGET, PlayedEngine

pytest.importorskip("matplotlib")


class _Engine(PlayedEngine):
    """Accepts as many drafts in its only round as the prompt's first id says; fails with `failure` where it is set."""

    prompts: ClassVar[list[list[int]]] = []

    def __init__(self, kind: str, log: Path, **server_args: Any) -> None:
        super().__init__(kind=kind, log=log, **server_args)

    def generate(self, input_ids: list[list[int]], max_new_tokens: int) -> tuple[list[Answer], float]:
        _Engine.prompts.extend(input_ids)
        counts = [[int(i == ids[0]) for i in range(BLOCK_SIZE)] for ids in input_ids]
        metas = [{"spec_verify_ct": 1, "spec_correct_drafts_histogram": count} for count in counts]
        return [Answer([7] * (ids[0] + 2), "", meta) for ids, meta in zip(input_ids, metas)], 1.0


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Held out: three chat prompts that accept 3, 1 and 0 drafts, one of code that accepts 2."""
    monkeypatch.setattr(engine_evaluation, "EngineProcess", _Engine)
    monkeypatch.setattr(bootstrap, "wanted", lambda device=None: False)
    for name, value in (("started", []), ("prompts", []), ("failure", None)):
        monkeypatch.setattr(_Engine, name, value)
    held = [dataset.Example("chat", "heldout", [accepts, 9], [1]) for accepts in (3, 1, 0)]
    held.append(dataset.Example("code", "heldout", [2, 8, 8, 8], [1]))
    dataset.write(tmp_path / "data.jsonl", [*held, dataset.Example("chat", "train", [0, 0, 0, 0, 0, 0], [1])])
    options = {"seed": 0, "mask_token_id": 3, "num_layers": 1, "block_size": BLOCK_SIZE}
    checkpoint.random_drafter(tmp_path / "drafter", TARGET, **options)
    folders = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    return ["train", "evaluate", *folders, "--data", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "out")]


def test_every_heldout_prompt_is_answered_and_told_by_family(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--dtype", "bfloat16", "--concurrency", "3", "--max-new-tokens", "100"]) == 0
    assert sorted(_Engine.prompts) == [[0, 9], [1, 9], [2, 8, 8, 8], [3, 9]]
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    chat, code, overall = rows[:3]
    assert [chat[0], *chat[1:3], chat[4]] == ["chat", "3", "3", "0.667"]
    assert chat[3].startswith("2.33 (")
    assert code == ["code", "1", "1", "3.00", "1.000"]
    assert [overall[1], overall[3][:4], overall[4]] == ["4", "2.50", "0.750"]
    assert rows[3:] == [["1", "0.750", "4"], ["2", "0.667", "3"], ["3", "0.500", "2"]]
    evaluation = evaluate.EngineEvaluation.from_json((tmp_path / "out" / "acceptance.json").read_text())
    assert evaluation.families["chat"].length == pytest.approx(7 / 3)
    assert (tmp_path / "out" / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    [started] = _Engine.started
    assert started["kind"] == "ours"
    assert started["max_running_requests"] == 3
    assert started["max_total_tokens"] == 3 * (4 + 100 + engine_evaluation.SPARE_TOKENS)
    assert "attention_backend" not in started


def test_float32_on_a_gpu_gets_an_attention_that_has_it(command: list[str]) -> None:
    assert cli.main([*command, "--dtype", "float32", "--kind", "stock"]) == 0
    assert (_Engine.started[0]["kind"], _Engine.started[0]["attention_backend"]) == ("stock", "triton")


def test_prompts_of_a_family_can_be_fewer_and_too_many_are_told(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--per-family", "2"]) == 0
    assert sorted(len(ids) for ids in _Engine.prompts) == [2, 2, 4]
    err = capsys.readouterr().err
    assert "code: expected 2 held-out prompts, got 1; using these" in err
    assert "chat: expected" not in err
    assert cli.main([*command, "--per-family", "1"]) == 0
    assert "code: expected" not in capsys.readouterr().err, "there is one"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--per-family", "0"], "--per-family: expected at least 1, got 0"),
        (["--max-new-tokens", "1"], "--max-new-tokens: expected at least 2, got 1"),
        (["--concurrency", "0"], "--concurrency: expected at least 1, got 0"),
    ],
)
def test_a_number_out_of_range_is_refused_before_an_engine_starts(
    command: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    assert cli.main([*command, *flags]) == 2
    assert complaint in capsys.readouterr().err
    assert not _Engine.started


def test_data_that_holds_nothing_out_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset.write(tmp_path / "data.jsonl", [dataset.Example("chat", "train", [0], [1])])
    assert cli.main(command) == 2
    assert "expected held-out examples, got 1 to train on and none held out" in capsys.readouterr().err
    assert not _Engine.started


def test_a_refusal_of_the_engine_reaches_the_user_whole_and_without_traceback(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Engine, "failure", ValueError("d does not fit t:\n  - hidden_size: expected 1, got 2"))
    assert cli.main(command) == 2
    expected = "sglang-dflash train: d does not fit t:\n  - hidden_size: expected 1, got 2\n"
    assert capsys.readouterr().err.endswith(expected)


def test_an_engine_that_broke_is_told_with_its_log(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Engine, "failure", RuntimeError("ours engine: exit code -9\nlast words"))
    assert cli.main(command) == 1
    err = capsys.readouterr().err
    assert "exit code -9" in err
    assert "last words" in err
