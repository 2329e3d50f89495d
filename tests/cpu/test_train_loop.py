"""The trainer on a tiny target: agreement with the reference, learning, resuming, errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_dflash import checkpoint, drafter_config
from sglang_dflash.reference import drafter as reference
from sglang_dflash.train import blocks, dataset, estimate, evaluate, loop, model, optimizer, report, run_record, state
from sglang_dflash.train.model import BlockDrafter
from sglang_dflash.train.settings import Settings, load
from sglang_dflash.train.target import FeatureCache, FrozenTarget

VOCAB, HIDDEN, MASK = 64, 32, 63
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight sequences that repeat short patterns: what follows can be memorised."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    examples = []
    for i in range(8):
        pattern = [(7 * i + 3 * j) % 60 for j in range(6 + i)]
        split = "heldout" if i == 7 else "train"
        examples.append(dataset.Example("pattern", split, pattern[:4], (pattern * 12)[4:70]))
    dataset.write(path, examples)
    return path


def batch_of(ids_BS: torch.Tensor) -> dataset.Batch:
    zeros = torch.zeros(len(ids_BS), dtype=torch.long)
    return dataset.Batch(ids_BS, zeros, zeros + ids_BS.shape[1], zeros)


def settings(target: Path, data: Path, output: Path, **changes: Any) -> Settings:
    values = {
        "target": target,
        "data": data,
        "output": output,
        "num_layers": 2,
        "block_size": 6,
        "mask_token_id": MASK,
        "target_layer_ids": (1, 2, 4),
        "max_tokens": 128,
        "batch_sequences": 4,
        "anchors": 12,
        "steps": 6,
        "compute_dtype": "float32",
        "log_every": 1,
        "evaluate_every": 1000,
        "checkpoint_every": 3,
    }
    return Settings(**{**values, **changes})


def test_trainer_computes_what_the_reference_computes(target: Path, tmp_path: Path) -> None:
    config = drafter_config.config_for_target(json.loads((target / "config.json").read_text()), 2, 6, MASK, (1, 2, 4))
    torch.manual_seed(1)
    drafter = loop.initialise(BlockDrafter(config), std=0.2).eval()
    frozen = FrozenTarget(target, config.target_layer_ids, torch.float32, CPU)
    ids_BS = torch.randint(60, (2, 40))
    lengths_B = torch.tensor([40, 30])
    drawn = blocks.draw(ids_BS, torch.tensor([4, 9]), lengths_B, 5, 6, torch.Generator().manual_seed(0))
    with torch.no_grad():
        features_BSD = frozen.features(batch_of(ids_BS), CPU)
        hidden_BAKH = drafter.forward_blocks(features_BSD, drawn, frozen.embedding, MASK)
        for row in range(2):
            for a, anchor in enumerate(drawn.anchors_BA[row].tolist()):
                context = drafter.new_context()
                drafter.inject(features_BSD[row, :anchor], context)
                expected_KH, _ = drafter.draft_logits(frozen.model, int(ids_BS[row, anchor]), context)
                torch.testing.assert_close(hidden_BAKH[row, a], expected_KH, atol=1e-5, rtol=1e-4)


def test_features_are_those_of_the_taps(target: Path) -> None:
    frozen = FrozenTarget(target, (1, 4), torch.float32, CPU)
    ids = torch.randint(60, (1, 9))
    hidden = frozen.model(ids, output_hidden_states=True).hidden_states
    got = frozen.features(batch_of(ids), CPU)
    torch.testing.assert_close(got, torch.cat([hidden[2], hidden[5]], dim=-1))
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    torch.testing.assert_close(frozen.features(batch_of(padded), CPU)[:, :9], got)
    with pytest.raises(ValueError, match="layers 0 to 4"):
        FrozenTarget(target, (1, 5), torch.float32, CPU)


def test_memorises_patterns_and_writes_a_drafter(target: Path, data: Path, tmp_path: Path) -> None:
    seen: list[loop.Progress] = []
    chosen = settings(target, data, tmp_path, steps=250, learning_rate=4e-3, log_every=10, evaluate_every=125)
    folder = loop.Trainer(chosen, CPU).run(seen.append)
    train = [p for p in seen if p.split == "train"]
    assert train[-1].loss < train[0].loss - 0.3, "the small head of a random target leaves no more to win"
    assert train[-1].slot1_accuracy > 0.9
    assert train[-1].acceptance_length > 3.5
    assert [p.step for p in seen if p.split == "heldout"] == [125, 250]
    lines = [json.loads(line) for line in (tmp_path / loop.METRICS).read_text().splitlines()]
    assert lines == [dataclasses.asdict(p) for p in seen]
    config = checkpoint.read_config(folder)
    checkpoint.check_tensors(folder, config)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (6, MASK, (1, 2, 4))
    reference.load_drafter(folder)


@pytest.mark.parametrize("changes", [{"loss": "dpace"}, {"loss": "decay"}, {"optimizer": "muon"}], ids=str)
def test_a_killed_run_goes_on_as_it_would_have(
    target: Path, data: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = loop.Trainer(settings(target, data, tmp_path / "whole", **changes), CPU)
    whole.run()

    class Killed(Exception):
        pass

    def kill(progress: loop.Progress) -> None:
        if progress.step == 5:
            raise Killed

    chosen = settings(target, data, tmp_path / "killed", **changes)
    with pytest.raises(Killed):
        loop.Trainer(chosen, CPU).run(kill)
    metrics = chosen.output / loop.METRICS
    with metrics.open("a") as file:
        file.write('{"step": 6, "spl')  # torn by the kill
    again = loop.Trainer(chosen, CPU)
    again.resume()
    assert again.step == 3, "from the last state"
    again.run()
    written, expected = report.read_metrics(metrics), report.read_metrics(whole.settings.output / loop.METRICS)
    assert [(split, row.step) for split, rows in written.items() for row in rows] == [
        (split, row.step) for split, rows in expected.items() for row in rows
    ]
    for name, weight in whole.drafter.state_dict().items():
        torch.testing.assert_close(again.drafter.state_dict()[name], weight, msg=name)


def test_a_run_of_other_settings_or_data_is_not_taken_up(target: Path, data: Path, tmp_path: Path) -> None:
    mine, output = tmp_path / "data.jsonl", tmp_path / "run"
    shutil.copyfile(data, mine)
    loop.Trainer(settings(target, mine, output), CPU).run()
    with pytest.raises(ValueError, match=r"got one of learning_rate 0\.003, not 1\.0; use another"):
        loop.Trainer(settings(target, mine, output, learning_rate=1.0), CPU).run()
    dataset.write(mine, dataset.read(data)[:5])
    with pytest.raises(ValueError, match="got one of data_sha256"):
        loop.Trainer(settings(target, mine, output), CPU).run()


def test_a_run_without_a_state_leaves_nothing_of_the_one_before(target: Path, data: Path, tmp_path: Path) -> None:
    for name in (loop.METRICS, loop.EVALUATION, run_record.FILE):
        (tmp_path / name).write_text("another run's")
    examples = [example for example in dataset.read(data) if example.split == "train"]
    dataset.write(tmp_path / "data.jsonl", examples)
    trainer = loop.Trainer(settings(target, tmp_path / "data.jsonl", tmp_path, steps=1), CPU)
    trainer.resume()
    assert not list(tmp_path.glob("*.json"))
    assert not (tmp_path / loop.METRICS).exists()


def test_a_torn_state_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 4):
        state.save(tmp_path, step, {"value": torch.tensor(step)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000002.pt", "step-0000003.pt"]
    (tmp_path / "step-0000004.tmp").write_bytes(b"half")
    loaded = state.load(tmp_path, CPU)
    assert loaded is not None
    assert (loaded["step"], int(loaded["value"])) == (3, 3)
    assert state.load(tmp_path / "nothing", CPU) is None
    newest = tmp_path / "step-0000003.pt"
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"step-0000003\.pt: .* damaged file; delete it"):
        state.load(tmp_path, CPU)


def test_learning_rate_warms_up_and_falls_to_zero(target: Path, data: Path, tmp_path: Path) -> None:
    chosen = settings(target, data, tmp_path, steps=100, warmup=0.1, learning_rate=1.0)
    rates = [loop.learning_rate(chosen, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_errors_say_what_to_change(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mask_token_id: expected an id below"):
        loop.Trainer(settings(target, data, tmp_path, mask_token_id=VOCAB), CPU)
    only_heldout = tmp_path / "heldout.jsonl"
    dataset.write(only_heldout, [dataset.Example("x", "heldout", [1], [2, 3])])
    with pytest.raises(ValueError, match="split train"):
        loop.Trainer(settings(target, only_heldout, tmp_path), CPU)
    foreign = tmp_path / "foreign.jsonl"
    dataset.write(foreign, [*dataset.read(data), dataset.Example("x", "heldout", [1], [2, VOCAB])])
    with pytest.raises(ValueError, match=f"token ids below the target's vocabulary of {VOCAB}, got {VOCAB}"):
        loop.Trainer(settings(target, foreign, tmp_path), CPU)
    for path, text in ((tmp_path / "no", None), (tmp_path / "weights", (target / "config.json").read_text())):
        if text is not None:
            path.mkdir()
            (path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"target: expected a folder|a target that Transformers loads"):
            loop.Trainer(settings(path, data, tmp_path), CPU)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output: expected a folder .*, got the file .*file; name another"):
        loop.Trainer(settings(target, data, tmp_path / "file"), CPU)
    below = loop.Trainer(settings(target, data, tmp_path / "file" / "run"), CPU)
    with pytest.raises(NotADirectoryError):
        below.run()
    assert below.step == 0, "nothing was trained that could not be kept"
    for taps in ((4, 2, 1), (1, 1), ()):
        with pytest.raises(ValueError, match="layers that ascend"):
            settings(target, data, tmp_path, target_layer_ids=taps)
    file = tmp_path / "train.yaml"
    file.write_text("1: 2\n")
    with pytest.raises(ValueError, match=r"train.yaml:\n"):
        load(file, {})
    file.write_text("target: a\ndata: b\noutput: c\nmask_token_id: 1\nlearning_rat: 0.1\nsteps: 0\n")
    with pytest.raises(ValueError, match=r"learning_rat.*|steps.*") as error:
        load(file, {})
    assert "learning_rat" in str(error.value)
    assert "steps" in str(error.value)
    flags = {"target": "a", "data": "b", "output": "c", "mask_token_id": 1}
    assert load(None, flags).steps == Settings(**flags).steps


def test_batched_muon_takes_the_steps_of_muon() -> None:
    torch.manual_seed(0)
    shapes = [(8, 24), (24, 8), (8, 24), (16, 16), (24, 8), (5, 40)]
    start = [torch.randn(shape) for shape in shapes]
    weights = []
    for kind in (torch.optim.Muon, optimizer.BatchedMuon):
        matrices = [torch.nn.Parameter(matrix.clone()) for matrix in start]
        chosen = kind(matrices, 0.05, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for matrix in matrices:
                matrix.grad = torch.randn(matrix.shape, generator=generator)
            chosen.step()
        weights.append(matrices)
    for expected, got, first in zip(*weights, start):
        moved = (expected - first).abs().max()
        assert moved > 0.01
        # Both iterate in bfloat16, in different order.
        torch.testing.assert_close(got, expected, atol=0.02 * float(moved), rtol=0)


def test_cached_features_train_the_same(target: Path, data: Path, tmp_path: Path) -> None:
    drafters = []
    for cached in (False, True):
        trainer = loop.Trainer(settings(target, data, tmp_path, cache_features=cached), CPU)
        for _ in range(3):
            trainer.train_step()
        drafters.append(trainer.drafter.state_dict())
    for name, weight in drafters[0].items():
        torch.testing.assert_close(drafters[1][name], weight, msg=name)


def test_features_without_room_are_refused(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven sequences of 70 tokens, three taps of 32 features in float32: 188,160 bytes."""
    trainer = loop.Trainer(settings(target, data, tmp_path), CPU)

    class Room(Exception):
        pass

    def computed(*args: Any, **kwargs: Any) -> None:
        raise Room

    monkeypatch.setattr(torch, "empty", computed)
    arguments = (trainer.target, trainer.batches, torch.float32, torch.device("cuda"))
    for free, expected in ((188_160, Room), (188_159, ValueError)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
        with pytest.raises(expected) as refused:
            FeatureCache(*arguments)
    assert "free for 490 tokens" in str(refused.value)


def test_evaluation_counts_every_heldout_sequence_once(target: Path, data: Path, tmp_path: Path) -> None:
    """Three sequences in batches of four: the fourth place of the batch is filled, and not counted."""
    examples = dataset.read(data)
    heldout = [dataclasses.replace(e, split="heldout", family=f) for e, f in zip(examples[:3], ["a", "b", "a"])]
    dataset.write(tmp_path / "data.jsonl", [*examples, *heldout][:7] + heldout)
    trainer = loop.Trainer(settings(target, tmp_path / "data.jsonl", tmp_path), CPU)
    progress, evaluation = trainer.evaluate()
    assert {name: family.num_sequences for name, family in evaluation.families.items()} == {"a": 2, "b": 1}
    assert evaluation.overall.num_blocks == 3 * 12
    assert progress.acceptance_length == pytest.approx(evaluation.overall.length)
    assert progress.slot1_accuracy == pytest.approx(evaluation.overall.slots[0])


def test_a_finished_run_leaves_its_record_and_its_evaluation(target: Path, data: Path, tmp_path: Path) -> None:
    loop.Trainer(settings(target, data, tmp_path), CPU).run(command="the command")
    record = run_record.RunRecord.read(tmp_path / run_record.FILE)
    assert record.settings == settings(target, data, tmp_path)
    assert record.command == "the command"
    assert [(row.split, row.examples, row.tokens) for row in record.data] == [("train", 7, 7 * 66), ("heldout", 1, 66)]
    assert evaluate.Evaluation.from_json((tmp_path / loop.EVALUATION).read_text()).overall.num_sequences == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_flex_attention_sees_what_the_dense_mask_shows(causal: bool, window: int | None) -> None:
    ids_BS, lengths_B = torch.zeros(2, 192, dtype=torch.long), torch.tensor([192, 90])
    drawn = blocks.draw(ids_BS, torch.tensor([4, 9]), lengths_B, 60, 6, torch.Generator().manual_seed(0))
    mask = model.block_mask(drawn.anchors_BA, 192, 6, causal, window)
    batch, queries, keys = torch.arange(2)[:, None, None], torch.arange(360)[:, None], torch.arange(192 + 360)
    got = mask.mask_mod(batch, torch.tensor(0), queries, keys)
    assert torch.equal(got, blocks.visible(drawn.anchors_BA, 192, 6, causal, window))
    # A tile without an open pair is skipped, any other is not.
    size = mask.BLOCK_SIZE[0]
    padded = torch.nn.functional.pad(got, (0, -got.shape[2] % size, 0, -got.shape[1] % size))
    tiles = padded.unflatten(1, (-1, size)).unflatten(3, (-1, size)).any(4).any(2)
    num_tiles = mask.kv_num_blocks + (0 if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks)
    assert torch.equal(num_tiles[:, 0], tiles.sum(-1).to(num_tiles.dtype))


def test_compiled_layers_compute_what_the_others_do(target: Path) -> None:
    config = drafter_config.config_for_target(json.loads((target / "config.json").read_text()), 2, 6, MASK, (1, 2, 4))
    config = dataclasses.replace(config, head_dim=16)  # flex attention's least
    torch.manual_seed(1)
    drafter = loop.initialise(BlockDrafter(config), std=0.2).eval()
    embedding = torch.nn.Embedding(VOCAB, HIDDEN)
    features_BSD = torch.randn(2, 192, 3 * HIDDEN)
    ids_BS, lengths_B = torch.randint(60, (2, 192)), torch.tensor([192, 90])
    with torch.no_grad():
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            drawn = blocks.draw(ids_BS, torch.tensor([4, 9]), lengths_B, 40, 6, generator)
            drafter.compiled = False
            expected = drafter.forward_blocks(features_BSD, drawn, embedding, MASK)
            drafter.compiled = True
            got = drafter.forward_blocks(features_BSD, drawn, embedding, MASK)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_bfloat16_compute_keeps_float32_weights(target: Path, data: Path, tmp_path: Path) -> None:
    trainer = loop.Trainer(settings(target, data, tmp_path, compute_dtype="bfloat16"), CPU)
    before = {name: weight.clone() for name, weight in trainer.drafter.named_parameters()}
    outcome = trainer.train_step()
    assert torch.isfinite(outcome["loss"])
    for name, weight in trainer.drafter.named_parameters():
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, before[name]), name


def test_estimate_counts_and_times(target: Path, data: Path, tmp_path: Path) -> None:
    trainer = loop.Trainer(settings(target, data, tmp_path), CPU)
    cost = estimate.measure(trainer)
    assert cost.drafter_parameters == sum(weight.numel() for weight in trainer.drafter.parameters())
    assert cost.train_sequences == 7
    assert cost.train_tokens == 7 * 70
    assert cost.blocks_a_step == 4 * 12
    assert cost.epochs == pytest.approx(6 / trainer.batches.steps_per_epoch)
    assert cost.run_s == pytest.approx(6 * cost.step_s)
    assert f"{cost.drafter_parameters / 1e6:.1f}M" in cost.render()
    assert not (tmp_path / loop.STATES).exists(), "nothing of a dry run is kept"
