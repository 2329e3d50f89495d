"""The model card: every fact is in it, none is made up, and one that is missing is named."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from test_checkpoint_config import CONFIG

from sglang_dflash.offline import Answer
from sglang_dflash.train.card import model_card
from sglang_dflash.train.evaluate import evaluate_answers, evaluate_matches

MATCH = torch.tensor([[True, True, False], [True, False, True], [False, True, True], [True, True, True]])
TABLE = evaluate_matches(
    MATCH, torch.ones_like(MATCH), torch.tensor([0, 0, 1, 2]), ["chat", "code", "chat"], num_resamples=50
)
ROUNDS = {"spec_verify_ct": 2, "spec_correct_drafts_histogram": [0, 1, 0, 1]}
ENGINE = evaluate_answers([Answer([1] * 6, "", ROUNDS)], ["code"], width=4)


def facts(**changes) -> dict:
    """Facts with `a__b` replaced inside a; None removes one."""
    result = {
        "name": "A drafter",
        "licence": "apache-2.0",
        "target": {"name": "some/target", "weights": "Q4_1, dequantised to bfloat16", "licence": "MIT"},
        "data": [
            data("chat", "train", 1000, 200_000),
            data("reasoning", "train", 500, 50_000),
            data("chat", "heldout", 50, 9_000),
            data("code", "heldout", 164, 30_001),
        ],
        "training": {
            "steps": 4500,
            "sequences_per_step": 32,
            "blocks_per_sequence": 64,
            "optimizer": "AdamW, betas 0.9 and 0.95",
            "learning_rate": 1.5e-3,
            "schedule": "cosine to zero after 4 % warm-up",
            "loss": "cross entropy, D-PACE",
            "seeds": {"data": 11, "training": 12},
            "hardware": "one H100",
            "minutes": 21.5,
            "versions": {"torch": "2.14.1"},
            "command": "sglang-dflash train --steps 4500",
        },
        "measurements": [{"title": "tables", "command": "sglang-dflash train evaluate", "result": TABLE}],
        "serve_command": "sglang-dflash serve --model-path some/target",
    }
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


def data(family: str, split: str, examples: int, tokens: int) -> dict:
    licence = "CC-BY-4.0" if family == "code" else "of the target's output"
    row = {"family": family, "split": split, "examples": examples, "tokens": tokens}
    return {**row, "source": f"{family} prompts | made", "licence": licence}


def rows(card: str, heading: str) -> list[list[str]]:
    """The cells of the table rows under a heading, heads and rulers left out."""
    section = card.split(heading, 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").replace("\\|", "/").split("|")] for line in lines]
    return [line for line in cells if not line[-1].startswith("---")]


def test_the_card_says_every_fact():
    given = facts()
    card = model_card(given, CONFIG)
    said = card.replace("\\|", "|").replace(",", "")

    def leaves(value):
        if isinstance(value, dict):
            return [leaf for key, inner in value.items() if key != "result" for leaf in leaves(inner)]
        return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, list) else [value]

    for leaf in leaves(given):
        assert str(leaf).replace(",", "") in said, leaf
    for command in ("sglang-dflash train --steps 4500", "sglang-dflash train evaluate", given["serve_command"]):
        assert f"```bash\n{command}\n```" in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["license"], front["base_model"]) == ("apache-2.0", "some/target")
    assert "dflash" in front["tags"]


def test_the_drafters_own_size():
    about = dict(rows(model_card(facts(), CONFIG), "# A drafter"))
    assert about["parameters"] == "19,361,152 (embedding and head are the target's)"
    assert about["block"] == "16 tokens: the anchor and 15 drafts"
    assert (about["tapped target layers"], about["mask token id"], about["layers"]) == ("1, 8, 14, 20, 27", "16", "5")


def test_acceptance_by_family_and_by_slot():
    table = rows(model_card(facts(), CONFIG), "## Acceptance: tables")
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


def test_an_engines_measurement_from_its_json():
    measured = {"title": "served", "command": "bench", "result": json.loads(ENGINE.to_json())}
    card = model_card(facts(measurements=[*facts()["measurements"], measured]), CONFIG)
    assert rows(card, "## Acceptance: served")[1] == ["code", "3.00", "none (one sequence)", "2", "1"]
    assert "The engine took 2 rounds for 5 tokens" in card
    assert "The engine took" not in model_card(facts(), CONFIG)


def test_data_and_licences():
    card = model_card(facts(), CONFIG)
    table = rows(card, "## Data")
    assert ["chat", "train", "1,000", "200,000", "chat prompts / made"] in table
    assert ["**all**", "train", "1,500", "250,000", ""] in table
    assert ["**all**", "heldout", "214", "39,001", ""] in table
    assert rows(card, "## Licences")[1:] == [
        ["this drafter", "apache-2.0"],
        ["target some/target", "MIT"],
        ["prompts of chat: chat prompts / made", "of the target's output"],
        ["prompts of reasoning: reasoning prompts / made", "of the target's output"],
        ["prompts of code: code prompts / made", "CC-BY-4.0"],
    ]


REQUIRED = [
    *("name", "licence", "target", "data", "training", "measurements", "serve_command"),
    *(f"target__{key}" for key in ("name", "weights", "licence")),
    *(f"data__1__{key}" for key in ("family", "split", "examples", "tokens", "source", "licence")),
    *(f"training__{key}" for key in facts()["training"]),
    *(f"measurements__0__{key}" for key in ("title", "command", "result")),
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_fact_is_named(key):
    name = key.replace("__", ".")
    with pytest.raises(ValueError, match=f"  - {name}: expected a value, got none; add it"):
        model_card(facts(**{key: None}), CONFIG)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": " "}, ["name: expected"]),
        ({"training__steps": 0, "training__minutes": float("inf")}, ["training.steps: ", "training.minutes: "]),
        ({"training__seeds": {}}, ["training.seeds: "]),
        ({"training__step": 3}, ["training.step: expected a known key"]),
        ({"data__0__split": "test"}, ["data.0.split: expected 'train' or 'heldout', got 'test'"]),
        ({"measurements": []}, ["measurements: "]),
        ({"measurements__0__result": {"block_size": 4}}, ["measurements.0.result.overall: expected a value"]),
        ({"measurements__0__result": json.loads(ENGINE.to_json()) | {"num_round": 1}}, ["0.result.num_round: "]),
        ({"data": [data("chat", "heldout", 1, 1), data("code", "heldout", 1, 1)]}, ["got none of split train"]),
        ({"data": [data("chat", "train", 1, 1), data("code", "heldout", 1, 1)]}, ["the held-out chat that was"]),
    ],
)
def test_a_wrong_fact_is_named(changes, told):
    with pytest.raises(ValueError, match="no model card:") as error:
        model_card(facts(**changes), CONFIG)
    assert len(str(error.value).splitlines()) - 1 >= len(told)
    assert all(part in str(error.value) for part in told)


def test_a_measurement_of_wider_blocks_is_of_another_drafter():
    with pytest.raises(ValueError, match="tables: expected blocks of at most 3 tokens, the drafter's, got 4"):
        model_card(facts(), replace(CONFIG, block_size=3))
