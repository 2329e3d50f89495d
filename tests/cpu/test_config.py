"""The plugin's settings: read from the environment, and refused by name where they are wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sglang_dflash import config
from sglang_dflash.config import CONFIG_VARIABLE, STRICT_VARIABLE


def test_nothing_set_means_the_defaults() -> None:
    assert config.load({}) == config.Config(strict=False, proposer="argmax")
    assert config.load({STRICT_VARIABLE: "", CONFIG_VARIABLE: "  "}) == config.Config()


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    monkeypatch.setenv(CONFIG_VARIABLE, '{"proposer": "a.b:C"}')
    assert config.load() == config.Config(strict=True, proposer="a.b:C")


@pytest.mark.parametrize(
    ("value", "strict"),
    [("1", True), ("true", True), (" TRUE ", True), ("0", False), ("false", False), ("False", False), (" ", False)],
)
def test_strict_values(value: str, strict: bool) -> None:
    assert config.load({STRICT_VARIABLE: value}).strict is strict


@pytest.mark.parametrize("value", ["yes", "on", "2", "strict"])
def test_any_other_strict_value_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"{STRICT_VARIABLE}: expected 0 or 1, got '{value}'; set it to 1"):
        config.load({STRICT_VARIABLE: value})


def test_text_and_file_give_the_same(tmp_path: Path) -> None:
    settings = json.dumps({"proposer": "package.module:Class"})
    file = tmp_path / "dflash.json"
    file.write_text(f"\n{settings}\n")
    expected = config.Config(proposer="package.module:Class")
    assert config.load({CONFIG_VARIABLE: settings}) == expected
    assert config.load({CONFIG_VARIABLE: f" {file} "}) == expected
    assert config.load({CONFIG_VARIABLE: "{}"}) == config.Config()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"propose": "argmax"}', "unknown key propose; the keys are draft_head, proposer"),
        ('{"b": 1, "a": 2, "proposer": "argmax"}', "unknown key a, b; the keys are draft_head, proposer"),
        # Of the environment alone: a file that turns strict mode off would hide from the variable.
        ('{"strict": true}', "unknown key strict"),
        ('{"proposer": 3}', "proposer: expected a non-empty string, got 3"),
        ('{"proposer": ""}', "proposer: expected a non-empty string, got ''"),
        ('{"proposer": null}', "proposer: expected a non-empty string, got None"),
        ('{"proposer": ["argmax"]}', "proposer: expected a non-empty string, got ['argmax']"),
        ('{"draft_head": "fp4"}', "draft_head: expected dense or fp8, got 'fp4'"),
        ('{"proposer": "argmax"', "expected a JSON object, got text that is not JSON"),
    ],
)
def test_wrong_settings_are_refused_with_their_source(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "dflash.json"
    file.write_text(text)
    for value, source in ((text, CONFIG_VARIABLE), (str(file), f"{CONFIG_VARIABLE} file {file}")):
        with pytest.raises(ValueError, match=r"expected|unknown") as caught:
            config.load({CONFIG_VARIABLE: value})
        assert str(caught.value).startswith(f"{source}: {complaint}")


@pytest.mark.parametrize("text", ['["proposer"]', '"argmax"', "3", "null"])
def test_a_file_that_holds_no_object_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "dflash.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"file {file}: expected a JSON object, got (list|str|int|NoneType)"):
        config.load({CONFIG_VARIABLE: str(file)})


@pytest.mark.parametrize("value", ["/nowhere/dflash.json", "argmax", '["proposer"]'])
def test_what_is_neither_an_object_nor_a_file_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="expected a JSON object or a file that holds one, got ") as caught:
        config.load({CONFIG_VARIABLE: value})
    assert repr(value) in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a JSON object or a file"):
        config.load({CONFIG_VARIABLE: str(tmp_path)})


def test_settings_cannot_be_changed_after_they_are_read() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.load({}).strict = True  # type: ignore[misc]
