"""Tiny servers side by side: plain decoding, and ours in several settings, asked the same requests.

Seeds are on (--enable-deterministic-inference), so sampled answers are compared token for token. Plain decoding runs
without overlap: with it a penalty can miss the last token. A server that died of a request starts again when asked
next, so that a failing case can be made smaller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from sglang_dflash import demo
from tests.engine import scripted
from tests.engine.serving import REQUEST_TIMEOUT_S, serve, tail

COMMON: dict[str, Any] = {
    "enable_deterministic_inference": True,
    "enable_custom_logit_processor": True,
    "chunked_prefill_size": 64,
    "max_total_tokens": 4096,
    "sleep_on_idle": True,  # the servers that wait leave the cores to the one that answers
}
# One thread: more only wait for each other over matrices of this size. Nothing is compiled, which takes seconds of a
# start; the same operations run.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
PLAIN = {"disable_overlap_schedule": True}
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A server of ours.

    Attributes:
        width: tokens of a block.
        args: of the server.
        env: of the server; with RETRACTING, SGLang takes requests out of the running batch every few steps.
    """

    width: int
    args: dict[str, Any]
    env: dict[str, str] = dataclasses.field(default_factory=dict)


OURS = {
    "w2-page1-overlap": Setting(2, {"page_size": 1}),
    "w5-page16-sync-retracting": Setting(5, {"page_size": 16, "disable_overlap_schedule": True}, RETRACTING),
    "w16-page1-overlap": Setting(16, {"page_size": 1}),
}


class Server:
    """A server that starts when it is first asked, and again after it died."""

    def __init__(self, models: demo.Models, folder: Path, setting: Setting | None) -> None:
        self.log, self.script = folder / "log", folder / "script.json"
        self._setting, self._models = setting, models
        self._stack = contextlib.ExitStack()
        self._url: str | None = None

    @property
    def url(self) -> str:
        if self._url is None:
            setting = self._setting
            if setting is None:
                arguments, env = {**COMMON, **PLAIN, "plain": True}, ENVIRONMENT
            else:
                arguments = {**COMMON, **setting.args, "speculative_num_draft_tokens": setting.width}
                env = {**ENVIRONMENT, **setting.env, **scripted.following(self.script, {})}
            self._url = self._stack.enter_context(serve(self._models, self.log, env, **arguments))
        return self._url

    def post(self, body: dict[str, Any]) -> requests.Response:
        """To /generate.

        Raises RuntimeError with the log's end where the server died of it.
        """
        url = self.url
        try:
            return requests.post(f"{url}/generate", json=body, timeout=REQUEST_TIMEOUT_S)
        except requests.ConnectionError as error:
            told = f"the server died of {body}\n{tail(self.log)}"
            with contextlib.suppress(AssertionError):  # that it ended is told already
                self.close()
            raise RuntimeError(told) from error

    def ask(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """SGLang's answers to a batch of requests."""
        response = self.post(body)
        assert response.status_code == 200, response.text
        answers = response.json()
        return answers if isinstance(answers, list) else [answers]

    def close(self) -> None:
        self._url = None
        self._stack.close()


class Pair:
    """Plain decoding and the servers of `OURS`."""

    def __init__(self, models: demo.Models, folder: Path) -> None:
        for name in ("plain", *OURS):
            (folder / name).mkdir()
        self.plain = Server(models, folder / "plain", None)
        self.ours = {name: Server(models, folder / name, setting) for name, setting in OURS.items()}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.url, (self.plain, *self.ours.values())))

    def ask(self, name: str, body: dict[str, Any], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Plain decoding's answers to a batch, then ours from drafts that make all accepted lengths occur."""
        expected, server = self.plain.ask(body), self.ours[name]
        _ = server.url  # the start writes an empty script
        script = {
            f"{seed}-{i}": {
                "seed": seed + i,
                "prompt_len": answer["meta_info"]["prompt_tokens"],
                "answer": answer["output_ids"],
            }
            for i, answer in enumerate(expected)
        }
        scripted.write(server.script, script)
        return expected, server.ask(body)

    def close(self) -> None:
        for server in (self.plain, *self.ours.values()):
            server.close()


LOGPROBS = (
    "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs",
    "input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs",
)  # fmt: skip


def differences(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> list[str]:
    """What of the answers is not the same: tokens, text, why it ended, counts, logprobs beyond rounding."""
    if len(expected) != len(got):
        return [f"{len(got)} answers for {len(expected)}"]
    found = []
    for i, (one, other) in enumerate(zip(expected, got, strict=True)):
        pairs = {name: (one[name], other[name]) for name in ("output_ids", "text")}
        for name in ("finish_reason", "prompt_tokens", "completion_tokens", *LOGPROBS):
            pairs[name] = (one["meta_info"].get(name), other["meta_info"].get(name))
        found += [f"answer {i}: {name}: expected {a}, got {b}" for name, (a, b) in pairs.items() if not close(a, b)]
    return found


def close(expected: Any, got: Any) -> bool:
    """Equal, floating-point numbers within rounding; lists and dicts by their entries."""
    if isinstance(expected, float) and isinstance(got, float):
        return math.isclose(expected, got, abs_tol=2e-3, rel_tol=1e-3)
    if isinstance(expected, list) and isinstance(got, list):
        return len(expected) == len(got) and all(map(close, expected, got))
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(close(expected[key], got[key]) for key in expected)
    return bool(expected == got)
