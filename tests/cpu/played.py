"""For tests of commands whose engines are played: a target of a few numbers, and what all played engines do."""

from __future__ import annotations

from typing import Any, ClassVar, Self

TARGET = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
BLOCK_SIZE = 4


class PlayedEngine:
    """Stands for `EngineProcess`: it writes down how it was started, or fails with `failure` where that is set."""

    started: ClassVar[list[dict[str, Any]]] = []
    failure: ClassVar[Exception | None] = None

    def __init__(self, **how: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.started.append(how)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass
