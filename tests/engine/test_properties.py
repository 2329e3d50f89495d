"""Whatever mix of options a batch has, ours says what plain decoding says: tokens, text, ends, logprobs.

DFLASH_PROPERTY_CASES sets the number of mixes. They are the same in every run of as many.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.engine import close_calls
from tests.engine.cases import Case, cases
from tests.engine.pairs import OURS, Pair, differences
from tests.engine.setup import HAS_CUDA

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(HAS_CUDA, reason="compares float32 answers of the CPU engine"),
    pytest.mark.timeout(6 * 3600),
]

NUM_CASES = int(os.environ.get("DFLASH_PROPERTY_CASES", "500"))
# A token that another rounding would have drawn: seen about once in 100,000 tokens.
MAX_CLOSE_CALLS = 2 + NUM_CASES // 500

counts: Counter[str] = Counter()
histograms = {name: [0] * setting.width for name, setting in OURS.items()}
_rids = itertools.count()


def observe(case: Case, answers: list[dict[str, Any]]) -> None:
    counts["cases"] += 1
    counts.update({name for params in case.sampling for name, value in params.items() if value})
    counts.update({name for name, value in case.request.items() if value})
    counts.update(answer["meta_info"]["finish_reason"]["type"] for answer in answers)
    for answer in answers:
        for length, count in enumerate(answer["meta_info"].get("spec_correct_drafts_histogram", [])):
            histograms[case.ours][length] += count


def test_any_mix_of_options_is_answered_as_plain_decoding_answers_it(pair: Pair) -> None:
    @settings(
        max_examples=NUM_CASES,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def check(case: Case) -> None:
        rid = next(_rids)
        expected, got = pair.ask(case.ours, case.body(rid), rid)
        found = differences(expected, got)
        if found and close_calls.only(pair, case, expected, got):
            counts["close calls"] += 1
            found = []
        observe(case, got)
        assert not found, "\n".join([f"{case.ours}:", *found])

    check()
    print(f"{dict(counts)}\naccepted lengths: {histograms}")
    assert counts["cases"] >= NUM_CASES
    assert counts["close calls"] <= MAX_CLOSE_CALLS
    for name in ("logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "stop",
                 "stop_token_ids", "stop_regex", "sampling_seed", "top_k", "top_p", "temperature", "n", "length",
                 "top_logprobs_num", "token_ids_logprob", "regex", "json_schema", "custom_params"):  # fmt: skip
        assert counts[name] >= NUM_CASES // 20, name
    for name, histogram in histograms.items():
        assert all(histogram), f"every accepted length occurs: {name}: {histogram}"
    log = pair.ours["w5-page16-sync-retracting"].log.read_text(errors="replace")
    assert log.count("Testing retraction") > NUM_CASES // 20, "requests were taken out of the running batch"
