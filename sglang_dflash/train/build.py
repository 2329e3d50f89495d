"""Make training data: gather prompts, let the target answer them, cut loops, split, write.

    families -> prompts -> rendered ids -> answers (journal) -> loops cut -> JSON lines

Run it again after a kill, or with more prompts: what the journal beside the output holds is not generated again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.train import answers, dataset, prompts, selfinstruct, target
from sglang_dflash.train.answers import Progress
from sglang_dflash.train.dataset import Example
from sglang_dflash.train.journal import Journal, key_of

FAMILIES = ("chat", "reasoning", "templates", "user", "code")
HELDOUT_ONLY = ("code",)
LOOPED_PERCENT = 5  # of a family's examples, at most, end in a loop


@dataclass(frozen=True)
class Options:
    """How answers are generated."""

    max_new_tokens: int
    max_prompt_tokens: int  # rendered; longer prompts are left out
    batch_size: int
    temperature: float  # of the answers; 0 is greedy
    heldout_percent: float
    seed: int
    template_arguments: Mapping[str, Any]  # of the chat template, e.g. {"enable_thinking": False}


@dataclass
class Count:
    """Examples of one family and split."""

    num_examples: int = 0
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0
    num_looped: int = 0  # kept, their tails cut


@dataclass
class FamilySummary:
    """What became of a family's prompts."""

    num_asked: int
    num_prompts: int = 0  # that were found or made
    num_repeated: int = 0  # the same as another prompt
    num_too_long: int = 0
    # Looped answers over the 5 % that are kept: to train on, without the loop; held out, not at all.
    num_loops_cut: int = 0
    num_loops_dropped: int = 0
    splits: dict[str, Count] = field(default_factory=dict)


@dataclass
class Summary:
    """What a data run wrote. `problems` names the lines of the user's file that were left out."""

    path: Path
    families: dict[str, FamilySummary] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Prompt:
    family: str
    split: dataset.Split
    ids: list[int]

    @property
    def key(self) -> str:
        return key_of(self.ids)


def build(
    target_path: Path | str,
    out_path: Path | str,
    *,
    families: Mapping[str, int | None],
    prompts_path: Path | str | None = None,
    max_new_tokens: int = 384,
    max_prompt_tokens: int = 512,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    temperature: float = 0.0,
    heldout_percent: float = 5,
    template_arguments: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Write training data of a target to `out_path`, and a journal to `<out_path>.journal`.

    `families` maps names of `FAMILIES` to numbers of prompts; None means all that there are (user and code alone).
    `prompts_path` is the user's JSONL. The code prompts are held out; of the other families `heldout_percent` are.

    Raises:
        ValueError: an argument is wrong, a package is missing, the target has no chat template or cannot be decoded
            here, the journal is of another run, memory runs out, or no answer is left.
    """
    options = Options(
        max_new_tokens, max_prompt_tokens, batch_size, temperature, heldout_percent, seed, template_arguments or {}
    )
    _check(families, prompts_path, options)
    tokenizer = target.load(target_path, "AutoTokenizer")
    selfinstruct.check_template(tokenizer, target_path)
    summary = Summary(Path(out_path))
    rendered: dict[str, _Prompt] = {}
    _render(tokenizer, _gather(tokenizer, families, prompts_path, options, summary), options, summary, rendered)
    model = target.load(target_path, "AutoModelForCausalLM", dtype=dtype).to(device).eval()
    identity = {
        "target": target.fingerprint(model),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "template_arguments": dict(options.template_arguments),
    }
    with Journal(Path(f"{out_path}.journal"), identity) as journal:
        if "chat" in families:
            turns = selfinstruct.invent(
                model,
                tokenizer,
                journal,
                families["chat"] or 0,
                batch_size=batch_size,
                seed=seed,
                template_arguments=options.template_arguments,
                progress=progress,
            )
            _render(tokenizer, {"chat": [prompts.from_text(turn) for turn in turns]}, options, summary, rendered)
        _answer(model, tokenizer, journal, rendered, options, progress)
        examples = _examples(list(rendered.values()), journal, summary)
    dataset.write(summary.path, examples)
    return summary


def _check(families: Mapping[str, int | None], prompts_path: Path | str | None, options: Options) -> None:
    unknown = [name for name in families if name not in FAMILIES]
    if unknown or not families:
        raise ValueError(
            f"expected families of {', '.join(FAMILIES)}, got {', '.join(unknown) or 'none'}; correct them"
        )
    for name, count in families.items():
        if count is None and name not in ("user", "code"):
            raise ValueError(f"expected a number of {name} prompts, got none; give one")
        if count is not None and count < 1:
            raise ValueError(f"expected at least 1 prompt of the family {name}, got {count}; leave it out or raise it")
    if ("user" in families) != (prompts_path is not None):
        raise ValueError(
            "expected a file of prompts with the family user and without it none, got "
            f"{prompts_path or 'no file'}; give both or neither"
        )
    for name in ("max_new_tokens", "max_prompt_tokens", "batch_size"):
        if getattr(options, name) < 1:
            raise ValueError(f"expected {name} of at least 1, got {getattr(options, name)}; raise it")
    if not 0 <= options.heldout_percent < 100:
        raise ValueError(f"expected heldout_percent of 0 to below 100, got {options.heldout_percent}; correct it")


def _gather(
    tokenizer: Any,
    families: Mapping[str, int | None],
    prompts_path: Path | str | None,
    options: Options,
    summary: Summary,
) -> dict[str, list[prompts.Messages]]:
    """The prompts of all families but chat, whose prompts only the model can tell."""
    found: dict[str, list[prompts.Messages]] = {}
    for name in (name for name in FAMILIES if name in families):
        count = families[name]
        if name == "user":
            assert prompts_path is not None
            own = prompts.from_jsonl(
                Path(prompts_path), lambda messages: prompts.render(tokenizer, messages, options.template_arguments)
            )
            summary.problems += own.problems
            found[name] = own.prompts[:count]
        elif name == "code":
            found[name] = prompts.code()[:count]
        elif name == "reasoning":
            found[name] = prompts.reasoning(count or 0, options.seed)
        elif name == "templates":
            found[name] = prompts.from_templates(count or 0, options.seed)
        summary.families[name] = FamilySummary(count if count is not None else len(found[name]))
    return found


def _render(
    tokenizer: Any,
    texts: Mapping[str, list[prompts.Messages]],
    options: Options,
    summary: Summary,
    found: dict[str, _Prompt],
) -> None:
    """Add prompts as token ids, by key: each once; where two families share one, the first family has it."""
    # Held-out families first: what they hold must not be trained on as another family's.
    for family in sorted(texts, key=lambda name: name not in HELDOUT_ONLY):
        count = summary.families[family]
        count.num_prompts = len(texts[family])
        for messages in texts[family]:
            ids = prompts.render(tokenizer, messages, options.template_arguments)
            split = dataset.split_of(prompts.text_of(messages), options.heldout_percent)
            prompt = _Prompt(family, "heldout" if family in HELDOUT_ONLY else split, ids)
            if len(ids) > options.max_prompt_tokens:
                count.num_too_long += 1
            elif prompt.key in found:
                count.num_repeated += 1
            else:
                found[prompt.key] = prompt


def _answer(
    model: Any,
    tokenizer: Any,
    journal: Journal,
    rendered: Mapping[str, _Prompt],
    options: Options,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Answer the prompts that the journal has no answer to."""
    pending = [prompt for key, prompt in rendered.items() if key not in journal.answers]
    batches = answers.generate(
        model,
        [prompt.ids for prompt in pending],
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        stop_ids=answers.stop_ids_of(model, tokenizer),
        # With the count of answers in the seed, a run that goes on draws other numbers than it has drawn already.
        sampling=answers.Sampling(options.temperature, seed=options.seed),
        first_batch=len(journal.answers),
        progress=progress,
    )
    for batch in batches:
        journal.add_answers((pending[answer.index].key, *answers.cut_loop(answer.ids)) for answer in batch)


def _examples(rendered: list[_Prompt], journal: Journal, summary: Summary) -> list[Example]:
    """The examples in the order of the prompts. Of each family's looped answers the first are kept, up to 5 %."""
    made = [Example(p.family, p.split, p.ids, *journal.answers[p.key]) for p in rendered]
    kept = []
    for family, count in summary.families.items():
        mine = [example for example in made if example.family == family]
        num_plain = sum(not example.looped for example in mine)
        room = num_plain * LOOPED_PERCENT // (100 - LOOPED_PERCENT)
        for example in mine:
            if example.looped and room == 0:
                if example.split == "heldout":
                    count.num_loops_dropped += 1
                    continue
                example = replace(example, answer_ids=example.answer_ids[: -answers.NGRAM], looped=False)
                count.num_loops_cut += 1
            room -= example.looped
            kept.append(example)
            side = count.splits.setdefault(example.split, Count())
            side.num_examples += 1
            side.num_prompt_tokens += len(example.prompt_ids)
            side.num_answer_tokens += len(example.answer_ids)
            side.num_looped += example.looped
    if not kept:
        raise ValueError(
            f"expected answers to train on, got none to {len(rendered)} prompts: all are held out and "
            "repeat themselves, or the prompts are too long; use another target or raise max_prompt_tokens"
        )
    return kept
