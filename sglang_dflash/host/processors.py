"""Custom logit processors inside a block: called for row j with the output as it stands after token j of the block.

A processor may read its request (`__req__` of its parameters). With overlapped scheduling the host has not yet read the
last round's tokens: they come from the device, so that the processor sees the whole output. A processor that keeps a
state of its own from call to call also sees rows whose tokens are then rejected.
"""

from __future__ import annotations

import copy
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

import torch

REQUEST_KEY = "__req__"


class LogitProcessors:
    """Applies the processors of a batch, and keeps what its requests said last until the host has read it."""

    def __init__(self) -> None:
        # Each request's last committed tokens (W,), and how many of them count.
        self._last: weakref.WeakKeyDictionary[Any, tuple[torch.Tensor, torch.Tensor | None]]
        self._last = weakref.WeakKeyDictionary()

    def add(self, reqs: Sequence[Any], tokens_BW: torch.Tensor, commit_B: torch.Tensor | None) -> None:
        """Note the first `commit_B` tokens of every row; None: all of them."""
        asking = [i for i, req in enumerate(reqs) if req.custom_logit_processor]
        if asking:
            # The round's buffers are written again before the host may have read them.
            tokens_BW, commit_B = tokens_BW.clone(), None if commit_B is None else commit_B.clone()
        for i in asking:
            self._last[reqs[i]] = (tokens_BW[i], None if commit_B is None else commit_B[i])

    def apply(self, batch: Any, tokens_BW: torch.Tensor, positions_BW: torch.Tensor, logits_BWV: torch.Tensor) -> None:
        """Change the logits after each token of the blocks, in place.

        Args:
            batch: SGLang's.
            tokens_BW: int64, the verified blocks; token 0 is part of the output already.
            positions_BW: int64, of these tokens.
            logits_BWV: float32.
        """
        info = batch.sampling_info
        if not info.has_custom_logit_processor:
            return
        for entry in info.custom_logit_processor.values():
            reqs = [batch.reqs[row] for row in entry.rows]
            outputs = self._outputs(reqs, positions_BW[entry.indices, 0].tolist())
            blocks = tokens_BW[entry.indices].tolist()
            params = [_seeing(info.custom_params[row], req) for row, req in zip(entry.rows, reqs, strict=True)]
            for slot in range(tokens_BW.shape[1]):
                for own, output, block in zip(params, outputs, blocks, strict=True):
                    if isinstance(own, dict) and REQUEST_KEY in own:
                        # An array, as SGLang has it: processors join it to the prompt.
                        own[REQUEST_KEY].output_ids = array("q", output + block[1 : slot + 1])
                logits_PV = entry.processor(logits_BWV[entry.indices, slot], params)
                logits_BWV[entry.indices, slot] = logits_PV.to(logits_BWV.dtype)

    def _outputs(self, reqs: Sequence[Any], anchor_positions: list[int]) -> list[list[int]]:
        """The requests' outputs up to their anchors."""
        outputs = []
        for req, position in zip(reqs, anchor_positions, strict=True):
            known = list(req.output_ids)
            num_unread = position + 1 - len(req.origin_input_ids) - len(known)
            if num_unread:
                tokens_W, commit = self._last[req]
                last = tokens_W.tolist() if commit is None else tokens_W[: int(commit)].tolist()
                assert 0 < num_unread <= len(last), f"{num_unread} tokens are missing, the last round gave {len(last)}"
                known += last[-num_unread:]
            outputs.append(known)
        return outputs


def _seeing(params: Any, req: Any) -> Any:
    """A request's parameters with a copy of the request in its place, whose output is this round's to change."""
    if not isinstance(params, dict) or REQUEST_KEY not in params:
        return params
    return params | {REQUEST_KEY: copy.copy(req)}
