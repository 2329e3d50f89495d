"""Where an answer ends inside a round: at the first end, as token by token.

SGLang looks at all tokens of a round at once: for stop strings in the order of the request, then regexes, then tokens,
so that an end further on can win over one before it.
"""

from __future__ import annotations

from typing import Any


def update_finish_state(original: Any, self: Any, new_accepted_len: int = 1) -> None:
    """In place of `Req.update_finish_state`: where a round ends a request that has stop strings, find the first end."""
    params = self.sampling_params
    if new_accepted_len <= 1 or self.to_finish or not (params.stop_strs or params.stop_regex_strs):
        original(self, new_accepted_len)
        return
    running, said = not self.finished(), self.output_ids[:]
    original(self, new_accepted_len)
    # A token that SGLang replaced was none: that ended the request.
    if not running or not self.finished() or self.output_ids != said:
        return
    said, grammar = self.output_ids, self.grammar
    # A grammar has seen all tokens; SGLang cut them where it ended.
    self.finished_reason = self.finished_len = self.grammar = None
    for length in range(len(said) - new_accepted_len + 1, len(said)):
        self.output_ids = said[:length]
        original(self, 1)
        if self.finished():
            self.finished_len = length if self.finished_len is None else self.finished_len
            break
    self.output_ids, self.grammar = said, grammar
    if not self.finished():
        original(self, 1)
