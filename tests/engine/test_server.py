"""A server as users run it: native and OpenAI endpoints, streaming, a frontend program, ends inside a block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from sglang_dflash import demo
from tests.engine import scripted
from tests.engine.serving import REQUEST_TIMEOUT_S, generate, serve
from tests.engine.setup import HAS_CUDA, NUM_NEW_TOKENS

pytestmark = pytest.mark.engine

END_OF_TEXT = 2  # of SmolLM2's chat format


@pytest.fixture(scope="module")
def url(
    models: demo.Models,
    prompt_ids: dict[str, list[int]],
    plain: dict[str, list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    scratch = tmp_path_factory.mktemp("server")
    env = scripted.environment(scratch / "script.json", prompt_ids, plain)
    # A pool that holds few of the long prompts, so that cached prefixes are evicted.
    arguments = {"max_total_tokens": 8192, "chunked_prefill_size": 128, "enable_return_hidden_states": True}
    with serve(models, scratch / "log", env, **arguments) as address:
        yield address


def test_our_worker_serves(url: str) -> None:
    state = requests.get(f"{url}/server_info", timeout=60).json()["internal_states"][0]
    assert state["speculative_worker"].startswith("sglang_dflash.worker.DFlashWorker")


def test_streaming_gives_the_same(url: str, prompt_ids: dict[str, list[int]], plain: dict[str, list[int]]) -> None:
    rid = "short-0"
    whole = generate(url, prompt_ids[rid], rid, NUM_NEW_TOKENS)
    if not HAS_CUDA:
        assert whole["output_ids"] == plain[rid]
    body = {
        "input_ids": prompt_ids[rid],
        "rid": f"{rid}@stream",
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True},
    }
    chunks = []
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=REQUEST_TIMEOUT_S) as response:
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[len(b"data: ") :]))
    assert len(chunks) > 1
    assert chunks[-1]["text"] == whole["text"]


def test_openai_chat_and_completions(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    arguments = {"model": "default", "temperature": 0, "max_tokens": 12}
    chat = client.chat.completions.create(messages=messages, **arguments)
    assert "Paris" in chat.choices[0].message.content
    pieces = client.chat.completions.create(messages=messages, stream=True, **arguments)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == chat.choices[0].message.content
    two = client.completions.create(prompt="The capital of France is", n=2, **arguments)
    assert len(two.choices) == 2
    assert two.choices[0].text == two.choices[1].text
    assert "Paris" in two.choices[0].text


def test_structured_answers_through_the_openai_api(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    schema = {
        "type": "object",
        "properties": {"town": {"type": "string", "maxLength": 12}, "kind": {"enum": ["capital", "village"]}},
        "required": ["town", "kind"],
        "additionalProperties": False,
    }
    chat = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What is the capital of France? Answer in JSON."}],
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "town", "schema": schema}},
    )
    answer = json.loads(chat.choices[0].message.content)
    assert answer.keys() == {"town", "kind"}
    assert answer["kind"] in ("capital", "village")


def test_frontend_program_with_fork(url: str) -> None:
    import sglang as sgl

    @sgl.function
    def two_facts(s: Any, place: str) -> None:
        s += sgl.user(f"Answer briefly. I ask about {place}.")
        s += sgl.assistant(sgl.gen("opening", max_tokens=8, temperature=0))
        branches = s.fork(2)
        for branch, question in zip(branches, ("Where is it?", "What language is spoken there?"), strict=True):
            branch += sgl.user(question)
            branch += sgl.assistant(sgl.gen("fact", max_tokens=10, temperature=0))
        branches.join()
        s += sgl.user("In short: " + " ".join(branch["fact"] for branch in branches))
        s += sgl.assistant(sgl.gen("closing", max_tokens=8, temperature=0))

    backend = sgl.RuntimeEndpoint(url)
    first = two_facts.run(place="France", backend=backend)
    again = two_facts.run(place="France", backend=backend)
    assert first["opening"]
    assert first["closing"]
    assert (first["opening"], first["closing"]) == (again["opening"], again["closing"])


def test_ends_inside_a_block(url: str, prompt_ids: dict[str, list[int]], plain: dict[str, list[int]]) -> None:
    if HAS_CUDA:
        pytest.skip("compares with plain decoding in float32")
    rid, tokens = next((rid, tokens) for rid, tokens in plain.items() if END_OF_TEXT in tokens[2:-2])
    answer = generate(url, prompt_ids[rid], f"{rid}@end", NUM_NEW_TOKENS, ignore_eos=False)
    assert answer["output_ids"] == tokens[: tokens.index(END_OF_TEXT) + 1]
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    for length in (1, 2, 9, 17, NUM_NEW_TOKENS):
        answer = generate(url, prompt_ids[rid], f"{rid}@{length}", length)
        assert answer["output_ids"] == tokens[:length]
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
    stop = tokens[2]
    stops: dict[str, Any] = {"stop_token_ids": [stop], "ignore_eos": False}
    answer = generate(url, prompt_ids[rid], f"{rid}@stop-token", NUM_NEW_TOKENS, **stops)
    assert answer["output_ids"] == tokens[: tokens.index(stop) + 1]
    whole = generate(url, prompt_ids[rid], f"{rid}@whole", NUM_NEW_TOKENS)["text"]
    word = whole.split()[3]
    answer = generate(url, prompt_ids[rid], f"{rid}@stop-text", NUM_NEW_TOKENS, stop=[word])
    assert answer["text"] == whole[: whole.index(word)]
