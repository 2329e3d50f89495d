"""Prompts of the engine tests: short, long, code, several languages, conversations that share prefixes."""

from __future__ import annotations

from typing import Any

SHORT = (
    "What is the capital of France?",
    "Count from one to ten in words.",
    "Explain in two sentences why the sky is blue.",
    "Name three primary colours.",
    "What is 17 times 23?",
    "Write a haiku about the sea.",
    "Translate 'good morning' into Spanish.",
    "List the planets of the solar system.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What does HTTP stand for?",
    "Continue: 2, 4, 8, 16,",
)
CODE = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a C program that prints hello world.",
    "Explain this code: `for i in range(10): print(i * i)`",
    "Write an SQL query that counts the users of each country.",
    "Fix the bug: `def add(a, b): return a - b`",
    "Write a bash loop over all .txt files of a folder.",
    "def quicksort(values):",
    "Write a JavaScript function that reverses a string.",
)
LANGUAGES = (
    "Nenne drei deutsche Flüsse.",
    "Quelle est la capitale de l'Espagne ?",
    "¿Cuántos días tiene una semana?",
    "Qual è il monte più alto d'Italia?",
    "日本の首都はどこですか。",
    "北京是哪个国家的首都?",
    "Какой сегодня день?",
    "Hvad er 2 plus 2?",
)
DOCUMENT = " ".join(f"Item {i}: {i} times {i + 3} is {i * (i + 3)}." for i in range(1, 150))  # over 2,000 tokens
TURNS = (
    ("Who are you?", "I am an assistant that answers briefly."),
    ("Name a fruit.", "An apple."),
    ("And a vegetable?", "A carrot."),
    ("What colour is it?", "Orange."),
    ("Spell it backwards.", "T-o-r-r-a-c."),
    ("Name an animal.", "A horse."),
    ("What does it eat?", "Grass and hay."),
    ("Where does it live?", "In a stable or on a pasture."),
)


def texts(tokenizer: Any) -> dict[str, list[int]]:
    """Request id to prompt tokens, of every kind in turn so that a few of the first hold all kinds."""
    chats = {f"short-{i}": [_user(text)] for i, text in enumerate(SHORT)}
    chats |= {f"code-{i}": [_user(text)] for i, text in enumerate(CODE)}
    chats |= {f"language-{i}": [_user(text)] for i, text in enumerate(LANGUAGES)}
    chats |= {f"turns-{i}": _conversation(i) for i in range(1, len(TURNS) + 1)}
    chats |= {f"words-{n}": [_user(f"Say the word {'very ' * n}good.")] for n in range(1, 25)}
    chats |= {f"long-{i}": [_user(f"{DOCUMENT} What is item {7 * i + 1}?")] for i in range(4)}
    ids = {
        rid: tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        for rid, chat in chats.items()
    }
    names = ("short", "code", "long", "turns", "language", "words")
    kinds = [[rid for rid in ids if rid.startswith(name)] for name in names]
    order = [rids[i] for i in range(max(map(len, kinds))) for rids in kinds if i < len(rids)]
    return {rid: ids[rid] for rid in order}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _conversation(num_turns: int) -> list[dict[str, str]]:
    messages = []
    for question, answer in TURNS[:num_turns]:
        messages += [_user(question), {"role": "assistant", "content": answer}]
    return [*messages, _user("Tell me more.")]
