"""Custom logit processors of the tests, which engines import by name."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class WatchOutput(CustomLogitProcessor):
    """Favours a token that depends on every token of the output: one token unseen or in excess shows at once."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        assert custom_param_list is not None
        for row, params in enumerate(custom_param_list):
            output = list(params["__req__"].output_ids)
            seen = sum(place * token for place, token in enumerate(output, start=1)) + len(output)
            # Printable tokens of either tokenizer of these tests.
            logits[row, seen % 97 + 40] += params["strength"]
        return logits
