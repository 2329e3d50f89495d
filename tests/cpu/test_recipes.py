"""Recipes: the schema refuses what it must, and SGLang's own parser reads every shipped recipe as we do."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_dflash import cli, cpu, recipe
from sglang_dflash.cpu import bootstrap

MEASURED = {
    "card": "NVIDIA H200",
    "versions": {"sglang": "0.5.23", "sglang-dflash": "0.1.0", "torch": "2.14.1"},
    "command": "sglang-dflash bench",
    "figures": [{"name": "batch 1", "value": 1, "unit": "tokens/s"}],
}


@pytest.fixture(scope="session")
def _sglang_knows_our_backend() -> None:
    """The CPU recipe names the attention backend that the plugin adds to SGLang's choices."""
    if bootstrap.wanted("cpu"):
        bootstrap.install()
    cpu.register()


def content(name: str = "h200/qwen3-8b") -> dict[str, Any]:
    loaded = yaml.safe_load(recipe.find(name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def write(folder: Path, value: object) -> Path:
    path = folder / "a.yaml"
    path.write_text(yaml.safe_dump(value), encoding="utf-8")
    return path


def test_the_shipped_recipes() -> None:
    assert {"cpu/smollm2-135m", "h100/qwen3-8b", "h200/qwen3-8b"} <= set(recipe.names())


@pytest.mark.parametrize("name", recipe.names())
def test_each_recipe_is_valid_and_lies_in_its_hardware_folder(name: str) -> None:
    path = recipe.find(name)
    loaded = recipe.load(path)
    assert loaded.config.hardware == path.parent.name == name.split("/")[0]
    assert loaded.config.environment["SGLANG_DFLASH_STRICT"] == "1"


@pytest.mark.parametrize("name", recipe.names())
@pytest.mark.usefixtures("_sglang_knows_our_backend")
def test_sglang_reads_each_recipe_as_a_config_file(name: str) -> None:
    from sglang.srt.server_args import prepare_server_args

    path = recipe.find(name)
    loaded = recipe.load(path)
    arguments = prepare_server_args(["--config", str(path), "--port", "31234"])
    for field in recipe.Recipe.model_fields:
        wanted = getattr(loaded, field)
        if field != "config" and wanted is not None:
            assert getattr(arguments, field) == wanted, field
    assert arguments.port == 31234
    assert not hasattr(arguments, "config"), "SGLang would now keep what it used to ignore"


@pytest.mark.parametrize("name", recipe.names())
@pytest.mark.usefixtures("_sglang_knows_our_backend", "packaged")
def test_serve_and_config_file_give_sglang_the_same_arguments(name: str) -> None:
    from sglang.srt.server_args import prepare_server_args

    path = recipe.find(name)
    command = cli.plan(name, ["--max-running-requests", "3"], start=False).command
    ours = prepare_server_args(list(command[command.index("sglang.launch_server") + 1 :]))
    theirs = prepare_server_args(["--config", str(path), "--max-running-requests", "3"])
    differing = {field for field in recipe.Recipe.model_fields if getattr(ours, field, 0) != getattr(theirs, field, 0)}
    paths = {"model_path", "speculative_draft_model_path"}
    assert differing == (paths if recipe.load(path).config.models == "demo" else set())
    assert ours.max_running_requests == 3, "the command line wins"


def refuses(tmp_path: Path, value: object, *words: str) -> None:
    path = write(tmp_path, value)
    with pytest.raises(ValueError, match="expected") as caught:
        recipe.load(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_a_measured_recipe_is_valid(tmp_path: Path) -> None:
    value = content()
    del value["config"]["unmeasured"]
    value["config"]["measured"] = MEASURED
    measured = recipe.load(write(tmp_path, value)).config.measured
    assert measured is not None
    assert measured.figures[0].unit == "tokens/s"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speculative-algorithmm", "DFLASH"),
        ("model_path", "Qwen/Qwen3-8B"),
        ("measured", MEASURED),
    ],
)
def test_an_unknown_key_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    refuses(tmp_path, content() | {key: value}, f"{key}: expected a known key")


def test_an_unknown_key_of_the_record_is_refused_by_name(tmp_path: Path) -> None:
    value = content()
    value["config"]["hardwear"] = "h200"
    refuses(tmp_path, value, "config.hardwear: expected a known key")


@pytest.mark.parametrize(
    "key", ["model-path", "speculative-draft-model-path", "attention-backend", "mem-fraction-static", "config"]
)
def test_a_missing_key_is_refused_by_name(tmp_path: Path, key: str) -> None:
    value = content()
    del value[key]
    refuses(tmp_path, value, f"{key}: expected a value, got none")


def test_neither_or_both_of_measured_and_unmeasured_are_refused(tmp_path: Path) -> None:
    value = content()
    value["config"]["measured"] = MEASURED
    refuses(tmp_path, value, "either `measured` or `unmeasured: <reason>`, got both")
    del value["config"]["measured"], value["config"]["unmeasured"]
    refuses(tmp_path, value, "either `measured` or `unmeasured: <reason>`, got neither")


@pytest.mark.parametrize(
    ("part", "value", "complaint"),
    [
        ("card", None, "config.measured.card"),
        ("versions", {"sglang": "0.5.23", "torch": "2.14.1"}, "got none of sglang-dflash"),
        ("figures", [], "config.measured.figures"),
        ("figures", [{"name": "batch 1", "value": "fast", "unit": "tokens/s"}], "config.measured.figures.0.value"),
        ("date", "2026-01-01", "config.measured.date"),
    ],
)
def test_a_measurement_that_cannot_be_repeated_is_refused(
    tmp_path: Path, part: str, value: object, complaint: str
) -> None:
    whole = content()
    del whole["config"]["unmeasured"]
    whole["config"]["measured"] = copy.deepcopy(MEASURED) | {part: value}
    refuses(tmp_path, whole, complaint)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("speculative-algorithm", "EAGLE", "speculative-algorithm: expected 'DFLASH', got 'EAGLE'"),
        ("mem-fraction-static", 1.5, "mem-fraction-static: expected less than 1, got 1.5"),
        ("max-running-requests", "64", "max-running-requests: expected a valid integer, got '64'"),
        ("cuda-graph-bs-decode", [1, 8, 4], "expected batch sizes that rise, got [1, 8, 4]"),
        ("device", "cpu", "expected `device: cpu` on hardware cpu and only there"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(
    tmp_path: Path, key: str, value: object, complaint: str
) -> None:
    refuses(tmp_path, content() | {key: value}, complaint)


@pytest.mark.parametrize("environment", [{}, {"SGLANG_DFLASH_STRICT": "0"}, {"SGLANG_DFLASH_STRICT": 1}])
def test_a_recipe_without_strict_mode_is_refused(tmp_path: Path, environment: dict[str, object]) -> None:
    value = content()
    value["config"]["environment"] = environment
    refuses(tmp_path, value, "config", "SGLANG_DFLASH_STRICT")


def test_the_folder_must_be_the_recipes_hardware(tmp_path: Path) -> None:
    source = recipe.find("h200/qwen3-8b")
    for folder, fits in (("h200", True), ("h100", False), ("cpu", False), ("my-recipes", True)):
        (tmp_path / folder).mkdir()
        copied = Path(shutil.copy(source, tmp_path / folder))
        if fits:
            recipe.load(copied)
        else:
            with pytest.raises(ValueError, match=f"config.hardware: expected '{folder}', the folder, got 'h200'"):
                recipe.load(copied)


@pytest.mark.parametrize(
    ("text", "complaint"), [("- a", "expected keys and values, got list"), ("a: [", "expected YAML")]
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=complaint):
        recipe.load(path)


@pytest.mark.parametrize("name", ["h300/qwen3-8b", "/nowhere/a.yaml", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"got '.*'; shipped are cpu/smollm2-135m, h100/qwen3-8b, h200/qwen3-8b"):
        recipe.find(name)
