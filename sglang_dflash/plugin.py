"""Entry point of the group `sglang.srt.plugins`: SGLang calls `register` first in each of its processes.

SGLang logs and drops a plugin's exceptions and goes on with its built-in worker. In strict mode `register` therefore
raises SystemExit, which SGLang does not catch, so that a server never runs a worker that was not asked for. Nothing
heavy is imported here: most processes never touch the drafter.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)

# Kept in step with config.STRICT_VARIABLE, which cannot be relied on when the package itself fails to import.
_STRICT_VARIABLE = "SGLANG_DFLASH_STRICT"


def register() -> None:
    """Check the host and install the hooks on argument resolution and worker creation.

    Raises:
        SystemExit: the host does not fit, or this package is broken, in strict mode.
    """
    try:
        problems = _install()
    except (ImportError, ValueError) as error:
        problems = [f"{type(error).__name__}: {error}"]
    except BaseException as error:
        _tell_inactive(f"{type(error).__name__}: {error}")
        raise
    if problems:
        _tell_inactive(" ".join(problems))


def _install() -> list[str]:
    from sglang_dflash import config, cpu, hooks, hostcheck

    config.load()
    contracts = hostcheck.REGISTRATION + (hostcheck.CPU if cpu.is_cpu_engine() else ())
    problems = hostcheck.problems(contracts)
    if problems:
        return problems
    cpu.register()
    return hooks.install()


def _tell_inactive(why: str) -> None:
    message = f"sglang-dflash is not active: {why}"
    if os.environ.get(_STRICT_VARIABLE, "").strip().lower() not in ("", "0", "false"):
        raise SystemExit(message)
    logger.error("%s SGLang's built-in DFLASH worker would serve; set %s=1 to fail instead.", message, _STRICT_VARIABLE)
