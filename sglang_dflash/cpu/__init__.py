"""What stock SGLang 0.5.23 lacks to run on a machine without a GPU.

    bootstrap   lets sgl_kernel be imported without a CUDA driver; called first in every process
    ops         the sgl_kernel ops of our path
    products    matrix products by oneDNN
    attention   an attention backend with TARGET_VERIFY
    hooks       the SGLang functions that take a CPU for something else

Importing this package imports neither torch nor SGLang.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_dflash.cpu import bootstrap

ATTENTION_BACKEND = "dflash_cpu"


def is_cpu_engine() -> bool:
    """Whether `bootstrap.install` ran in this process or in a parent of it."""
    return os.environ.get(bootstrap.ENV_CPU) == "1"


def engine_arguments() -> dict[str, Any]:
    """The ServerArgs that a CPU run needs, for `sglang.Engine(**engine_arguments(), model_path=...)`."""
    return {
        "device": "cpu",
        "attention_backend": ATTENTION_BACKEND,
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
    }


def register() -> None:
    """Register ops, attention backend and hooks where the CPU engine runs. The plugin calls it in every process."""
    if not is_cpu_engine():
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    from sglang_dflash.cpu import hooks, ops, products

    ops.register_missing()
    products.register()
    if ATTENTION_BACKEND in ATTENTION_BACKENDS:
        return
    choices.add_attention_backend_choices([ATTENTION_BACKEND])
    choices.add_draft_attention_backend_choices([ATTENTION_BACKEND])
    # Seeded draws, which SGLang ties to deterministic inference. Attention is computed request by request; the products
    # around it round differently for other numbers of rows, by float32's last bits.
    choices.add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    register_attention_backend(ATTENTION_BACKEND)(_create_backend)
    hooks.register()


def _create_backend(runner: Any) -> Any:
    from sglang_dflash.cpu.attention import CpuAttnBackend

    return CpuAttnBackend(runner)
