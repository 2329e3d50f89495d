"""Penalties and min_new_tokens inside a block: row j sees the request's output and the block's tokens up to token j.

What a request has said is kept on the device, so that overlapped scheduling needs no host round trip: a prefill begins
a request's output, each round's committed tokens are added. The arithmetic and its order are SGLang's (frequency,
presence and min_new_tokens are added, then repetition scales), and so are the float32 results, bit for bit.

SGLang's own penalizers take the last token that the host knows, which with overlapped scheduling is not yet the last
one; here both ways of scheduling give what plain decoding gives without overlap.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.utils.common import async_h2d


@dataclasses.dataclass
class _Output:
    """What one request has said, and what it asks for; or, with P in front of every shape, P requests."""

    frequency_V: torch.Tensor  # float32: the frequency penalty, added up each time the token came
    said_V: torch.Tensor  # bool
    stops_V: torch.Tensor  # bool: tokens that end the output
    stops_from: torch.Tensor  # int64: the first position where one may stand
    penalties_3: torch.Tensor  # float32: frequency, presence, repetition


class Penalties:
    """The outputs of all running requests that ask for a penalty or for min_new_tokens."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._outputs: weakref.WeakKeyDictionary[Any, _Output] = weakref.WeakKeyDictionary()

    def begin(self, batch: Any) -> None:
        """Before a prefill: begin the outputs of its requests; a request that was retracted has one already.

        The prefill samples with SGLang's own penalizers, which know nothing of what a retracted request has said.
        """
        # Sessions keep requests that are finished, and the waiting queue those that were retracted.
        for req in [req for req in self._outputs if req.finished() or req.is_retracted]:
            del self._outputs[req]
        for req in filter(_asks, batch.reqs):
            self._outputs[req] = self._output_of(req)
        resumed = [i for i in self._asking(batch.reqs) if batch.reqs[i].output_ids]
        if not resumed:
            return
        info = batch.sampling_info
        index_P, said = self._stack(batch.reqs, resumed)
        additive_PV, scaling_PV = _terms(said, batch.seq_lens[index_P, None] - 1)
        if info.acc_additive_penalties is not None:
            info.acc_additive_penalties[index_P] = additive_PV
        if info.acc_scaling_penalties is not None:
            info.acc_scaling_penalties[index_P] = scaling_PV

    def apply(
        self, reqs: Sequence[Any], tokens_BW: torch.Tensor, positions_BW: torch.Tensor, logits_BWV: torch.Tensor
    ) -> None:
        """Change the logits after each token of the blocks, in place.

        Args:
            tokens_BW: int64, the verified blocks; token 0 is part of the output already.
            positions_BW: int64, of these tokens.
            logits_BWV: float32.
        """
        asking = self._asking(reqs)
        if not asking:
            return
        index_P, said = self._stack(reqs, asking)
        for slot in range(tokens_BW.shape[1]):
            if slot:
                _add(said, tokens_BW[index_P, slot, None], None)
            additive_PV, scaling_PV = _terms(said, positions_BW[index_P, slot, None])
            logits_PV = logits_BWV[index_P, slot] + additive_PV
            logits_BWV[index_P, slot] = torch.where(logits_PV < 0, logits_PV * scaling_PV, logits_PV / scaling_PV)

    def add(self, reqs: Sequence[Any], tokens_BW: torch.Tensor, commit_B: torch.Tensor | None) -> None:
        """Add the first `commit_B` tokens of every row to the outputs; None: all of them."""
        asking = self._asking(reqs)
        if not asking:
            return
        index_P, said = self._stack(reqs, asking)
        for slot in range(tokens_BW.shape[1]):
            committed_P1 = None if commit_B is None else commit_B[index_P, None] > slot
            _add(said, tokens_BW[index_P, slot, None], committed_P1)
        for row, i in enumerate(asking):
            output = self._outputs[reqs[i]]
            # Rows of one tensor, which lives as long as one of them.
            output.frequency_V, output.said_V = said.frequency_V[row], said.said_V[row]

    def asked(self, reqs: Sequence[Any]) -> bool:
        """Whether a request of the batch changes its logits by what it has said."""
        return bool(self._asking(reqs))

    def _asking(self, reqs: Sequence[Any]) -> list[int]:
        # A round looks at no request while none of all that run asks for anything.
        return [i for i, req in enumerate(reqs) if _asks(req)] if self._outputs else []

    def _output_of(self, req: Any) -> _Output:
        params, device = req.sampling_params, self.device
        counts_V = torch.zeros(self.vocab_size, dtype=torch.int64, device=device)
        if req.output_ids:
            ids = async_h2d(req.output_ids, dtype=torch.int64, device=device)
            counts_V.scatter_add_(0, ids, torch.ones_like(ids))
        stops_V = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
        if stops := [token for token in _stop_ids(req) if token < self.vocab_size]:
            stops_V.index_fill_(0, async_h2d(stops, dtype=torch.int64, device=device), True)
        penalties = [params.frequency_penalty, params.presence_penalty, params.repetition_penalty]
        stops_from = len(req.origin_input_ids) + params.min_new_tokens
        return _Output(
            frequency_V=counts_V * params.frequency_penalty,
            said_V=counts_V > 0,
            stops_V=stops_V,
            stops_from=async_h2d([stops_from], dtype=torch.int64, device=device)[0],
            penalties_3=async_h2d(penalties, dtype=torch.float32, device=device),
        )

    def _stack(self, reqs: Sequence[Any], rows: list[int]) -> tuple[torch.Tensor, _Output]:
        """These rows of the batch on the device, and copies of their requests' outputs."""
        outputs = [self._outputs[reqs[row]] for row in rows]
        names = [field.name for field in dataclasses.fields(_Output)]
        said = _Output(**{name: torch.stack([getattr(output, name) for output in outputs]) for name in names})
        return async_h2d(rows, dtype=torch.int64, device=self.device), said


def _asks(req: Any) -> bool:
    params = req.sampling_params
    penalties = (params.frequency_penalty, params.presence_penalty, params.min_new_tokens)
    return any(penalties) or params.repetition_penalty != 1.0


def _stop_ids(req: Any) -> set[int]:
    """As SGLang's penalizer has them."""
    if req.sampling_params.min_new_tokens == 0:
        return set()
    tokenizer = req.tokenizer
    ids = (req.sampling_params.stop_token_ids, req.eos_token_ids, tokenizer.additional_stop_token_ids)
    return set().union(*(some or () for some in ids), {tokenizer.eos_token_id}) - {None}


def _terms(said: _Output, positions_P1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to the logits after the tokens at these positions, and what then scales them; float32 (P, V)."""
    _, presence_P1, repetition_P1 = said.penalties_3.split(1, dim=1)
    early_P1 = positions_P1 + 1 < said.stops_from[:, None]
    additive_PV = -said.frequency_V - torch.where(said.said_V, presence_P1, 0.0)
    additive_PV.masked_fill_(said.stops_V & early_P1, float("-inf"))
    return additive_PV, torch.where(said.said_V, repetition_P1, 1.0)


def _add(said: _Output, tokens_P1: torch.Tensor, committed_P1: torch.Tensor | None) -> None:
    """One token more of each output, where it is committed."""
    frequency_P1 = said.penalties_3[:, :1]
    if committed_P1 is None:
        said.frequency_V.scatter_add_(1, tokens_P1, frequency_P1)
        said.said_V.scatter_(1, tokens_P1, True)
    else:
        said.frequency_V.scatter_add_(1, tokens_P1, frequency_P1 * committed_P1)
        said.said_V.scatter_(1, tokens_P1, said.said_V.gather(1, tokens_P1) | committed_P1)
