"""The first end of a round counts, whatever its kind and its place in the request's lists."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.cpu import bootstrap
from sglang_dflash.host import ends

if bootstrap.wanted():
    bootstrap.install()

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams

# One token a letter: token 0 is "a".
LETTERS = "abcdefghijklmnop"


class Tokenizer:
    eos_token_id, additional_stop_token_ids = 15, None

    def decode(self, ids: Any) -> str:
        return "".join(LETTERS[i] for i in ids)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [LETTERS.index(letter) for letter in text]


def ids(text: str) -> list[int]:
    return Tokenizer().encode(text)


def request(said: str, **options: Any) -> Req:
    params = SamplingParams(**{"max_new_tokens": 50} | options)
    params.normalize(Tokenizer())
    req = Req("r", "", array("q", [1]), params, eos_token_ids=set(), vocab_size=len(LETTERS))
    req.tokenizer = Tokenizer()
    req.output_ids = array("q", ids(said))
    return req


def step_by_step(req: Req, new: str) -> int | None:
    """Where plain decoding ends, in tokens of the output."""
    for token in ids(new):
        req.output_ids.append(token)
        req.update_finish_state(1)
        if req.finished():
            return len(req.output_ids_through_stop)
    return None


@pytest.mark.parametrize(
    ("options", "new"),
    [
        ({"stop": ["e", "c"]}, "bcde"),
        ({"stop": ["e"], "stop_token_ids": ids("c")}, "bcde"),
        ({"stop": ["de"], "stop_regex": "[bc]"}, "bcde"),
        ({"stop": ["cd", "bcd"]}, "bcde"),
        ({"stop": ["abc"]}, "bcde"),  # begins before the round
        ({"stop": ["o"]}, "bcde"),
        ({"stop": ["e"], "max_new_tokens": 3}, "bcde"),
        ({"stop": ["e"], "max_new_tokens": 5}, "bcde"),
        ({"stop": ["d"], "ignore_eos": True, "stop_token_ids": ids("c")}, "bcde"),
        ({"stop": ["e"]}, "bpe"),  # p is the end of the text
        ({"stop_token_ids": ids("c")}, "bcde"),
        ({}, "bcde"),
    ],
    ids=str,
)
def test_a_round_ends_where_token_by_token_does(options: dict[str, Any], new: str) -> None:
    plain, ours = request("a", **options), request("a", **options)
    expected = step_by_step(plain, new)
    ours.output_ids.extend(ids(new))
    ends.update_finish_state(Req.update_finish_state, ours, len(new))
    assert ours.finished() == (expected is not None)
    if expected is None:
        return
    assert len(ours.output_ids_through_stop) == expected
    assert type(ours.finished_reason) is type(plain.finished_reason)
    assert ours.finished_reason.to_json() == plain.finished_reason.to_json()
    assert ours.output_ids.tolist() == ids("a" + new), "the tokens themselves stay"


def test_sglangs_own_way_takes_a_later_end() -> None:
    """What this is for; where it passes no more, SGLang has mended it."""
    req = request("a", stop=["e", "c"])
    req.output_ids.extend(ids("bcde"))
    Req.update_finish_state(req, 4)
    assert len(req.output_ids_through_stop) == 5


def test_a_grammar_that_ended_with_the_round_ends_it_there() -> None:
    req = request("a", stop=["o"])
    req.grammar = SimpleNamespace(is_terminated=lambda: True)
    req.output_ids.extend(ids("bcd"))
    ends.update_finish_state(Req.update_finish_state, req, 3)
    assert req.finished()
    assert len(req.output_ids_through_stop) == 4
    assert req.grammar is not None


def test_a_request_that_was_ended_from_outside_stays_so() -> None:
    req = request("a", stop=["b"])
    req.to_finish = FINISH_LENGTH(length=1)
    req.output_ids.extend(ids("bcd"))
    ends.update_finish_state(Req.update_finish_state, req, 3)
    assert isinstance(req.finished_reason, FINISH_LENGTH)
    assert req.finished_len is None


def test_a_token_that_is_none_ends_the_request_as_sglang_has_it() -> None:
    req = request("a", stop=["o"], stop_token_ids=ids("p"), ignore_eos=True)
    req.output_ids.extend([1, len(LETTERS) + 7, 2])
    ends.update_finish_state(Req.update_finish_state, req, 3)
    assert req.finished_reason.to_json()["matched"] == "NaN happened"
    assert req.finished_len == 3
