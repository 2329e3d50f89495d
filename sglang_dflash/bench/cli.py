"""`sglang-dflash bench`: compare, profile, cpu-products."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from sglang_dflash.bench import compare, products, profile


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code.

    Raises:
        ValueError: a mistake of the user's, in one sentence.
    """
    parser = argparse.ArgumentParser(prog="sglang-dflash bench", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    handlers: dict[str, Callable[[argparse.Namespace], int]] = {}
    for name, module, purpose in (
        ("compare", compare, "plain decoding, SGLang's built-in worker and ours: correctness, then speed"),
        ("profile", profile, "one decode round by stage"),
        ("cpu-products", products, "oneDNN's matrix products against MKL's"),
    ):
        module.add_arguments(commands.add_parser(name, help=purpose, description=module.__doc__, allow_abbrev=False))
        handlers[name] = module.main
    args = parser.parse_args(argv)
    return handlers[args.command](args)
