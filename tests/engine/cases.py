"""Random mixes of requests and options, as hypothesis strategies: ours owes plain decoding's answers to them.

A new option is one entry of GREEDY_OPTIONS (any request may have it) or of SAMPLED_OPTIONS (requests that draw).

What is kept out, because plain decoding itself would not give the same answer twice or would not survive:

- min_p with seeds ends SGLang's server (refused by ours).
- Repetition beside frequency or presence penalty in one request: SGLang applies its penalizers in the order of a set.
- Draws with and without filters in one batch: SGLang's sampler sorts the whole batch if anybody in it has a top_k or
  top_p (a greedy request has top_k 1), and the noise of a sorted row stands at other tokens. So the requests of a batch
  are all greedy, or draw without filters, or are greedy and filtered ones.
- A grammar with `ignore_eos`: SGLang's plain decoding says one token more after its end. A grammar with
  `min_new_tokens`, which may forbid the only token that the grammar allows: SGLang fails such a request.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from hypothesis import strategies as st

from tests.engine import tiny
from tests.engine.pairs import OURS
from tests.engine.processors import WatchOutput

VOCAB_SIZE = 295
MAX_NEW_TOKENS = 20
MAX_REQUESTS = 8
FIRST_TEXT_TOKEN = len(tiny.SPECIAL)
# Shared by many prompts of many cases: the radix cache has them, whole or in part. Longer than a chunk of prefill.
PREFIXES = [[random.Random(i).randrange(FIRST_TEXT_TOKEN, VOCAB_SIZE) for _ in range(100)] for i in range(3)]
TEXTS = ["a", "th", "e", "!", "the ", "\n", "0", '"', "true", "x", "@", "tr"]

PROCESSOR = WatchOutput.to_str()

tokens = st.integers(0, VOCAB_SIZE - 1)
penalty = st.floats(-2, 2, width=16)
fractions = st.floats(0.05, 0.99)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: `prompts` and their sampling parameters, all answered by the server `ours` beside plain decoding."""

    ours: str
    prompts: list[list[int]]
    sampling: list[dict[str, Any]]
    request: dict[str, Any]

    def body(self, rid: int) -> dict[str, Any]:
        rids = [f"{rid}-{i}" for i in range(len(self.prompts))]
        return {"input_ids": self.prompts, "sampling_params": self.sampling, "rid": rids, **self.request}


def mixes(entries: list[st.SearchStrategy[dict[str, Any]]]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of these options at once, few more often than many."""
    some = st.lists(st.sampled_from(range(len(entries))), max_size=4, unique=True)

    def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: value for part in parts for name, value in part.items()}

    return some.flatmap(lambda chosen: st.tuples(*(entries[i] for i in chosen)).map(lambda parts: merged(list(parts))))


GREEDY_OPTIONS: list[st.SearchStrategy[dict[str, Any]]] = [
    st.fixed_dictionaries(
        {"logit_bias": st.dictionaries(tokens.map(str), st.floats(-100, 6, width=16), min_size=1, max_size=3)}
    ),
    st.one_of(
        st.fixed_dictionaries({"frequency_penalty": penalty}, optional={"presence_penalty": penalty}),
        st.fixed_dictionaries({"presence_penalty": penalty}),
        st.fixed_dictionaries({"repetition_penalty": st.floats(0.125, 2, width=16)}),
    ),
    st.fixed_dictionaries({"min_new_tokens": st.integers(1, 8)}),
    # Many at once, or none would be hit.
    st.fixed_dictionaries({"stop_token_ids": st.lists(tokens, min_size=1, max_size=40, unique=True)}),
    st.fixed_dictionaries(
        {"stop": st.sampled_from(TEXTS).map(lambda text: [text])},
        optional={"no_stop_trim": st.booleans()},
    ),
    st.fixed_dictionaries({"stop_regex": st.sampled_from(["[0-9]", "t.", "[!?]"])}),
    st.fixed_dictionaries({"skip_special_tokens": st.booleans()}),
    st.one_of(
        st.fixed_dictionaries({"regex": st.sampled_from(["[a-z]{3}", "(ab|the |0[0-9]+)+", "true(, true)*"])}),
        st.fixed_dictionaries({"json_schema": st.sampled_from(['{"type": "object"}', '{"enum": ["abc", 12, true]}'])}),
        st.fixed_dictionaries({"ebnf": st.just('root ::= "a" root | "!"')}),
    ),
    st.fixed_dictionaries({"custom_params": st.fixed_dictionaries({"strength": st.floats(1, 20, width=16)})}),
]
SAMPLED_OPTIONS: list[st.SearchStrategy[dict[str, Any]]] = [
    st.fixed_dictionaries({"sampling_seed": st.integers(-(2**63), 2**63 - 1)}),
    st.fixed_dictionaries({"sampling_seed": st.integers(0, 3)}),
]
FILTERS = st.one_of(
    st.fixed_dictionaries({"top_k": st.integers(2, 60)}, optional={"top_p": fractions}),
    st.fixed_dictionaries({"top_p": fractions}),
)


@st.composite
def sampling_params(draw: st.DrawFn, mode: str) -> dict[str, Any]:
    """Of one request of a batch that is all "greedy", all "free" of filters, or "filtered" with greedy ones too."""
    params = {
        "max_new_tokens": draw(st.integers(0, MAX_NEW_TOKENS)),
        "ignore_eos": draw(st.booleans()),
        "temperature": 0,
        **draw(mixes(GREEDY_OPTIONS)),
    }
    if params.keys() & {"regex", "json_schema", "ebnf"}:
        params |= {"ignore_eos": False, "min_new_tokens": 0}
    params["min_new_tokens"] = min(params.get("min_new_tokens", 0), params["max_new_tokens"])
    if mode == "greedy" or (mode == "filtered" and draw(st.booleans())):
        return params
    params |= {"temperature": draw(st.floats(0.2, 1.5)), **draw(mixes(SAMPLED_OPTIONS))}
    return params | draw(FILTERS) if mode == "filtered" else params


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    own = random.Random(draw(st.integers(0, 9)))
    prefix = draw(st.sampled_from(PREFIXES))[: draw(st.sampled_from([0, 0, 1, 15, 16, 17, 33, 70, 100]))]
    return prefix + [own.randrange(FIRST_TEXT_TOKEN, VOCAB_SIZE) for _ in range(draw(st.integers(1, 20)))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ours = draw(st.sampled_from(list(OURS)))
    mode = draw(st.sampled_from(["greedy", "filtered", "free"]))
    num_answers = draw(st.sampled_from([1, 1, 1, 2, 3]))
    with_logprobs = draw(st.booleans())
    num_requests = draw(st.integers(1, MAX_REQUESTS if num_answers == 1 else MAX_REQUESTS // 2))
    asked = [draw(prompts()) for _ in range(num_requests)]
    sampling = [draw(sampling_params(mode)) for _ in range(num_requests)]
    if num_answers > 1:  # SGLang wants the same number of all requests of a call
        for params in sampling:
            params["n"] = num_answers
    processors = [PROCESSOR if "custom_params" in params else None for params in sampling]
    request: dict[str, Any] = {}
    # SGLang takes a request for no token as a prefill alone, without logprobs, only where it does not speculate.
    if with_logprobs and min(params["max_new_tokens"] for params in sampling) > 0:
        request = {"return_logprob": True, "top_logprobs_num": draw(st.integers(0, 3))}
        request["logprob_start_len"] = draw(st.sampled_from([-1, 0]))
        if num_answers == 1 and draw(st.booleans()):  # SGLang refuses the list for several answers
            request["token_ids_logprob"] = [[5, 60]] * num_requests
    if num_answers == 1 and any(processors):  # SGLang refuses a list for several answers
        request["custom_logit_processor"] = processors
    return Case(ours, asked, sampling, request)
