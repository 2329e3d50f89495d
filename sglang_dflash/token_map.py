"""`sglang-dflash token-map`: the tokens that a target says most, for a drafter that scores no others.

The file is what SGLang's --speculative-token-map names for its own drafters: token ids, saved by torch. Ours are
sorted by how often the target said them. Verification keeps the answers; a token outside the map is never drafted, so
the map's coverage of held-out answers bounds what is drafted right.
"""

from __future__ import annotations

import argparse
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang_dflash.train.dataset import Example

_FLAG = "--speculative-token-map"
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def load(path: str | Path, vocab_size: int) -> torch.Tensor:
    """The file's token ids, int64 (S), in its order.

    Raises:
        ValueError: no such file, or one that does not hold distinct ids of the vocabulary in one list or tensor.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{_FLAG}: expected a file, got {path}, which is none; make one with: sglang-dflash token-map")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        tokens_S = torch.as_tensor(saved)
    except (pickle.UnpicklingError, RuntimeError, LookupError, TypeError, ValueError, EOFError) as error:
        raise ValueError(f"{_FLAG} {path}: expected token ids saved by torch, got {error!r}; make it anew") from error
    if problem := _problem(tokens_S, vocab_size):
        raise ValueError(f"{_FLAG} {path}: {problem}")
    return tokens_S.to(torch.int64)


def _problem(tokens_S: torch.Tensor, vocab_size: int) -> str | None:
    """What of the ids a drafter cannot use, None where it can."""
    if tokens_S.ndim != 1:
        return f"expected one list of token ids, got the shape {list(tokens_S.shape)}; flatten it"
    if not len(tokens_S):
        return "expected token ids, got none; make it anew"
    if tokens_S.dtype not in _INTEGERS:
        return f"expected integers, got {tokens_S.dtype}; save the ids as int64"
    if outside := [token for token in tokens_S.tolist() if not 0 <= token < vocab_size]:
        return f"expected ids below the target's vocabulary of {vocab_size}, got {outside[0]}; make this target's map"
    token, count = Counter(tokens_S.tolist()).most_common(1)[0]
    return None if count == 1 else f"expected each token once, got {token} {count} times; leave the repeats out"


def main(argv: Sequence[str]) -> int:
    """Count, write the map, print its coverage; 0.

    Raises ValueError for a mistake of the user's.
    """
    from sglang_dflash.train import dataset, engine_evaluation

    parser = argparse.ArgumentParser(prog="sglang-dflash token-map", description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="what `train data` wrote: answers to train on count")
    parser.add_argument("--target", type=Path, required=True, help="directory of the target that gave the answers")
    parser.add_argument("--size", type=int, required=True, metavar="S", help="tokens of the map")
    parser.add_argument("--out", type=Path, required=True, help=f"file to write, for {_FLAG}")
    parser.add_argument("--heldout", type=Path, help="a data file, --data too: coverage of its held-out answers")
    args = parser.parse_args(argv)
    heldout = None if args.heldout is None else engine_evaluation.heldout_by_family(args.heldout)
    counts = _counts(example for example in dataset.read(args.data) if example.split == "train")
    if not counts:
        raise ValueError(f"{args.data}: expected answers to train on, got held-out ones alone; make more data")
    vocab_size, special = _vocabulary(args.target)
    if max(counts) >= vocab_size:
        raise ValueError(
            f"{args.data}: expected ids below the target's vocabulary of {vocab_size}, got {max(counts)}; name the "
            "target that gave the answers"
        )
    tokens = choose(counts, args.size, special)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tokens, args.out)
    if len(tokens) < args.size:
        print(f"{args.data}: expected {args.size} different tokens, got {len(tokens)}; the map holds these")
    print(f"{args.out}: {len(tokens)} of {vocab_size} tokens")
    print(f"coverage of the answers that were counted: {_covered(counts, tokens)}")
    if heldout is not None:
        others = _counts(example for family in heldout.values() for example in family)
        print(f"coverage of held-out answers: {_covered(others, tokens)}")
    return 0


def choose(counts: Counter[int], size: int, special: Iterable[int]) -> list[int]:
    """The `size` most frequent tokens, `special` ones that were counted first among them; sorted by count, then by id.

    Raises:
        ValueError: a size below 1, or one that the special tokens alone exceed.
    """
    kept = set(special) & counts.keys()
    if size < (least := max(1, len(kept))):
        raise ValueError(
            f"--size: expected at least {least}, room for the special tokens in the answers, got {size}; raise it"
        )
    by_count = sorted(counts, key=lambda token: (-counts[token], token))
    others = [token for token in by_count if token not in kept][: size - len(kept)]
    chosen = kept.union(others)
    return [token for token in by_count if token in chosen]


def _counts(examples: Iterable[Example]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.answer_ids)
    return counts


def _covered(counts: Counter[int], tokens: Sequence[int]) -> str:
    total = counts.total()
    return f"{sum(counts[token] for token in tokens) / total:.2%} of {total} tokens"


def _vocabulary(target: Path) -> tuple[int, set[int]]:
    """The size of a target's vocabulary, and its special tokens, those that end an answer among them."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from sglang_dflash.train import answers

    if not (target / "config.json").is_file():
        raise ValueError(f"--target: expected a model's directory, got {target}; correct it")
    config, tokenizer = AutoConfig.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    has_settings = (target / "generation_config.json").is_file()
    generation_config = GenerationConfig.from_pretrained(target) if has_settings else None
    model = SimpleNamespace(config=config, generation_config=generation_config)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return int(config.get_text_config().vocab_size), special | answers.stop_ids_of(model, tokenizer)
