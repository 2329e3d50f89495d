"""What all engine tests share: the models, the prompts, and plain decoding's answers, made once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_dflash import demo
from sglang_dflash.offline import Answer
from tests.engine import margins, prompts, tiny
from tests.engine.pairs import Pair
from tests.engine.setup import NUM_NEW_TOKENS, NUM_PROMPTS, engine


@pytest.fixture(scope="session")
def models(random_models: demo.Models) -> demo.Models:
    return random_models


@pytest.fixture(scope="session")
def prompt_ids(models: demo.Models) -> dict[str, list[int]]:
    from transformers import AutoTokenizer

    every = prompts.texts(AutoTokenizer.from_pretrained(models.target))
    chosen = dict(list(every.items())[:NUM_PROMPTS])
    assert len(chosen) == NUM_PROMPTS
    assert max(map(len, chosen.values())) > 2000, "a prompt of over 2,000 tokens is among them"
    return chosen


@pytest.fixture(scope="session")
def plain_answers(
    models: demo.Models, prompt_ids: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answer]:
    """Plain decoding's answers, all of them NUM_NEW_TOKENS long: they go on past the end of the text."""
    request = {"return_logprob": True, "top_logprobs_num": 2}
    with engine("plain", models, tmp_path_factory.mktemp("plain") / "log") as reference:
        answers, _ = reference.generate(
            list(prompt_ids.values()), max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True, request=request
        )
    return dict(zip(prompt_ids, answers, strict=True))


@pytest.fixture(scope="session")
def plain(plain_answers: dict[str, Answer]) -> dict[str, list[int]]:
    """Their tokens."""
    return {rid: answer.token_ids for rid, answer in plain_answers.items()}


@pytest.fixture(scope="session")
def plain_margins(plain_answers: dict[str, Answer]) -> dict[str, list[float]]:
    """By how much each token was likelier than the next likely one, in logprobs."""
    return {rid: margins.of(answer.meta["output_top_logprobs"]) for rid, answer in plain_answers.items()}


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> demo.Models:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def pair(tiny_models: demo.Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tiny_models, tmp_path_factory.mktemp("pair"))
    yield made
    made.close()
