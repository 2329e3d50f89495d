"""Answers of the target, generated in this process, batch by batch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dflash.train import static_decode

NGRAM = 32  # tokens: a run of so many that comes twice is a loop
CHECK_EVERY = 16  # steps between two looks whether all rows have ended: on a GPU each look waits for it
NO_TOKEN = -1


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the likeliest at temperature 0, else one drawn from those that are at least `min_p` times
    as likely as the likeliest. (A top_p would have to sort the vocabulary.)
    """

    temperature: float = 0.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 <= self.min_p <= 1:
            raise ValueError(
                "expected a temperature of at least 0 and a min_p in [0, 1], got "
                f"{self.temperature} and {self.min_p}; correct them"
            )


GREEDY = Sampling()


@dataclass(frozen=True)
class Progress:
    """How far generation has come."""

    stage: str
    done: int  # prompts
    total: int
    num_tokens: int  # generated
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Answer:
    index: int  # of its prompt
    ids: list[int]  # the stop token that ended it included


def stop_ids_of(model: Any, tokenizer: Any = None) -> set[int]:
    """The tokens that end an answer: the generation settings', or the model's, and the tokenizer's end of sequence."""
    stops = getattr(model.generation_config, "eos_token_id", None)
    stops = model.config.eos_token_id if stops is None else stops
    found = {stops} if isinstance(stops, int) else set(stops or ())
    return found | {token for token in [getattr(tokenizer, "eos_token_id", None)] if token is not None}


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    stop_ids: Collection[int],
    sampling: Sampling = GREEDY,
    first_batch: int = 0,
    stage: str = "answers",
    progress: Callable[[Progress], None] | None = None,
) -> Iterator[list[Answer]]:
    """Answer every prompt (token ids, one at least), the longest first; yields the answers of one batch after another.

    `first_batch` counts batches of an earlier call with the same sampling: what is drawn depends on the seed and on
    the batch's number, so that the call goes on where the other one stopped.

    Raises:
        ValueError: the target cannot be decoded here, prompt and answer are longer than its context, or memory ran out.
    """
    if max_new_tokens < 1 or batch_size < 1:
        raise ValueError(
            f"expected max_new_tokens and batch_size of at least 1, got {max_new_tokens} and {batch_size}; raise them"
        )
    if not prompts:
        return
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    longest = len(prompts[order[0]])
    assert len(prompts[order[-1]]) > 0, "a prompt without tokens"
    static_decode.check_length(model, longest + max_new_tokens)
    batch_size = min(batch_size, len(prompts))
    try:
        decoder = static_decode.Decoder(model, batch_size, longest, max_new_tokens)
        start, num_tokens = time.perf_counter(), 0
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            generator = _generator(model.device, sampling.seed, first_batch + first // batch_size)
            with torch.inference_mode(), static_decode.static_attention(model):
                texts = _run(decoder, [prompts[i] for i in rows], max_new_tokens, stop_ids, sampling, generator)
            num_tokens += sum(map(len, texts))
            if progress is not None:
                done = first + len(rows)
                progress(Progress(stage, done, len(order), num_tokens, time.perf_counter() - start))
            yield [Answer(i, text) for i, text in zip(rows, texts)]
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"expected memory for batches of {batch_size} with up to {longest} prompt and {max_new_tokens} new tokens, "
            f"got an out-of-memory error; lower batch_size (now {batch_size}) or max_new_tokens (now {max_new_tokens})"
        ) from error


def _generator(device: torch.device, seed: int, batch: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{batch}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))


def _run(
    decoder: static_decode.Decoder,
    prompts: list[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling,
    generator: torch.Generator,
) -> list[list[int]]:
    """One batch: until every row has ended, or `max_new_tokens`. A row that ended goes on unseen."""
    device, num_rows = decoder.device, decoder.batch_size
    stop_T = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
    tokens_BN = torch.full((num_rows, max_new_tokens), NO_TOKEN, device=device)
    ended_B = torch.arange(num_rows, device=device) >= len(prompts)
    check_every = CHECK_EVERY if device.type == "cuda" else 1
    logits_BV = decoder.prefill(prompts)
    for step in range(max_new_tokens):
        chosen_B = choose(logits_BV, sampling, generator)
        tokens_BN[:, step] = torch.where(ended_B, NO_TOKEN, chosen_B)
        ended_B = ended_B | torch.isin(chosen_B, stop_T)
        if step + 1 == max_new_tokens or (step % check_every == 0 and bool(ended_B.all())):
            break
        logits_BV = decoder.step(chosen_B)
    return [[token for token in row if token != NO_TOKEN] for row in tokens_BN[: len(prompts)].tolist()]


def choose(logits_BV: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """The next token of each row, int64 (B,).

    A draw is the argmax of p / e with e exponential (the Gumbel-max trick): no host decides anything.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    probs_BV = torch.softmax(logits_BV.float() / sampling.temperature, dim=-1)
    probs_BV.masked_fill_(probs_BV < sampling.min_p * probs_BV.amax(dim=-1, keepdim=True), 0.0)
    noise_BV = torch.empty_like(probs_BV).exponential_(generator=generator).clamp_(min=torch.finfo(torch.float32).tiny)
    return (probs_BV / noise_BV).argmax(dim=-1)


def cut_loop(ids: list[int], ngram: int = NGRAM) -> tuple[list[int], bool]:
    """The answer up to the end of the first run of `ngram` tokens that came before, and whether there was one.

    Without that run, its last `ngram` tokens, the answer has no loop.
    """
    seen = set()
    for end in range(ngram, len(ids) + 1):
        run = tuple(ids[end - ngram : end])
        if run in seen:
            return ids[:end], True
        seen.add(run)
    return ids, False
