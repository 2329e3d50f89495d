"""The plugin's own settings: one frozen record, one strict parser.

SGLang 0.5.23 offers no flag for a plugin's settings, so they come from the environment, which its children inherit:

    SGLANG_DFLASH_STRICT=1     a start that cannot be served by our worker fails instead of going to the stock worker
    SGLANG_DFLASH_CONFIG=...   a JSON object, or the path of a file that holds one, with the keys of `Config`

`sglang-dflash bench profile` sets one more for its engines, SGLANG_DFLASH_RANGES: `ours` or `stock`, the worker that
serves with its stages marked for the profiler.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

STRICT_VARIABLE = "SGLANG_DFLASH_STRICT"
CONFIG_VARIABLE = "SGLANG_DFLASH_CONFIG"
RANGES_VARIABLE = "SGLANG_DFLASH_RANGES"
DRAFT_HEADS = ("dense", "fp8")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the plugin; field names are the keys of the JSON object.

    Attributes:
        strict: fail a start that our worker cannot serve. Environment only.
        proposer: how a block's hidden states become draft tokens: `argmax`, `sampled`, or `package.module:Class` of a
            class with the interface of `sglang_dflash.draft.proposer.Proposer`.
        draft_head: the target's head as the drafter reads it: `dense`, the target's own, or `fp8`, a copy of 8 bits a
            weight, which costs that much memory.
    """

    strict: bool = False
    proposer: str = "argmax"
    draft_head: str = "dense"


def load(environ: os._Environ[str] | dict[str, str] = os.environ) -> Config:
    """Read the settings from the environment.

    Raises:
        ValueError: a value of the wrong form, or a key that does not exist.
    """
    return Config(strict=_switch(environ, STRICT_VARIABLE), **_settings(environ.get(CONFIG_VARIABLE, "")))


def _switch(environ: os._Environ[str] | dict[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in ("", "0", "false"):
        return False
    if value in ("1", "true"):
        return True
    raise ValueError(f"{name}: expected 0 or 1, got {value!r}; set it to 1 for strict mode or unset it.")


def _settings(text: str) -> dict[str, str]:
    text = text.strip()
    if not text:
        return {}
    source = CONFIG_VARIABLE
    if not text.startswith("{"):
        source, path = f"{CONFIG_VARIABLE} file {text}", Path(text)
        if not path.is_file():
            raise ValueError(f"{CONFIG_VARIABLE}: expected a JSON object or a file that holds one, got {text!r}.")
        text = path.read_text()
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: expected a JSON object, got text that is not JSON: {error}.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{source}: expected a JSON object, got {type(settings).__name__}.")
    known = sorted(f.name for f in dataclasses.fields(Config) if f.name != "strict")
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"{source}: unknown key {', '.join(unknown)}; the keys are {', '.join(known)}.")
    for key, value in settings.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{source}: {key}: expected a non-empty string, got {value!r}.")
    if (head := settings.get("draft_head", "dense")) not in DRAFT_HEADS:
        raise ValueError(f"{source}: draft_head: expected {' or '.join(DRAFT_HEADS)}, got {head!r}.")
    return settings
