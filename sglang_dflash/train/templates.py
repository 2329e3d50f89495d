"""Prompts made of our own templates and words: everyday requests of many forms."""

from __future__ import annotations

import random
import re

from sglang_dflash.train.words import FIELDS

TEMPLATES = (
    # Explain.
    "Explain {topic} in simple terms.",
    "Explain {topic} to {role}.",
    "What is the most important thing to know about {topic}?",
    "How does {topic} affect our daily life?",
    "Why do people care about {topic}?",
    "What are common misunderstandings about {topic}?",
    "Give a short history of {topic}.",
    "Summarize {topic} in {few} sentences.",
    "I am {role}. Teach me the basics of {topic} step by step.",
    "What is the difference between {topic} and {topic2}?",
    "How are {topic} and {topic2} related?",
    "Use an analogy to explain {topic}.",
    "Is too much or too little made of {topic}? Argue both sides.",
    # List.
    "List {few} facts about {topic}.",
    "Give me {few} tips about {topic}.",
    "Name {few} books or films in which {topic} plays a role, with one line on each.",
    "Write a numbered list of {few} questions that {role} could ask about {topic}.",
    "What are the advantages and disadvantages of {topic}? Use bullet points.",
    "Make a table that compares {topic} with {topic2}.",
    "Create a quiz of {few} multiple-choice questions about {topic}, with the answers at the end.",
    "Make a glossary of {few} terms that belong to {topic}.",
    "Write a checklist for someone who starts with {topic}.",
    "Suggest {few} projects for {role} who is interested in {topic}.",
    # Write.
    "Write a short story about {character} in {place}.",
    "Write a poem about {topic}.",
    "Write a haiku about {place}.",
    "Write a dialogue between {character} and {character2}.",
    "Continue this story: One morning, {character} found a strange letter.",
    "Write the opening paragraph of an essay about {topic}.",
    "Write a five-paragraph essay on {topic}.",
    "Write a blog post about {topic} for {role}.",
    "Write a polite email to a colleague about {topic}.",
    "Write a letter of complaint about {product}.",
    "Write an advertisement for {product}.",
    "Write a product description of {product} in {few} sentences.",
    "Write a speech of one minute about {topic}.",
    "Write a news report: scientists have made a surprising discovery about {topic}.",
    "Write a diary entry of {character}.",
    "Suggest {few} names for {product}.",
    # Plan.
    "Plan a trip of {few} days to {place}.",
    "Make a weekly plan for {role} who wants to learn about {topic}.",
    "Design a lesson about {topic} for {role}.",
    "What should I see in {place} with {role}?",
    "Compare {place} and {place2} as places to live.",
    # Rewrite, translate, convert.
    'Translate into {tongue}: "{sentence}"',
    'Rewrite this sentence in a more formal tone: "{sentence}"',
    'Rewrite in the past tense, then in the future tense: "{sentence}"',
    'Find the nouns and verbs of this sentence: "{sentence}"',
    'Turn this into a question, then into its negation: "{sentence}"',
    'Put these two sentences into one paragraph with a fitting end: "{sentence} {sentence2}"',
    "Convert {number} {conversion}. Show the calculation.",
    "How do I convert {conversion}? Give the formula and {few} examples.",
    "Write {number} in words, and say whether it is even or odd.",
    "What is {number} plus {number2}? What is {number} times {number2}?",
    "Count from {number} upward in steps of {few}, ten numbers in all.",
    "Write {topic} as a JSON object with the fields name, category, summary and related.",
    # Code.
    "Write a {language} function that {code_task}.",
    "Write a {language} program that {code_task}. Explain how it works.",
    "Write {language} code that {code_task}, with comments and an example of its use.",
    "Write unit tests in Python for a function that {code_task}.",
    "Describe in pseudocode a function that {code_task}.",
    "What is the time complexity of a function that {code_task}? Give the code in {language}.",
    "Explain {topic} with a small example in {language}.",
)

_FIELD = re.compile(r"\{(\w+)\}")
# Draws in a row that gave nothing new: by then nearly all the prompts that there are have been drawn.
MAX_REPEATS = 10_000


def prompts(count: int, seed: int) -> list[str]:
    """`count` different prompts; of a greater count with the same seed they are the first ones.

    Raises:
        ValueError: there are not so many.
    """
    rng = random.Random(f"templates:{seed}")
    found: dict[str, None] = {}
    repeats = 0
    while len(found) < count and repeats < MAX_REPEATS:
        before = len(found)
        found[fill(rng.choice(TEMPLATES), rng)] = None
        repeats = repeats + 1 if len(found) == before else 0
    if len(found) < count:
        raise ValueError(f"expected at most about {len(found)} template prompts, got {count}; ask for fewer")
    return list(found)


def fill(template: str, rng: random.Random) -> str:
    """The template with a word in each field; `{topic}` and `{topic2}` get different ones."""
    words: dict[str, str] = {}
    for name in _FIELD.findall(template):
        while name not in words:
            word = rng.choice(FIELDS[name.rstrip("2")])
            if word not in words.values():
                words[name] = word
    return _FIELD.sub(lambda match: words[match[1]], template)
