"""User turns that the target itself invents: it is given its chat template up to where the user's text would begin.

The method of Magpie (arXiv 2406.08464).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dflash.train import answers
from sglang_dflash.train.journal import Journal

TEMPERATURE = 1.0
MIN_P = 0.05
MAX_TURN_TOKENS = 96
MIN_CHARACTERS = 10
# Turns that agree in so many letters at the start are one: their answers would be near copies.
PREFIX_CHARACTERS = 40
# Batches in a row with less than 1 % of new turns: the target has little else to say.
MAX_STALE_BATCHES = 4
MARK = "USERTEXTSTANDSHERE"


@dataclass(frozen=True)
class Frame:
    """What surrounds the user's text in the chat template."""

    prefix_ids: list[int]
    end_ids: set[int]  # tokens that end the user's turn


def check_template(tokenizer: Any, target: object) -> None:
    """Refuse a target without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"expected a chat template in the tokenizer of {target}, got none; train on an instruction-tuned "
            "target, or put chat_template.jinja into its folder"
        )


def frame_of(tokenizer: Any, template_arguments: Mapping[str, Any]) -> Frame:
    """Split the chat template at the user's text.

    Raises:
        ValueError: the template has no place for it, or no text before it.
    """
    messages = [{"role": "user", "content": MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False, **template_arguments)
    prefix, mark, suffix = text.partition(MARK)
    prefix_ids, suffix_ids = (tokenizer(part, add_special_tokens=False).input_ids for part in (prefix, suffix))
    if not mark or not prefix_ids:
        raise ValueError(
            "expected a chat template with the user's text in it and something before it, got "
            f"{text[:80]!r}; leave the family chat out"
        )
    end_ids = set(suffix_ids[:1]) | ({tokenizer.eos_token_id} - {None})
    return Frame(prefix_ids, end_ids)


def invent(
    model: Any,
    tokenizer: Any,
    journal: Journal,
    count: int,
    *,
    batch_size: int,
    seed: int,
    template_arguments: Mapping[str, Any],
    progress: Callable[[answers.Progress], None] | None = None,
) -> list[str]:
    """`count` user turns, those of the journal first; new ones are written to it batch by batch.

    They depend on target, seed and batch size alone, however often the run is killed. Where the target repeats itself
    so much that new turns hardly come, there are fewer.
    """
    frame = frame_of(tokenizer, template_arguments)
    sampling = answers.Sampling(TEMPERATURE, MIN_P, seed)
    turns = [turn for batch in journal.turns for turn in batch]
    seen = {prefix_key(turn) for turn in turns}
    stale = 0
    while len(turns) < count and stale < MAX_STALE_BATCHES:
        num_batches = -(-(count - len(turns)) // batch_size)
        batches = answers.generate(
            model,
            [frame.prefix_ids] * (num_batches * batch_size),
            max_new_tokens=MAX_TURN_TOKENS,
            batch_size=batch_size,
            stop_ids=frame.end_ids,
            sampling=sampling,
            first_batch=len(journal.turns),
            stage="user turns",
            progress=progress,
        )
        for batch in batches:
            new = []
            for answer in batch:
                turn = _clean(tokenizer, answer.ids, frame)
                if turn is not None and prefix_key(turn) not in seen:
                    seen.add(prefix_key(turn))
                    new.append(turn)
            journal.add_turns(new)
            turns += new
            stale = stale + 1 if len(new) * 100 < batch_size else 0
            if len(turns) >= count or stale >= MAX_STALE_BATCHES:
                break
    return turns[:count]


def prefix_key(turn: str) -> str:
    """Turns with the same key count as one: letters and digits of the start, in lower case."""
    return re.sub(r"\W+", " ", turn.lower()).strip()[:PREFIX_CHARACTERS]


def _clean(tokenizer: Any, ids: list[int], frame: Frame) -> str | None:
    """The text of a sampled turn; None where it did not end, holds special tokens or broken characters, or is short."""
    if not ids or ids[-1] not in frame.end_ids:
        return None
    text_ids = ids[:-1]
    if set(text_ids) & set(tokenizer.all_special_ids):
        return None
    turn = tokenizer.decode(text_ids).strip()
    if len(turn) < MIN_CHARACTERS or "\N{REPLACEMENT CHARACTER}" in turn:
        return None
    return turn
