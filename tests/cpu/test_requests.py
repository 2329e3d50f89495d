"""Which request options are served: every one that SGLang knows is refused by name or known to be harmless."""

from __future__ import annotations

import inspect
import re
from array import array
from typing import Any

import msgspec
import pytest

from sglang_dflash import __version__
from sglang_dflash.cpu import bootstrap
from sglang_dflash.host import requests

if bootstrap.wanted():
    bootstrap.install()

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

# Sampling parameter, values that are refused, and what the refusal calls it.
REFUSED_SAMPLING: dict[str, list[tuple[Any, str]]] = {
    "watermark": [({"enabled": True}, "watermark")],
}

# Sampling parameters that the worker serves, or that SGLang does outside the worker.
SERVED_SAMPLING = {
    # How the target's token is chosen after each token of a block: `host.sampling`.
    "temperature", "top_k", "top_p", "min_p", "sampling_seed", "logit_bias",
    # In the logits before that: `host.penalties`.
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens",
    # Masks after those: `host.grammar`.
    "json_schema", "regex", "ebnf", "structural_tag",
    # Ends and cuts: SGLang reads the committed tokens one by one.
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "ignore_eos", "no_stop_trim",
    # Text and stream.
    "skip_special_tokens", "spaces_between_special_tokens", "stream_interval",
    # n answers are n requests. SGLang itself refuses a beam wider than 1 with speculative decoding.
    "n", "beam_width",
    # Read by custom logit processors (`host.processors`) and by reasoning grammars.
    "custom_params",
    # Filled in by SGLang.
    "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant",
}  # fmt: skip

# Of the request: values that are refused.
REFUSED_REQUEST: dict[str, list[Any]] = {
    "return_hidden_states": [True, "last"],
    "return_sampling_mask": [True],
    "lora_id": ["adapter"],
    "positional_embed_overrides": [object()],
}

# Fields of the scheduler's request that the worker serves, or that leave the committed tokens alone.
HARMLESS_REQUEST = {
    # The prompt. Embeddings and media reach the target alone; the drafter reads the target's features.
    "input_text", "input_ids", "input_embeds", "mm_inputs", "token_type_ids", "session_id", "session_params",
    # Logprobs: `host.rounds.result`.
    "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_flat_raw_top_logprobs",
    "sampling_logprobs_mode", "return_entropy",
    # What the target's forward records by cache slot, handed on as it is.
    "return_routed_experts", "routed_experts_start_len", "return_indexer_topk",
    # `host.processors`.
    "custom_logit_processor",
    # Scoring, of a prefill's logprobs.
    "multi_item_delimiter_indices", "token_indices_to_pool",
    # Counts the reasoning's tokens; the grammar that strict thinking adds is left to stock (see arguments).
    "require_reasoning",
    # Who asked, where it runs, how it is cached, how it is told.
    "rid", "http_worker_ipc", "stream", "priority", "extra_key", "cache_salt", "routing_key", "no_logs", "time_stats",
    "return_bytes", "kv_hints", "lora_name", "pp_prefetch_ticketed", "routed_dp_rank",
    # Disaggregation and external encoders.
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
    "disagg_prefill_dp_rank", "need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls",
    "sampling_params",
}  # fmt: skip


class Tokenizer:
    """What SamplingParams.normalize asks of one."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def request(sampling: dict[str, Any], **options: Any) -> Req:
    params = SamplingParams(**{"temperature": 0} | sampling)
    params.verify(vocab_size=100)
    params.normalize(Tokenizer())
    return Req("r", "", array("q", [1, 2]), params, **options)


def fields(kind: type) -> set[str]:
    return {field.name for field in msgspec.structs.fields(kind)}


def test_every_sampling_parameter_is_known() -> None:
    assert fields(SamplingParams) == REFUSED_SAMPLING.keys() | SERVED_SAMPLING
    assert not REFUSED_SAMPLING.keys() & SERVED_SAMPLING


def test_every_field_of_a_request_is_known() -> None:
    assert fields(TokenizedGenerateReqInput) == REFUSED_REQUEST.keys() | HARMLESS_REQUEST
    assert not REFUSED_REQUEST.keys() & HARMLESS_REQUEST
    assert REFUSED_REQUEST.keys() <= inspect.signature(Req).parameters.keys()


def test_a_plain_greedy_request_passes() -> None:
    assert requests.refusal(request({}), seeded=False, grammar_backend=None) is None
    assert requests.refusal(request({"temperature": 1e-7}), seeded=False, grammar_backend=None) is None


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": None, "ignore_eos": True},
        {"stop": ["\n", "END"], "no_stop_trim": True},
        {"stop_regex": "[.!]", "stop_token_ids": [3]},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False, "stream_interval": 8},
        {"temperature": 1.0},
        {"temperature": 0.3, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "sampling_seed": 7},
        {"temperature": 2.0, "logit_bias": {"5": 1.0}},
        {"n": 4},
        {"custom_params": {"name": "value"}},
        {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.2},
        # Given, but meaning nothing.
        {"frequency_penalty": None, "presence_penalty": 0, "repetition_penalty": 1, "min_new_tokens": 0},
        {"json_schema": "", "regex": None, "logit_bias": {}, "watermark": None},
        {"json_schema": '{"type": "object"}'},
        {"regex": "[0-9]+"},
        {"ebnf": 'root ::= "a"'},
        {"structural_tag": "{}"},
    ],
)
def test_served_sampling_parameters_pass(sampling: dict[str, Any]) -> None:
    assert requests.refusal(request(sampling), seeded=False, grammar_backend=None) is None


@pytest.mark.parametrize(
    "options",
    [
        {"input_embeds": [[0.0]], "stream": True, "priority": 3, "extra_key": "k", "cache_salt": "s"},
        {"return_routed_experts": True, "return_indexer_topk": True, "require_reasoning": True},
        {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [1]},
    ],
)
def test_harmless_fields_pass(options: dict[str, Any]) -> None:
    assert requests.refusal(request({}, **options), seeded=False, grammar_backend=None) is None


def named(refusal: str | None) -> str:
    """The options that a refusal names, out of its sentence."""
    assert refusal is not None
    match = re.fullmatch(rf"sglang-dflash {re.escape(__version__)} cannot serve (.+)\. Leave it out\.", refusal)
    assert match is not None, refusal
    return match[1]


@pytest.mark.parametrize(
    ("name", "value", "told"), [(name, *case) for name, cases in REFUSED_SAMPLING.items() for case in cases]
)
def test_each_refused_sampling_parameter_is_named(name: str, value: Any, told: str) -> None:
    assert named(requests.refusal(request({name: value}), seeded=False, grammar_backend=None)) == told


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED_REQUEST.items() for value in values]
)
def test_each_refused_field_is_named(name: str, value: Any) -> None:
    assert named(requests.refusal(request({}, **{name: value}), seeded=False, grammar_backend=None)) == name


def test_min_p_with_seeds_is_refused_and_taken_out() -> None:
    """SGLang prefills a refused request too, and its sampler would fail an assertion over it."""
    req = request({"temperature": 1.0, "min_p": 0.2})
    assert (
        named(requests.refusal(req, seeded=True, grammar_backend=None)) == "min_p with --enable-deterministic-inference"
    )
    assert req.sampling_params.min_p == 0
    assert requests.refusal(request({"temperature": 1.0, "top_p": 0.2}), seeded=True, grammar_backend=None) is None


def test_min_new_tokens_is_refused_without_a_tokenizer_and_taken_out() -> None:
    req = request({"min_new_tokens": 3})
    assert named(requests.refusal(req, seeded=False, grammar_backend=None)) == "min_new_tokens without a tokenizer"
    assert req.sampling_params.min_new_tokens == 0
    req = request({"min_new_tokens": 3})
    req.tokenizer = Tokenizer()
    assert requests.refusal(req, seeded=False, grammar_backend=None) is None


def test_all_refused_options_are_named_at_once() -> None:
    sampling = {"temperature": 0.5, "frequency_penalty": 1.0, "watermark": {"enabled": True}}  # the last is not served
    refusal = named(
        requests.refusal(request(sampling, return_hidden_states=True, lora_id="a"), seeded=False, grammar_backend=None)
    )
    assert refusal == "watermark, return_hidden_states, lora_id"


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", None])
def test_grammars_are_served_by_backends_that_can_take_tokens_back(backend: str | None) -> None:
    assert requests.refusal(request({"regex": "a"}), seeded=False, grammar_backend=backend) is None


def test_grammars_of_outlines_are_refused() -> None:
    """Its grammars cannot be taken back over a rejected draft: the walk along a block would end the scheduler."""
    refusal = requests.refusal(request({"ebnf": 'root ::= "a"'}), seeded=False, grammar_backend="outlines")
    assert named(refusal) == "ebnf with --grammar-backend outlines"
    assert requests.refusal(request({}), seeded=False, grammar_backend="outlines") is None
