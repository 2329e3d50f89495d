"""Acceptance from match tables and from an engine's counts, against loops over blocks; its intervals; the plots."""

import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch

from sglang_dflash.offline import Answer
from sglang_dflash.train import report
from sglang_dflash.train.evaluate import EngineEvaluation, Evaluation, evaluate_answers, evaluate_matches

FAMILIES = ["chat", "code", "chat", "code", "chat"]


def tables(seed: int = 0, num_blocks: int = 200, num_slots: int = 5, cut: bool = True):
    """Match and valid tables and each block's sequence; sequence 3 has no block, some blocks no label at all."""
    generator = torch.Generator().manual_seed(seed)
    match_NJ = torch.rand(num_blocks, num_slots, generator=generator) < torch.linspace(0.9, 0.5, num_slots)
    ends_N = torch.randint(0, num_slots + 1, (num_blocks,), generator=generator) if cut else num_slots
    valid_NJ = torch.arange(num_slots) < torch.as_tensor(ends_N).expand(num_blocks)[:, None]
    sequence_N = torch.tensor([0, 1, 2, 4])[torch.randint(0, 4, (num_blocks,), generator=generator)]
    return match_NJ, valid_NJ, sequence_N


def run_of(match_J, valid_J) -> int:
    run = 0
    while run < len(match_J) and match_J[run] and valid_J[run]:
        run += 1
    return run


def test_conditional_acceptance_against_a_loop():
    match_NJ, valid_NJ, sequence_N = tables()
    got = evaluate_matches(match_NJ, valid_NJ, sequence_N, FAMILIES)
    assert got.block_size == 6
    for name, summary in [("all", got.overall), *got.families.items()]:
        blocks = [
            (match_J.tolist(), valid_J.tolist())
            for match_J, valid_J, sequence in zip(match_NJ, valid_NJ, sequence_N.tolist())
            if name in ("all", FAMILIES[sequence])
        ]
        length, survivors = 1.0, 1.0
        for k in range(5):
            reached = [m for m, v in blocks if v[k] and run_of(m, v) >= k]
            right = [m for m in reached if m[k]]
            assert summary.reached[k] == len(reached) > 0
            assert summary.slots[k] == pytest.approx(len(right) / len(reached))
            survivors *= len(right) / len(reached)
            length += survivors
        assert summary.length == pytest.approx(length)
        assert summary.num_blocks == sum(v[0] for _, v in blocks)
    assert list(got.families) == ["chat", "code"]
    assert (got.overall.num_sequences, got.families["chat"].num_sequences) == (4, 3)
    assert got.families["code"].num_sequences == 1


def test_a_family_without_blocks_is_left_out():
    got = evaluate_matches(*tables(), [*FAMILIES[:3], "templates", "chat"])
    assert list(got.families) == ["chat", "code"]


def test_whole_blocks_have_their_mean_leading_run_plus_one():
    match_NJ, valid_NJ, sequence_N = tables(cut=False)
    got = evaluate_matches(match_NJ, valid_NJ, sequence_N, FAMILIES).overall
    runs = [run_of(m, v) for m, v in zip(match_NJ.tolist(), valid_NJ.tolist())]
    assert got.length == pytest.approx(1 + sum(runs) / len(runs))


def test_a_block_cut_short_does_not_pull_the_length_down():
    """Right in every slot it has, it says nothing of the slots that it has not."""
    match_NJ = torch.ones(20, 4, dtype=torch.bool)
    valid_NJ = torch.ones(20, 4, dtype=torch.bool)
    valid_NJ[10:, 2:] = False
    got = evaluate_matches(match_NJ, valid_NJ, torch.zeros(20, dtype=torch.int64), ["chat"]).overall
    assert got.length == 5.0
    assert got.reached == (20, 20, 10, 10)


def test_a_slot_behind_one_without_a_label_does_not_count():
    match_NJ = torch.ones(1, 4, dtype=torch.bool)
    valid_NJ = torch.tensor([[True, False, True, True]])
    got = evaluate_matches(match_NJ, valid_NJ, torch.zeros(1, dtype=torch.int64), ["chat"]).overall
    assert got.reached == (1, 0, 0, 0)
    assert got.slots == (1.0, None, None, None)
    assert got.length == 2.0
    assert got.interval is None


@pytest.mark.parametrize(("rate", "length"), [(0.0, 1.0), (1.0, 4.0)])
def test_no_and_every_draft_right(rate, length):
    match_NJ = torch.full((6, 3), bool(rate))
    got = evaluate_matches(match_NJ, torch.ones_like(match_NJ), torch.arange(6), ["chat"] * 6).overall
    assert (got.length, got.interval) == (length, (length, length))
    assert got.slots == ((1.0,) * 3 if rate else (0.0, None, None))


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Blocks of a sequence are alike: an interval from resampled blocks, not sequences, would be far too narrow."""
    hits, widths = 0, []
    for trial in range(60):
        generator = torch.Generator().manual_seed(trial)
        rate_S = torch.rand(40, generator=generator)  # one draft a block, right half of the time on average
        match_NJ = torch.rand(40, 25, generator=generator) < rate_S[:, None]
        sequence_N = torch.arange(40).repeat_interleave(25)
        tall = match_NJ.reshape(-1, 1)
        got = evaluate_matches(tall, torch.ones_like(tall), sequence_N, ["chat"] * 40, num_resamples=400, seed=trial)
        low, high = got.overall.interval
        hits += low <= 1.5 <= high
        widths.append(high - low)
    assert 52 <= hits <= 60
    # 2 * 1.96 standard errors: variance 1/12 between sequences, 1/6 within one.
    assert sum(widths) / len(widths) == pytest.approx(2 * 1.96 * math.sqrt((1 / 12 + 1 / 6 / 25) / 40), rel=0.1)


def test_the_seed_decides_the_interval():
    match_NJ, valid_NJ, _ = tables()
    first, same, other = (
        evaluate_matches(match_NJ, valid_NJ, torch.arange(200), ["chat"] * 200, seed=seed) for seed in (1, 1, 2)
    )
    assert first == same
    assert first.overall.interval != other.overall.interval
    assert first.overall.length == other.overall.length


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"match_NJ": torch.ones(3, 4)}, "match: expected bool"),
        ({"match_NJ": torch.ones(3, dtype=torch.bool)}, "match: expected bool"),
        ({"match_NJ": torch.ones(3, 0, dtype=torch.bool)}, "match: expected bool"),
        ({"valid_NJ": torch.ones(3, 3, dtype=torch.bool)}, r"valid: expected bool .* got torch.bool \(3, 3\)"),
        ({"sequence_N": torch.zeros(3)}, "sequence: expected int64"),
        ({"sequence_N": torch.zeros(2, dtype=torch.int64)}, r"sequence: expected int64 \(3,\), got torch.int64 \(2,\)"),
        ({"sequence_N": torch.tensor([0, 1, 2])}, "sequence: expected 0 to 1, got 0 to 2"),
        ({"sequence_N": torch.tensor([0, -1, 1])}, "sequence: expected 0 to 1, got -1 to 1"),
        ({"valid_NJ": torch.zeros(3, 4, dtype=torch.bool)}, "expected at least one block with a judged draft"),
    ],
)
def test_wrong_tables_are_refused(change, told):
    arguments = {
        "match_NJ": torch.ones(3, 4, dtype=torch.bool),
        "valid_NJ": torch.ones(3, 4, dtype=torch.bool),
        "sequence_N": torch.tensor([0, 0, 1]),
    }
    with pytest.raises(ValueError, match=told):
        evaluate_matches(**(arguments | change), families=["chat", "code"])


def answer(accepted: list[int], num_tokens: int | None = None) -> Answer:
    """An answer of rounds that accepted so many drafts each, as the engine counts them."""
    histogram = [accepted.count(i) for i in range(max(accepted, default=-1) + 1)]
    meta = {"spec_verify_ct": len(accepted), "spec_correct_drafts_histogram": histogram} if accepted else {}
    return Answer([7] * (1 + sum(accepted) + len(accepted) if num_tokens is None else num_tokens), "", meta)


def test_an_engines_rounds_give_what_a_table_of_them_gives():
    generator = random.Random(3)
    accepted = [[generator.choice([0, 0, 1, 2, 2, 4]) for _ in range(rounds)] for rounds in (9, 30, 1, 0, 17)]
    got = evaluate_answers([answer(rounds) for rounds in accepted], FAMILIES, width=5)
    blocks = [(run, number) for number, rounds in enumerate(accepted) for run in rounds]
    match_NJ = torch.tensor([[slot < run for slot in range(4)] for run, _ in blocks])
    sequence_N = torch.tensor([number for _, number in blocks])
    table = evaluate_matches(match_NJ, torch.ones_like(match_NJ), sequence_N, FAMILIES)
    assert (got.block_size, got.overall, got.families) == (5, table.overall, table.families)
    assert got.overall.length == pytest.approx(1 + sum(run for run, _ in blocks) / len(blocks))
    assert (got.num_rounds, got.num_tokens) == (57, sum(run + 1 for run, _ in blocks))


def test_tokens_past_an_answers_end_are_accepted_and_not_handed_out():
    got = evaluate_answers([answer([3, 3], num_tokens=6), answer([], num_tokens=0)], ["chat", "chat"], width=4)
    assert (got.overall.length, got.num_tokens, got.num_rounds) == (4.0, 5, 2)
    assert got.overall.num_sequences == 1


@pytest.mark.parametrize(
    ("answers", "families", "width", "told"),
    [
        ([answer([4])], ["chat"], 4, "answer 0: expected counts of 0 to 3 accepted drafts in 1 rounds"),
        ([Answer([1, 2], "", {"spec_verify_ct": 2})], ["chat"], 4, "in 2 rounds"),
        ([answer([1])], ["chat", "chat"], 4, "expected a family for each of 1 answers, got 2"),
        ([answer([]), answer([])], ["chat", "chat"], 4, "expected at least one block with a judged draft"),
        ([answer([0])], ["chat"], 1, "width: expected at least 2"),
    ],
)
def test_answers_that_do_not_fit_are_refused(answers, families, width, told):
    with pytest.raises(ValueError, match=told):
        evaluate_answers(answers, families, width)


def test_json_and_back():
    table = evaluate_matches(*tables(), FAMILIES)
    engine = evaluate_answers([answer([1, 2]), answer([0])], ["chat", "code"], width=4)
    assert Evaluation.from_json(table.to_json()) == table
    assert EngineEvaluation.from_json(engine.to_json()) == engine
    raw = json.loads(table.to_json())
    with pytest.raises(ValueError, match=r"num_rounds: .*num_tokens:"):
        EngineEvaluation.from_json(json.dumps(raw))
    raw["overall"]["length"] = "3.4"
    raw["families"]["chat"]["lenght"] = 3.4
    with pytest.raises(ValueError, match=r"overall.length: .*families.chat.lenght: "):
        Evaluation.from_json(json.dumps(raw))
    with pytest.raises(ValueError, match="expected an Evaluation as JSON, got: the file: expected JSON, got EOF"):
        Evaluation.from_json("{")


def metrics(path: Path, *rows: dict, end: str = "\n") -> Path:
    row = {"loss": 3.0, "slot1_accuracy": 0.5, "acceptance_length": 2.0, "lr": 1e-3, "tokens_per_s": 9.0}
    path.write_text("\n".join(json.dumps(row | changes) for changes in rows) + end)
    return path


def test_metrics_of_a_run_taken_up_again(tmp_path):
    """Killed after step 30, taken up from step 10, killed again while it wrote."""
    steps = [{"step": step, "split": "train", "loss": 9.0} for step in (10, 20, 30)]
    again = [{"step": step, "split": "train", "loss": 4.0} for step in (15, 20, 30, 40)]
    held = {"step": 10, "split": "heldout", "loss": 5.0}
    file = metrics(tmp_path / "metrics.jsonl", *steps, held, *again, end='\n{"step": 50, "spl')
    got = report.read_metrics(file)
    assert [(row.step, row.loss) for row in got["train"]] == [(10, 9.0), (15, 4.0), (20, 4.0), (30, 4.0), (40, 4.0)]
    assert [(row.step, row.loss) for row in got["heldout"]] == [(10, 5.0)]


def test_metrics_that_are_none_are_told(tmp_path):
    rows = [{"step": 10, "split": "train"}, {"step": "ten", "split": "train", "loss": None}]
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: .*step: .*loss: "):
        report.read_metrics(metrics(tmp_path / "metrics.jsonl", *rows))
    with pytest.raises(ValueError, match="line 2: expected a row of metrics"):
        report.read_metrics(metrics(tmp_path / "metrics.jsonl", rows[0], end='\n{"step": 20, "sp\n'))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="expected at least one row"):
        report.read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="got no file"):
        report.read_metrics(tmp_path / "absent.jsonl")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'sglang-dflash\[train\]'"):
        report.plot_acceptance(evaluate_matches(*tables(), FAMILIES), tmp_path / "plot.png", "title")


def test_plot_of_acceptance(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="of the extra train")
    drawn = spied(monkeypatch)
    match_NJ = torch.tensor([[True, False, True], [False, True, True], [True, True, False]]).repeat_interleave(
        19, dim=0
    )
    match_NJ = torch.cat([match_NJ, torch.tensor([[False, True, True]] * 2)])
    sequence_N = torch.tensor([0] * 19 + [1] * 19 + [2] * 19 + [1] * 2)
    got = evaluate_matches(match_NJ, torch.ones_like(match_NJ), sequence_N, ["chat", "code", "chat"])
    image = report.plot_acceptance(got, tmp_path / "deeper" / "plot.png", "SmolLM2 drafter")
    assert image.read_bytes().startswith(b"\x89PNG")
    [figure] = drawn
    [axes] = figure.axes
    assert figure.get_suptitle() == "SmolLM2 drafter"
    assert axes.get_xlabel() == "slot of the block (reached by 20 blocks or more)"
    assert axes.get_ylabel() == "P(slot right | slots before it right)"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "chat (2.50)",
        "code (1.00)",
        "all families (1.97)",
    ]
    points = {line.get_label().split(" (")[0]: line.get_xydata().tolist() for line in axes.get_lines()}
    # Slot 3 of chat was reached by 19 blocks, slots 2 and 3 of code by none.
    assert [points["chat"][:2], points["code"][:1]] == [[[1, 1.0], [2, 0.5]], [[1, 0.0]]]
    assert all(math.isnan(rate) for _, rate in points["chat"][2:] + points["code"][1:])
    assert points["all families"][0] == [1, pytest.approx(38 / 59)]


def test_plot_of_training(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="of the extra train")
    drawn = spied(monkeypatch)
    rows = [{"step": step, "split": "train", "loss": 9.0 - step} for step in (1, 2)]
    held = {"step": 2, "split": "heldout", "slot1_accuracy": 0.25, "acceptance_length": 1.5}
    file = metrics(tmp_path / "metrics.jsonl", *rows, held)
    image = report.plot_training(file, tmp_path / "plot.svg", "run")
    assert "<svg" in image.read_text()
    [figure] = drawn
    assert figure.get_suptitle() == "run"
    assert {axes.get_xlabel() for axes in figure.axes} == {"training step"}
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "loss (nats a slot, weighted)",
        "accuracy of slot 1",
        "acceptance length (tokens, bonus included)",
    ]
    assert {text.get_text() for text in figure.axes[0].get_legend().get_texts()} == {"train", "heldout"}
    lines = [{line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()} for axes in figure.axes]
    assert lines[0]["train"] == [[1, 8.0], [2, 7.0]]
    assert [line["heldout"] for line in lines[1:]] == [[[2, 0.25]], [[2, 1.5]]]


def spied(monkeypatch) -> list:
    """The figures that are saved from here on."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig

    def savefig(figure, *args, **kwargs):
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures
