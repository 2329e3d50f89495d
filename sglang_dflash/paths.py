"""Where files that are made once are kept."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """$SGLANG_DFLASH_HOME, or ~/.cache/sglang-dflash: unpacked models and rewritten drafters."""
    return Path(os.environ.get("SGLANG_DFLASH_HOME") or Path.home() / ".cache" / "sglang-dflash")
