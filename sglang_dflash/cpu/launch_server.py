"""`python -m sglang_dflash.cpu.launch_server FLAGS`: `sglang.launch_server` on the CPU engine, with its flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sglang_dflash.cpu import bootstrap, engine_arguments


def arguments(argv: Sequence[str]) -> list[str]:
    """SGLang's command line: the flags of `engine_arguments`, then `argv`, whose flags win because they come later."""
    flags: list[str] = []
    for name, value in engine_arguments().items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return [*flags, *argv]


def main(argv: Sequence[str]) -> None:
    """Serve until interrupted. Installs the CPU engine first, so nothing may have imported sglang."""
    bootstrap.install()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()  # before the arguments: the attention backend's name is one of theirs
    try:
        run_server(prepare_server_args(arguments(argv)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
