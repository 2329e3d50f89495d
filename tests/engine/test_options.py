"""Every field of SGLang's sampling parameters and of its generate request: served as by plain decoding, or refused.

A field is an entry of SAMPLING or REQUEST below, or of the lists of those that are not the worker's to serve; one that
a new version of SGLang adds is in none and fails `test_every_field_is_in_a_list`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import requests

from sglang_dflash.cpu import bootstrap
from tests.engine import tiny
from tests.engine.pairs import OURS, Pair, close, differences
from tests.engine.processors import WatchOutput
from tests.engine.setup import HAS_CUDA

if bootstrap.wanted():
    bootstrap.install()

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(HAS_CUDA, reason="compares float32 answers of the CPU engine"),
]


@dataclasses.dataclass(frozen=True)
class Served:
    """An option that ours serves.

    Attributes:
        sampling, request: the option itself.
        beside: sampling parameters that it needs to matter; the answers without the option have them too. (SGLang reads
            stop tokens only where it heeds the end of the text.)
        shows: the answers differ from those without the option.
    """

    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    request: dict[str, Any] = dataclasses.field(default_factory=dict)
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)
    shows: bool = True


@dataclasses.dataclass(frozen=True)
class Refused:
    """An option that is refused, by our worker (`by_name`) or by SGLang before it, in words that name `told`."""

    told: str
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    request: dict[str, Any] = dataclasses.field(default_factory=dict)
    by_name: bool = True


BASE: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
DRAWN = {"temperature": 1.0, "top_k": 200, "sampling_seed": 3}
ENDS = {"logit_bias": {str(tiny.EOS): 7.0}}
FREQUENT = "t"
# Printable text, so that stop strings and the text of a prompt stand for themselves.
TEXTS = ["the first", "true and the 12 others", '{"abc": 1200}', "in the end, it is an answer. Or is it?"]

SCHEMA = '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}'
TAG = '{"type": "structural_tag", "format": {"type": "regex", "pattern": "[a-f]{2,9}"}}'
PROCESSOR = WatchOutput.to_str()

SAMPLING: dict[str, Served | Refused] = {
    "max_new_tokens": Served({"max_new_tokens": 7}),
    "stop": Served({"stop": [FREQUENT]}),
    "stop_token_ids": Served({"stop_token_ids": list(range(40, 110))}, beside={"ignore_eos": False}),
    "stop_regex": Served({"stop_regex": "[a-z][A-Z!]"}),
    "temperature": Served({"temperature": 0.8}),
    "top_p": Served({"top_p": 0.7}, beside={"temperature": 1.0}),
    "top_k": Served({"top_k": 5}, beside={"temperature": 1.5}),
    # Without seeds: test_distribution.py, and test_sampling.py for filters that leave one token.
    "min_p": Refused("min_p with --enable-deterministic-inference", {"temperature": 1.0, "min_p": 0.2}),
    "frequency_penalty": Served({"frequency_penalty": 0.9}),
    "presence_penalty": Served({"presence_penalty": 1.5}),
    "repetition_penalty": Served({"repetition_penalty": 1.5}),
    "min_new_tokens": Served(
        {"min_new_tokens": 9}, beside={"stop_token_ids": list(range(40, 110)), "ignore_eos": False}
    ),
    "n": Served({"n": 3}),
    "beam_width": Served({"beam_width": 1}, shows=False),  # wider is refused by SGLang with any speculation
    # With ignore_eos plain decoding says one token more after a grammar's end.
    "json_schema": Served({"json_schema": SCHEMA}, beside={"ignore_eos": False}),
    "regex": Served({"regex": "(true|[0-9]{3}, )+"}, beside={"ignore_eos": False}),
    "ebnf": Served({"ebnf": 'root ::= ("ab" | "the " [0-9])+'}, beside={"ignore_eos": False}),
    "structural_tag": Served({"structural_tag": TAG}, beside={"ignore_eos": False, "logit_bias": {"79": 8.0}}),
    "ignore_eos": Served({"ignore_eos": False}, beside=ENDS),
    "skip_special_tokens": Served({"skip_special_tokens": False}, beside={"logit_bias": {"5": 10.0}}),
    "spaces_between_special_tokens": Served({"spaces_between_special_tokens": False}, shows=False),  # old tokenizers
    "no_stop_trim": Served({"no_stop_trim": True}, beside={"stop": [FREQUENT]}),
    "stream_interval": Served({"stream_interval": 3}, shows=False),
    "logit_bias": Served({"logit_bias": {"40": 4.0, "70": -100.0}}),
    "sampling_seed": Served({"sampling_seed": 12}, beside=DRAWN),
    "custom_params": Served({"custom_params": {"strength": 9.0}}, {"custom_logit_processor": [PROCESSOR] * len(TEXTS)}),
    "watermark": Refused("watermark", {"watermark": {"enabled": True}}, by_name=False),
}
# Filled in by SGLang.
INTERNAL_SAMPLING = {
    "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant",
}  # fmt: skip

LOGPROBS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
REQUEST: dict[str, Served | Refused] = {
    "text": Served(request={"text": TEXTS, "input_ids": None}, shows=False),  # the same prompts
    "input_ids": Served(request={"input_ids": [[40, 41, 42]] * len(TEXTS)}),
    "sampling_params": Served({"max_new_tokens": 3}),
    "watermark": Refused("watermark", request={"watermark": {"enabled": True}}, by_name=False),
    "rid": Served(request={"rid": [f"chosen-{i}" for i in range(len(TEXTS))]}, shows=False),
    "stream": Served(request={"stream": False}, shows=False),  # test_streams
    "return_logprob": Served(request={"return_logprob": True}),
    "logprob_start_len": Served(request={"return_logprob": True, "logprob_start_len": 2}),
    "top_logprobs_num": Served(request={"return_logprob": True, "top_logprobs_num": 4}),
    "token_ids_logprob": Served(request={"return_logprob": True, "token_ids_logprob": [[7, 50]] * len(TEXTS)}),
    "return_text_in_logprobs": Served(request={**LOGPROBS, "return_text_in_logprobs": True}),
    "return_flat_raw_top_logprobs": Served(request={**LOGPROBS, "return_flat_raw_top_logprobs": True}),
    "return_flat_raw_output_top_logprobs": Served(request={**LOGPROBS, "return_flat_raw_output_top_logprobs": True}),
    "return_prompt_token_ids": Served(request={"return_prompt_token_ids": True}),
    "session_id": Served(request={"session_id": "s"}, shows=False),
    "extra_key": Served(request={"extra_key": ["k"] * len(TEXTS)}, shows=False),
    "cache_salt": Served(request={"cache_salt": ["s"] * len(TEXTS)}, shows=False),
    "routing_key": Served(request={"routing_key": "k"}, shows=False),
    "require_reasoning": Served(request={"require_reasoning": True}, shows=False),  # counts its tokens
    "return_hidden_states": Refused("hidden", request={"return_hidden_states": True}, by_name=False),
    "return_sampling_mask": Refused("return_sampling_mask", request={"return_sampling_mask": [True] * len(TEXTS)}),
    "custom_logit_processor": Served(
        {"custom_params": {"strength": 30.0}}, {"custom_logit_processor": [PROCESSOR, None, PROCESSOR, None]}
    ),
    "lora_path": Refused("[Ll]o[Rr][Aa]", request={"lora_path": ["adapter"] * len(TEXTS)}, by_name=False),
}
# Fields that no request over HTTP can use with these models, or that say nothing of the answer.
NOT_HERE = {
    # Of targets that read images, sound and video, that embed or score, or that share experts.
    "image_data", "video_data", "audio_data", "mm_hashes", "mm_content_hashes", "use_audio_in_video", "video_config",
    "modalities", "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch",
    "images_config", "mm_processor_kwargs", "need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls",
    "multi_item_delimiter_indices", "token_indices_to_pool", "return_routed_experts", "routed_experts_start_len",
    "return_indexer_topk", "return_bytes", "max_thinking_tokens",
    # SGLang wants its prefix cache off for them.
    "input_embeds", "positional_embed_overrides",
    # Where a request runs, which server's it is and who may look at it.
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size", "routed_dp_rank",
    "data_parallel_rank", "disagg_prefill_dp_rank", "http_worker_ipc", "background", "conversation_id", "priority",
    "no_logs", "log_metrics", "custom_labels", "external_trace_header", "received_time", "kv_hints", "lora_id",
    "session_params",
    # Of a mask, which is refused; of the form of other fields; of a request that asks for entropy, which no answer has.
    "sampling_logprobs_mode", "return_flat_raw_top_logprobs_b64", "return_entropy",
}  # fmt: skip

_seeds = itertools.count(10**6)
# What no two answers share, and what only speculation has.
VOLATILE = re.compile(
    "id|.*latency.*|spec_.*|num_retractions|cached_tokens.*|.*_time|.*_ts|weight_version|.*throughput.*"
)


def test_every_field_is_in_a_list() -> None:
    assert {field.name for field in msgspec.structs.fields(SamplingParams)} == SAMPLING.keys() | INTERNAL_SAMPLING
    assert {field.name for field in dataclasses.fields(GenerateReqInput)} == REQUEST.keys() | NOT_HERE
    assert not SAMPLING.keys() & INTERNAL_SAMPLING
    assert not REQUEST.keys() & NOT_HERE


@pytest.fixture(scope="module")
def prompt_ids(tiny_models: Any) -> list[list[int]]:
    tokenizer = tiny.byte_tokenizer()
    return [tokenizer(text).input_ids for text in TEXTS]


def body(prompts: list[list[int]], sampling: dict[str, Any], request: dict[str, Any], seed: int) -> dict[str, Any]:
    rids = [f"{seed}-{i}" for i in range(len(prompts))]
    return {"input_ids": prompts, "rid": rids, "sampling_params": {**BASE, **sampling}, **request}


def whole(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers without what is another in every run."""
    kept = []
    for answer in answers:
        meta = {name: value for name, value in answer["meta_info"].items() if not VOLATILE.fullmatch(name)}
        kept.append({**answer, "meta_info": meta})
    return kept


def served(table: dict[str, Served | Refused]) -> list[Any]:
    return [pytest.param(option, id=name) for name, option in table.items() if isinstance(option, Served)]


def refused(table: dict[str, Served | Refused]) -> list[Any]:
    return [pytest.param(option, id=name) for name, option in table.items() if isinstance(option, Refused)]


@pytest.mark.parametrize("option", [*served(SAMPLING), *served(REQUEST)])
def test_served_as_by_plain_decoding(pair: Pair, prompt_ids: list[list[int]], option: Served) -> None:
    for name in OURS:
        seed = next(_seeds)
        asked = body(prompt_ids, {**option.beside, **option.sampling}, option.request, seed)
        expected, got = pair.ask(name, asked, seed)
        assert not differences(expected, got)
        assert close(whole(expected), whole(got))
    without = pair.plain.ask(body(prompt_ids, option.beside, {}, seed))
    assert close(whole(without), whole(expected)) != option.shows, "the option matters"


@pytest.mark.parametrize("option", [*refused(SAMPLING), *refused(REQUEST)])
def test_refused_and_the_server_lives(pair: Pair, prompt_ids: list[list[int]], option: Refused) -> None:
    server = pair.ours["w16-page1-overlap"]
    response = server.post(body(prompt_ids, option.sampling, option.request, next(_seeds)))
    assert response.status_code == 400, response.text
    assert re.search(option.told, response.text), response.text
    assert ("sglang-dflash" in response.text) == option.by_name, response.text
    asked = body(prompt_ids, {}, {}, next(_seeds))
    assert not differences(pair.plain.ask(asked), server.ask(asked))


def test_streams(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """What a stream tells last is the whole answer, and what it tells before grows into it."""
    server = pair.ours["w5-page16-sync-retracting"]
    asked = {"input_ids": prompt_ids[2], "sampling_params": BASE, "return_logprob": True}
    expected = pair.plain.ask(asked)
    told = []
    with requests.post(f"{server.url}/generate", json={**asked, "stream": True}, stream=True, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                told.append(msgspec.json.decode(line.removeprefix(b"data: ")))
    assert len(told) > 1
    assert not differences(expected, told[-1:])
    assert all(expected[0]["text"].startswith(part["text"]) for part in told[:-1])


@pytest.mark.parametrize("kind", ["two strings", "string and token"])
def test_of_two_ends_in_a_block_the_first_counts(pair: Pair, prompt_ids: list[list[int]], kind: str) -> None:
    """SGLang's own `Req.update_finish_state` takes stop strings in their order, then tokens, wherever they stand."""
    [answer] = pair.plain.ask(body(prompt_ids[:1], {}, {}, next(_seeds)))
    letters = [tiny.byte_tokenizer().decode([token]) for token in answer["output_ids"]]
    first = next(i for i in range(2, 20) if not {letters[i], letters[i + 1]} & {*"".join(letters[:i])})
    ends: dict[str, Any] = {"stop": [letters[first + 1], letters[first]]}
    if kind == "string and token":
        ends = {"stop": [letters[first + 1]], "stop_token_ids": [answer["output_ids"][first]], "ignore_eos": False}
    for _ in range(20):  # until one round accepts both
        seed = next(_seeds)
        expected, got = pair.ask("w16-page1-overlap", body(prompt_ids[:1], ends, {}, seed), seed)
        assert not differences(expected, got)
