"""Each op's two implementations against one naive twin. Without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton reads the variable when it is imported, and functions that it decorated by then stay compiled ones.
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("triton is imported already; run `pytest tests/kernels` in a process of its own")
    os.environ["TRITON_INTERPRET"] = "1"

from sglang_dflash_kernels import Ops, select  # noqa: E402

settings.register_profile("kernels", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("kernels")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture(scope="session", params=["reference", "triton"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return select(torch.device("cuda" if request.param == "triton" else "cpu"))


class Poison:
    """Hands out views cut from larger buffers full of a value that no op writes, and knows when it leaked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuts: list[tuple[torch.Tensor, tuple[slice, ...], float]] = []

    def output(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        value = float("nan") if dtype.is_floating_point else -7777
        buffer = torch.full([size + 3 for size in shape], value, dtype=dtype, device=self.device)
        cut = tuple(slice(1, 1 + size) for size in shape)
        self.cuts.append((buffer, cut, value))
        return buffer[cut]

    def check_surroundings(self) -> None:
        for buffer, cut, value in self.cuts:
            rest = buffer.clone()
            rest[cut] = value
            torch.testing.assert_close(rest, torch.full_like(rest, value), rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="session")
def new_poison(device: torch.device) -> Callable[[], Poison]:
    """For the many examples of one hypothesis test."""
    return lambda: Poison(device)


@pytest.fixture
def poison(new_poison: Callable[[], Poison]) -> Poison:
    return new_poison()
