"""SGLang functions that choose a GPU path on a CPU; each replacement says why it is needed."""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the replacements with SGLang's HookRegistry, which applies them after the plugins have loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.mem_cache.allocation.get_last_loc", get_last_loc, HookType.REPLACE)
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.maybe_enable_batch_invariant_mode", no_batch_invariant_kernels, HookType.REPLACE)


def get_last_loc(req_to_token: Any, req_pool_indices_tensor: Any, prefix_lens_tensor: Any) -> Any:
    """The slot of each request's last token, -1 where it has none, for allocating whole pages in speculative decoding.

    SGLang launches a Triton kernel here unless the attention backend is named "torch_native" or "ascend"; its PyTorch
    version is right for every CPU backend.
    """
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


def no_batch_invariant_kernels(self: Any) -> None:
    """SGLang's kernels for --enable-deterministic-inference are Triton's, and it fails where there is no GPU.

    Seeded draws, which SGLang ties to the same flag, do not need them.
    """
    from sglang.srt.runtime_context import get_exec

    if get_exec().deterministic.enable_deterministic_inference:
        _warn_of_rounding()


@functools.cache
def _warn_of_rounding() -> None:
    logger.warning(
        "--enable-deterministic-inference: draws are seeded, but the CPU engine has no batch-invariant products: an "
        "answer may depend, by float32's last bits, on the requests beside it."
    )
