"""Plain decoding on the CPU engine against Transformers: the ground that the speculative tests stand on.

Greedy output equals Transformers' `generate` if each token is the argmax after the tokens before it, so one forward of
Transformers over prompt and answer checks a whole answer. Where float32 leaves two tokens closer than ROUNDING logits,
either is right.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_dflash import cpu, demo
from sglang_dflash.cpu import bootstrap
from tests.engine.setup import FULL

if bootstrap.wanted():
    bootstrap.install()

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not bootstrap.wanted(), reason="a GPU is here: SGLang needs no CPU engine"),
]

NUM_NEW_TOKENS = 12
ROUNDING = {"float32": 2e-3, "bfloat16": 0.5}  # logits
# What the modes share is small; each differs from the others in every option that changes the path through the pools.
ENGINES: dict[str, dict[str, Any]] = {
    "float32-page1-radix": {"dtype": "float32", "page_size": 1, "chunked_prefill_size": 128},
    "float32-page16-no-radix": {
        "dtype": "float32", "page_size": 16, "chunked_prefill_size": 128, "disable_radix_cache": True,
    },
}  # fmt: skip
if FULL:
    ENGINES["bfloat16-page16-radix"] = {"dtype": "bfloat16", "page_size": 16}
DOCUMENT = " ".join(f"Item {i}: {i} times {i + 3} is {i * (i + 3)}." for i in range(1, 58))
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Nenne drei deutsche Flüsse.",
    f"{DOCUMENT} What is the first item?",
    f"{DOCUMENT} How many items are there?",
)


@pytest.fixture(scope="module")
def model() -> str:
    return str(demo.prepare_target())


@pytest.fixture(scope="module")
def oracle(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(model: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            for chat in chats]  # fmt: skip


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(request: pytest.FixtureRequest, model: str) -> Iterator[Any]:
    import sglang

    options = {"max_total_tokens": 8192, "max_running_requests": 8, **cpu.engine_arguments(), **ENGINES[request.param]}
    started = sglang.Engine(model_path=model, random_seed=0, **options)
    started.options = ENGINES[request.param]
    yield started
    started.shutdown()


def generate(engine: Any, prompts: list[list[int]], **sampling: Any) -> list[dict[str, Any]]:
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_NEW_TOKENS, **sampling}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    assert all(len(output["output_ids"]) > 0 for output in outputs)
    return outputs


@functools.cache
@torch.no_grad()
def oracle_logits(oracle: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
    """Float32 (len(answer), vocabulary): row j scores the answer's token j."""
    rows = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return oracle(torch.tensor([prompt + answer]), logits_to_keep=rows).logits[0]


def assert_greedy(oracle: Any, prompts: list[list[int]], outputs: list[dict[str, Any]], dtype: str) -> None:
    for prompt, output in zip(prompts, outputs):
        answer = torch.tensor(output["output_ids"])
        logits = oracle_logits(oracle, tuple(prompt), tuple(output["output_ids"]))
        chosen = logits.gather(1, answer[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < ROUNDING[dtype]
        logprobs = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
        expected = logits.log_softmax(1).gather(1, answer[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, atol=ROUNDING[dtype], rtol=0)


def test_greedy_equals_transformers(engine, oracle, prompts):
    """Several at once, short and over 1,000 tokens; then one alone, which a radix cache serves from its pages."""
    assert max(map(len, prompts)) > 1000
    dtype = engine.options["dtype"]
    together = generate(engine, prompts)
    assert_greedy(oracle, prompts, together, dtype)
    radix = not engine.options.get("disable_radix_cache", False)
    (alone,) = generate(engine, prompts[-1:])
    assert (alone["meta_info"]["cached_tokens"] >= 1000) == radix
    assert_greedy(oracle, prompts[-1:], [alone], dtype)
    if dtype == "float32":
        assert alone["output_ids"] == together[-1]["output_ids"]


@pytest.mark.parametrize("engine", ["float32-page1-radix"], indirect=True)
def test_sampling_options(engine, oracle, prompts):
    """Penalties move the logits and a filtered distribution is drawn from: both run on PyTorch here."""
    prompt = prompts[1]
    (penalized,) = generate(engine, [prompt], frequency_penalty=2.0, max_new_tokens=40)
    counts = torch.zeros(oracle.config.vocab_size)
    logits = oracle_logits(oracle, tuple(prompt), tuple(penalized["output_ids"]))
    moved = 0
    for row, token in zip(logits, penalized["output_ids"]):
        scores = row - 2.0 * counts
        assert scores.max() - scores[token] < ROUNDING["float32"]
        moved += int(row.argmax()) != token
        counts[token] += 1
    assert moved > 0
    drawn = generate(engine, [prompt] * 2, temperature=1.0, top_p=0.9, top_k=40)
    assert drawn[0]["output_ids"] != drawn[1]["output_ids"]
    for output in drawn:
        logits = oracle_logits(oracle, tuple(prompt), tuple(output["output_ids"]))
        kept = logits.topk(40).values[:, -1]
        assert (logits.gather(1, torch.tensor(output["output_ids"])[:, None])[:, 0] >= kept - ROUNDING["float32"]).all()
