"""`sglang-dflash bench compare` with engines that are played: what they are asked, and what is told and written."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_dflash import checkpoint, cli
from sglang_dflash.bench import columns, correctness, steps
from sglang_dflash.bench.columns import Column
from sglang_dflash.bench.setup import SPARE_TOKENS
from sglang_dflash.cpu import bootstrap
from sglang_dflash.offline import Answer
from sglang_dflash.train import dataset
from tests.cpu.played import BLOCK_SIZE, TARGET, PlayedEngine

# Milliseconds of a decode round; a first token costs 10 whatever the prompt.
STEP_MS = {"plain": 2.0, "stock": 4.0, "ours": 3.0}


class _Engine(PlayedEngine):
    """A round of DFLASH commits 2 tokens. `wrong` are columns whose answers (to `wrong_of` at once) end otherwise."""

    calls: ClassVar[dict[str, list[dict[str, Any]]]] = defaultdict(list)
    order: ClassVar[list[str]] = []
    wrong: ClassVar[set[str]] = set()
    wrong_of: ClassVar[int | None] = None

    def __init__(self, kind: str, log: Path, env: dict[str, str], **arguments: Any) -> None:
        super().__init__(kind=kind, name=log.stem, folder=log.parent.name, env=env, **arguments)
        self.kind, self.name = kind, log.stem

    def generate(self, input_ids: list[list[int]], max_new_tokens: int, **sampling: Any) -> tuple[list[Answer], float]:
        _Engine.calls[self.name].append({"prompts": input_ids, "max_new_tokens": max_new_tokens, **sampling})
        _Engine.order.append(self.name)
        rounds = max_new_tokens - 1 if self.kind == "plain" else max_new_tokens // 2
        last = 9 if self.name in _Engine.wrong and _Engine.wrong_of in (None, len(input_ids)) else 7
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}}
        if self.kind != "plain":
            meta |= {"spec_verify_ct": rounds, "spec_correct_drafts_histogram": [0, rounds]}
        answers = [Answer([7] * (max_new_tokens - 1) + [last], "", meta) for _ in input_ids]
        return answers, (10 + STEP_MS[self.kind] * rounds) / 1000


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr(columns, "EngineProcess", _Engine)
    monkeypatch.setattr(bootstrap, "wanted", lambda device=None: False)
    monkeypatch.setattr("sglang_dflash.bench.setup.card", lambda: "a card")
    for name, value in (
        ("started", []),
        ("calls", defaultdict(list)),
        ("order", []),
        ("wrong", set()),
        ("failure", None),
    ):
        monkeypatch.setattr(_Engine, name, value)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET))
    options = {"seed": 0, "mask_token_id": 3, "num_layers": 1, "block_size": BLOCK_SIZE}
    checkpoint.random_drafter(tmp_path / "drafter", TARGET, **options)
    models = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    files = ["--logs", str(tmp_path / "logs"), "--out", str(tmp_path / "out" / "r.json"), "--commit", "abc"]
    return ["bench", "compare", *models, *files, "--repeats", "3", "--batches", "1,2"]


@pytest.fixture
def held_out(tmp_path: Path) -> list[str]:
    held = [dataset.Example(family, "heldout", [i, 9], [1]) for i, family in enumerate(["chat", "chat", "code"])]
    dataset.write(tmp_path / "data.jsonl", [*held, dataset.Example("chat", "train", [0], [1])])
    return ["--prompts", str(tmp_path / "data.jsonl"), "--num-prompts", "3", "--new-tokens", "20"]


def _result(tmp_path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((tmp_path / "out" / "r.json").read_text())
    return result


def test_steps_of_every_engine(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command) == 0
    result = _result(tmp_path)
    assert list(result["batches"]) == ["1", "2"]
    for row in result["batches"].values():
        assert {name: figure["median"] for name, figure in row["step_ms"].items()} == pytest.approx(STEP_MS)
        assert row["acceptance_length"] == pytest.approx({"plain": 1, "stock": 143 / 72, "ours": 143 / 72})
        assert set(row["differing_requests"].values()) == {0}
    assert result["batches"]["2"]["tokens_per_s"]["plain"]["median"] == pytest.approx(2 * 500)
    assert result["batches"]["1"]["tokens_per_s"]["ours"]["median"] == pytest.approx(2 * 1000 / 3)
    assert result["check"]["passed"] is True
    setup = result["setup"]
    assert (setup["card"], setup["versions"]["commit"], setup["weights"]) == ("a card", "abc", "target")
    assert setup["engine"]["model_path"] == "target"
    assert setup["engine"]["dtype"] == "bfloat16"
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert rows[2][:5] == ["1", "ours", "3.000 (3.000 to 3.000)", "1.500", "0.750"]
    assert rows[0][3:5] == ["", ""]
    told = "stock 0 of 8, ours 0 of 8 in batches of 1; stock 0 of 8, ours 0 of 8 in batches of 2"
    assert f"check: greedy, bfloat16: requests that differ from plain decoding: {told}" in " ".join(out.split())
    assert "a card" in out


def test_engines_take_turns_on_the_same_prompts(command: list[str]) -> None:
    assert cli.main([*command, "--batches", "2"]) == 0
    plain, stock, ours = (_Engine.calls[name] for name in ("plain", "stock", "ours"))
    assert plain == stock == ours
    lengths = [call["max_new_tokens"] for call in plain]
    assert lengths == [144] * 5 + [steps.FEW_TOKENS] + [steps.FEW_TOKENS, 144] * 3, "check, warm-up, repeats"
    assert [len(call["prompts"]) for call in plain[:4]] == [2] * 4, "the check: eight requests in batches of the size"
    prompts = [tuple(prompt) for call in plain[:4] for prompt in call["prompts"]]
    assert len(set(prompts)) == 8
    assert all(call["ignore_eos"] for call in plain)
    # Four batches of the check; two lengths of the warm-up, then of each repeat, which starts with another engine.
    names = ["plain", "stock", "ours"]
    assert _Engine.order[:18] == [name for number in (4, 2) for name in names for _ in range(number)]
    assert _Engine.started[0]["max_total_tokens"] == 2 * 2 * (64 + 144 + SPARE_TOKENS)
    assert _Engine.order[18::2] == ["plain", "stock", "ours", "stock", "ours", "plain", "ours", "plain", "stock"]


def test_the_check_asks_for_no_more_tokens_than_it_needs(command: list[str]) -> None:
    assert cli.main([*command, "--batches", "8", "--new-tokens", "300"]) == 0
    assert [call["max_new_tokens"] for call in _Engine.calls["ours"]][:2] == [256, 300]


def test_a_column_for_every_variant(command: list[str], tmp_path: Path) -> None:
    variant = 'wide={"proposer": "a:B", "engine": {"page_size": 4}}'
    assert cli.main([*command, "--kinds", "ours", "--ours", variant, "--engine", "page_size=2"]) == 0
    assert [(e["name"], e["kind"], e["page_size"]) for e in _Engine.started] == [
        ("ours", "ours", 2),
        ("wide", "ours", 4),
    ]
    result = _result(tmp_path)
    assert set(result["batches"]["1"]["step_ms"]) == {"ours", "wide"}
    assert result["setup"]["columns"]["wide"]["settings"] == {"proposer": "a:B"}
    assert result["check"]["passed"] is None


def test_no_time_is_taken_where_the_check_fails(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Engine, "wrong", {"ours"})
    assert cli.main(command) == 1
    assert not (tmp_path / "out" / "r.json").exists()
    failed = json.loads((tmp_path / "out" / "r.failed.json").read_text())
    assert "batches" not in failed
    parted = failed["check"]["first_differences"]
    assert parted["1"]["ours"] == parted["2"]["ours"] == {str(i): 143 for i in range(8)}
    captured = capsys.readouterr()
    assert "the check failed, no time was taken" in captured.err
    assert "ours 8 of 8 in batches of 1; expected at most 1 of ours" in captured.err
    assert captured.out == ""
    assert all(len(calls) == 8 + 4 for calls in _Engine.calls.values())


def test_forced_acceptance_reaches_stock_and_ours_and_is_not_checked(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--forced-acceptance", "6.49"]) == 0
    forced = {e["name"]: e["env"].get("SGLANG_SIMULATE_ACC_LEN") for e in _Engine.started}
    assert forced == {"plain": None, "stock": "6.49", "ours": "6.49"}
    assert _result(tmp_path)["check"]["passed"] is None
    out = capsys.readouterr().out
    assert "check: not checked against plain decoding: forced acceptance" in out
    assert "acceptance forced to 6.49" in out


@pytest.mark.parametrize(("wrong", "code", "num_started"), [(set(), 0, 6), ({"ours"}, 1, 3)])
def test_unforced_engines_are_checked_before_forced_ones(
    command: list[str], monkeypatch: pytest.MonkeyPatch, wrong: set[str], code: int, num_started: int
) -> None:
    monkeypatch.setattr(_Engine, "wrong", wrong)
    assert cli.main([*command, "--forced-acceptance", "6.49", "--unforced-check"]) == code
    forced = ["SGLANG_SIMULATE_ACC_LEN" in e["env"] for e in _Engine.started]
    assert forced == [False, False, False, False, True, True][:num_started]
    assert [e["folder"] for e in _Engine.started] == ["check"] * 3 + ["logs"] * (num_started - 3)


def test_first_tokens_of_prompts_that_are_not_cached(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--batches", "1", "--ttft", "512,40"]) == 0
    first = [call for call in _Engine.calls["ours"] if call["max_new_tokens"] == 1]
    assert [len(call["prompts"][0]) for call in first] == [512] * 4 + [40] * 4
    prompts = [tuple(call["prompts"][0]) for call in first]
    assert len(set(prompts)) == 8
    assert first == [call for call in _Engine.calls["plain"] if call["max_new_tokens"] == 1]
    assert _result(tmp_path)["ttft_ms"]["512"]["ours"]["median"] == pytest.approx(10)
    assert "prompt tokens, not cached" in capsys.readouterr().out
    assert _Engine.started[0]["max_total_tokens"] == 2 * (512 + SPARE_TOKENS)


def test_held_out_prompts_by_family(
    command: list[str], held_out: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, *held_out]) == 0
    result = _result(tmp_path)
    assert result["setup"]["families"] == {"chat": 2, "code": 1}
    row = result["batches"]["2"]
    # 3 prompts of 20 tokens, two at once: two calls of 10 ms and of 19 or 10 rounds.
    speeds = {"plain": 60 / (0.02 + 0.038 * 2), "stock": 60 / (0.02 + 0.04 * 2), "ours": 60 / (0.02 + 0.03 * 2)}
    assert {name: figure["median"] for name, figure in row["tokens_per_s"].items()} == pytest.approx(speeds)
    assert row["speedup"] == pytest.approx(
        {f"ours/{other}": speeds["ours"] / speeds[other] for other in ("plain", "stock")}
    )
    assert set(row["acceptance"]) == {"stock", "ours"}
    assert row["acceptance"]["ours"]["families"]["code"]["length"] == 2
    assert row["acceptance"]["ours"]["block_size"] == BLOCK_SIZE
    assert not any(call.get("ignore_eos") for call in _Engine.calls["ours"])
    assert "chat 2.00, code 2.00" in capsys.readouterr().out


@pytest.mark.parametrize("size", [1, 2])
def test_held_out_prompts_are_checked_in_batches_of_every_size(
    command: list[str],
    held_out: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    monkeypatch.setattr(_Engine, "wrong", {"ours"})
    monkeypatch.setattr(_Engine, "wrong_of", size)
    assert cli.main([*command, *held_out]) == 1
    told = {1: "ours 3 of 3 in batches of 1", 2: "ours 2 of 3 in batches of 2"}
    said = capsys.readouterr().err
    assert f"{told[size]}; expected at most 0 of ours" in said
    assert len(_Engine.calls["ours"]) == 5


def test_sampled_answers_are_not_compared(
    command: list[str], held_out: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, *held_out, "--temperature", "0.6", "--top-p", "0.95"]) == 0
    calls = _Engine.calls["ours"]
    assert all("temperature" not in call for call in calls[:5]), "the check is greedy"
    assert [call for call in calls if call.get("temperature") == 0.6 and call.get("top_p") == 0.95] == calls[5:]
    result = _result(tmp_path)
    assert result["check"]["passed"] is True
    assert "differing_requests" not in result["batches"]["1"]
    assert "sampled (temperature 0.6, top_p 0.95): answers are draws" in capsys.readouterr().out


def test_sampled_steps_are_not_compared(command: list[str], tmp_path: Path) -> None:
    assert cli.main([*command, "--temperature", "1"]) == 0
    assert ["temperature" in call for call in _Engine.calls["plain"]] == [False] * 12 + [True] * 16
    assert "differing_requests" not in _result(tmp_path)["batches"]["1"]


def test_a_temperature_of_zero_is_greedy(command: list[str], tmp_path: Path) -> None:
    assert cli.main([*command, "--temperature", "0"]) == 0
    assert _result(tmp_path)["setup"]["sampling"] == {}
    assert "differing_requests" in _result(tmp_path)["batches"]["1"]


def test_the_width_of_a_column_is_the_one_its_engine_verifies(
    command: list[str], held_out: list[str], tmp_path: Path
) -> None:
    variant = 'narrow={"engine": {"speculative_num_draft_tokens": 2}}'
    assert cli.main([*command, *held_out, "--kinds", "ours", "--ours", variant]) == 0
    acceptance = _result(tmp_path)["batches"]["1"]["acceptance"]
    assert {name: figures["block_size"] for name, figures in acceptance.items()} == {"ours": BLOCK_SIZE, "narrow": 2}


def test_shapes_alone_have_random_weights(command: list[str], tmp_path: Path) -> None:
    flags = command[:2] + command[6:]
    assert cli.main([*flags, "--shapes", str(tmp_path / "target")]) == 0
    assert _Engine.started[0]["load_format"] == "dummy"
    assert _result(tmp_path)["setup"]["weights"] == "random"


def test_a_cpu_has_no_graphs_and_idle_engines_that_sleep(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "wanted", lambda device=None: True)
    assert cli.main(command) == 0
    assert [e["name"] for e in _Engine.started] == ["plain", "ours"]
    assert _Engine.started[0]["sleep_on_idle"] is True
    assert _Engine.started[0]["dtype"] == "float32"
    assert "cuda_graph_bs_decode" not in _Engine.started[0]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--shapes", "x"], "expected --target and --drafter, or --shapes, got both"),
        (["--new-tokens", "16"], "--new-tokens: expected at least 17, got 16"),
        (["--repeats", "0"], "--repeats: expected at least 1, got 0"),
        (["--top-p", "0.9"], "--top-p, --top-k, --min-p: expected --temperature with them"),
        (["--forced-acceptance", "0.5"], "--forced-acceptance: expected at least 1, got 0.5"),
        (["--unforced-check"], "--unforced-check: expected --forced-acceptance with it"),
        (["--prompts", "demo", "--forced-acceptance", "2"], "--prompts: expected real answers, got forced acceptance"),
        (["--engine", "page_size"], "--engine: expected KEY=JSON, got 'page_size'"),
        (["--engine", "=1"], "--engine: expected KEY=JSON, got '=1'"),
    ],
)
def test_a_mistake_is_told_before_an_engine_starts(
    command: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    assert cli.main([*command, *flags]) == 2
    assert complaint in capsys.readouterr().err
    assert not _Engine.started


def test_fewer_prompts_than_the_batch_and_fewer_than_asked_are_refused(
    command: list[str], held_out: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, *held_out, "--batches", "4"]) == 2
    assert "--num-prompts: expected at least the largest batch, got 3" in capsys.readouterr().err
    assert cli.main([*command, *held_out, "--num-prompts", "4"]) == 2
    assert "expected 4 held-out prompts, got 3; lower --num-prompts" in capsys.readouterr().err
    assert not _Engine.started


def test_an_engine_that_broke_is_told(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Engine, "failure", RuntimeError("ours engine: exit code -9\nlast words"))
    assert cli.main(command) == 1
    assert "last words" in capsys.readouterr().err


def _answers(*tokens: int) -> list[Answer]:
    return [Answer([token] * 3, "", {}) for token in tokens]


@pytest.mark.parametrize(
    ("dtype", "stock", "ours", "passed"),
    [
        ("float32", (1, 1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1, 1), True),
        ("float32", (1, 1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1, 2), False),
        ("bfloat16", (1, 1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1, 2), True),
        ("bfloat16", (1, 1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 2, 2), False),
        ("bfloat16", (1, 1, 1, 1, 1, 1, 2, 2), (1, 1, 1, 1, 1, 2, 2, 2), True),
        ("bfloat16", (2, 2, 2, 2, 2, 2, 2, 2), (1, 1, 1, 1, 1, 1, 1, 1), True),
    ],
)
def test_the_check_tolerates_what_rounding_may_change(
    dtype: str, stock: tuple[int, ...], ours: tuple[int, ...], passed: bool
) -> None:
    answers = {"plain": _answers(*[1] * 8), "stock": _answers(*stock), "ours": _answers(*ours)}
    chosen = [Column("plain", "plain"), Column("stock", "stock"), Column("ours", "ours")]
    assert correctness.judge({8: answers}, chosen, dtype).passed is passed


def test_every_size_is_judged_by_its_own_rates() -> None:
    chosen = [Column("plain", "plain"), Column("ours", "ours")]
    few = {"plain": _answers(*[1] * 8), "ours": _answers(1, 1, 1, 1, 1, 1, 2, 2)}
    many = {"plain": _answers(*[1] * 64), "ours": _answers(*[1] * 64)}
    check = correctness.judge({1: few, 64: many}, chosen, "bfloat16")
    assert check.passed is False
    assert check.differing == {1: {"ours": 0.25}, 64: {"ours": 0.0}}
    told = "ours 2 of 8 in batches of 1; expected at most 1 of ours; ours 0 of 64 in batches of 64"
    assert check.says.endswith(told)


def test_a_shorter_answer_parts_where_it_ends() -> None:
    answers = {"plain": [Answer([1, 2, 3], "", {})], "ours": [Answer([1, 2], "", {})]}
    check = correctness.judge({1: answers}, [Column("plain", "plain"), Column("ours", "ours")], "float32")
    assert check.first_differences == {1: {"ours": {0: 2}}}
