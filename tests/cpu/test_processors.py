"""A custom logit processor inside a block sees the whole output, whatever of it the host has read."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.host.processors import LogitProcessors

PROMPT = [7, 7, 7]
VOCAB_SIZE = 50


class Request(SimpleNamespace):
    """SGLang's, as far as it is read here."""

    __hash__ = object.__hash__


def request(output: list[int], processor: str | None = "p") -> Request:
    return Request(origin_input_ids=array("q", PROMPT), output_ids=array("q", output), custom_logit_processor=processor)


class Recorder:
    """Writes down what it is called with, and marks the rows."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    @staticmethod
    def _output(req: Any) -> list[int]:
        # As SGLang's own processors join the two.
        return list((req.origin_input_ids + req.output_ids)[len(PROMPT) :])

    def __call__(self, logits_PV: torch.Tensor, params: list[Any]) -> torch.Tensor:
        self.calls.append([p and (p["name"], self._output(p["__req__"])) for p in params])
        return logits_PV + torch.arange(1, len(params) + 1)[:, None]


def batch_of(reqs: list[Request], rows: list[int], recorder: Recorder) -> Any:
    params = [{"name": i, "__req__": req} for i, req in enumerate(reqs)]
    entry = SimpleNamespace(processor=recorder, rows=rows, indices=torch.tensor(rows))
    info = SimpleNamespace(has_custom_logit_processor=True, custom_logit_processor={1: entry}, custom_params=params)
    return SimpleNamespace(reqs=reqs, sampling_info=info)


def blocks(anchors: list[int]) -> torch.Tensor:
    return torch.tensor([[anchor, anchor + 1, anchor + 2] for anchor in anchors])


def positions(outputs: list[list[int]]) -> torch.Tensor:
    """The anchor is the output's last token."""
    return torch.tensor([[len(PROMPT) + len(output) - 1 + k for k in range(3)] for output in outputs])


@pytest.mark.parametrize("read", [True, False], ids=["read by the host", "not read yet"])
def test_each_row_sees_the_output_up_to_its_token(read: bool) -> None:
    reqs = [request([10]), request([20]), request([30], processor=None)]
    processors, recorder = LogitProcessors(), Recorder()
    processors.add(reqs, torch.tensor([[11, 12, 0], [21, 0, 0], [31, 32, 33]]), torch.tensor([2, 1, 3]))
    outputs = [[10, 11, 12], [20, 21], [30, 31, 32, 33]]
    if read:
        for req, output in zip(reqs, outputs):
            req.output_ids = array("q", output)
    logits_BWV = torch.zeros(3, 3, VOCAB_SIZE)
    processors.apply(batch_of(reqs, [0, 1], recorder), blocks([12, 21, 33]), positions(outputs), logits_BWV)
    assert recorder.calls == [
        [(0, [10, 11, 12]), (1, [20, 21])],
        [(0, [10, 11, 12, 13]), (1, [20, 21, 22])],
        [(0, [10, 11, 12, 13, 14]), (1, [20, 21, 22, 23])],
    ]
    assert logits_BWV[:, :, 0].tolist() == [[1, 1, 1], [2, 2, 2], [0, 0, 0]]
    assert list(reqs[0].output_ids) == ([10, 11, 12] if read else [10]), "the request itself is left alone"


def test_after_a_prefill_that_the_host_has_not_read() -> None:
    reqs, processors, recorder = [request([])], LogitProcessors(), Recorder()
    processors.add(reqs, torch.tensor([[10]]), None)
    processors.apply(batch_of(reqs, [0], recorder), blocks([10]), positions([[10]]), torch.zeros(1, 3, VOCAB_SIZE))
    assert recorder.calls[0] == [(0, [10])]


def test_later_rounds_do_not_change_what_was_noted() -> None:
    """The round's buffers are written again while a request waits in another batch."""
    tokens_BW, commit_B = torch.tensor([[11, 12, 13]]), torch.tensor([2])
    reqs, processors, recorder = [request([10])], LogitProcessors(), Recorder()
    processors.add(reqs, tokens_BW, commit_B)
    tokens_BW.zero_()
    commit_B.zero_()
    outputs = [[10, 11, 12]]
    processors.apply(batch_of(reqs, [0], recorder), blocks([12]), positions(outputs), torch.zeros(1, 3, VOCAB_SIZE))
    assert recorder.calls[0] == [(0, outputs[0])]


def test_parameters_without_a_request_are_handed_on() -> None:
    reqs, processors, recorder = [request([10])], LogitProcessors(), Recorder()
    batch = batch_of(reqs, [0], recorder)
    batch.sampling_info.custom_params = [None]
    processors.apply(batch, blocks([10]), positions([[10]]), torch.zeros(1, 3, VOCAB_SIZE))
    assert recorder.calls == [[None]] * 3
