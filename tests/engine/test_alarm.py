"""A served drafter that was not trained for its target: the server says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash import demo
from sglang_dflash.accept.alarm import NUM_BLOCKS
from tests.engine import tiny
from tests.engine.setup import HAS_CUDA, engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(HAS_CUDA, reason="attention kernels want larger heads"),
]

NUM_REQUESTS = 32


def test_a_drafter_of_random_weights_is_told(tiny_models: demo.Models, tmp_path: Path) -> None:
    log = tmp_path / "log"
    prompts = [tiny.byte_tokenizer()(f"the {i}").input_ids for i in range(NUM_REQUESTS)]
    # A little more than the blocks that are judged together.
    num_tokens = NUM_BLOCKS // NUM_REQUESTS + 16
    args = {"max_running_requests": NUM_REQUESTS, "max_total_tokens": 2 * NUM_REQUESTS * num_tokens}
    with engine("ours", tiny_models, log, **args) as started:
        answers, _ = started.generate(prompts, max_new_tokens=num_tokens, ignore_eos=True)
    blocks = sum(answer.num_rounds or 0 for answer in answers)
    tokens = sum(len(answer.token_ids) for answer in answers)
    assert blocks > NUM_BLOCKS, "a random drafter's blocks commit one token"
    assert tokens < 1.05 * blocks
    warnings = [line for line in log.read_text().splitlines() if "DFlash costs time here and saves none" in line]
    assert len(warnings) == 1, warnings
    assert f"Of the last {NUM_BLOCKS} blocks" in warnings[0]
