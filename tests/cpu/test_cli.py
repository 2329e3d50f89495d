"""The command line: what `serve` hands to SGLang, what `check` answers. No engine starts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash import cli, config, cpu, demo, hostcheck, recipe
from sglang_dflash.cpu import bootstrap

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
    assert launch.environment == {"SGLANG_DFLASH_CONFIG": '{"draft_head": "fp8"}', "SGLANG_DFLASH_STRICT": "1"}
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
        paths += ["--speculative-draft-model-path", str(tmp_path / f"{demo.DRAFTER_NAME}-ba7816bf")]
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
    assert "recipe h200/qwen3-8b: expected a GPU (h200), got the CPU by --device," in capsys.readouterr().err
    assert cli.main(["serve", "--recipe", "h200/qwen3-8b", "--dry-run", "--port", "1"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:2] == ['SGLANG_DFLASH_CONFIG={"draft_head": "fp8"}', "SGLANG_DFLASH_STRICT=1"]
    assert tuple(words[2:6]) == SERVER
    assert words[-2:] == ["--port", "1"]


@pytest.mark.usefixtures("on_cpu")
def test_no_flags_are_sglangs_to_refuse() -> None:
    assert flags_of(cli.plan(None, [], start=True))[:2] == ["--speculative-algorithm", "DFLASH"]


@pytest.mark.parametrize(
    ("name", "device", "complaint"),
    [
        ("cpu/smollm2-135m", "cuda", "expected the CPU, got a GPU by --device,"),
        ("h200/qwen3-8b", "cpu", "expected a GPU (h200), got the CPU by --device,"),
    ],
)
def test_a_device_that_contradicts_a_recipe(name: str, device: str, complaint: str) -> None:
    """On machines of both kinds; shown it can be."""
    for flags in (["--device", device], [f"--device={device}"]):
        with pytest.raises(ValueError, match=re.escape(f"recipe {name}: {complaint}")):
            cli.plan(name, flags, start=True)


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
        assert "expected one of serve, check, demo, train, token-map, bench, got 'sevre'" in captured.err
    if argv == ["--help"]:
        assert all(command in captured.out for command in ("serve", "check", "demo"))


def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "metrics.jsonl"
    row = {"step": 1, "split": "train", "loss": 1.0, "slot1_accuracy": 0.5, "acceptance_length": 1.5}
    metrics.write_text(json.dumps(row) + "\n")
    assert cli.main(["train", "plot", str(metrics), str(metrics / "curves.png")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(metrics) in error


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


def test_the_installed_console_script_runs() -> None:
    script = Path(sys.executable).with_name("sglang-dflash")
    assert script.is_file(), "install the checkout: pip install -e ."
    ran = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith("sglang-dflash ")
