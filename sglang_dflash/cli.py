"""`sglang-dflash`: serve a model, check the installation, show the demo, train a drafter, measure.

`serve` adds what a recipe and the machine ask for to SGLang's own command line and becomes that command: the process
is replaced by `python -m sglang.launch_server`, so the server is SGLang's, started as SGLang starts it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence

from sglang_dflash import __version__, config, cpu, recipe
from sglang_dflash.cpu import bootstrap

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "sglang_dflash"
_OF_A_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)

_SERVE_USAGE = """usage: sglang-dflash serve [--recipe NAME|FILE] [--dry-run] [any flag of sglang.launch_server ...]

Serve with SGLang and this package's DFlash worker. Flags on the command line win over a recipe's.

  --recipe NAME|FILE  flags and environment of a recipe; shipped: {names}
  --dry-run           print the environment and the command, start nothing

Every other flag goes to SGLang as it stands: python -m sglang.launch_server --help lists them.
Where there is no GPU, or with --device cpu, the CPU engine is set up first."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """A server's start: variables added to the environment, and the whole command."""

    environment: dict[str, str]
    command: tuple[str, ...]

    def render(self) -> str:
        """The start as one line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*variables, shlex.join(self.command)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. A user's mistake is told in one sentence, without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, tuple[str, Callable[[list[str]], int]]] = {
        "serve": ("serve a model with SGLang and DFlash", serve),
        "check": ("check that this package's worker would run here", check),
        "demo": ("compare DFlash with plain decoding on a small model", demo),
        "train": ("train a drafter for a target", train),
        "token-map": ("choose the tokens that the drafter scores", token_map),
        "bench": ("compare speeds, and profile one decode round", bench),
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: sglang-dflash COMMAND ...\n")
        print("\n".join(f"  {name:<9} {purpose}" for name, (purpose, _) in commands.items()))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"sglang-dflash {__version__}")
        return 0
    if arguments[0] not in commands:
        print(f"sglang-dflash: expected one of {', '.join(commands)}, got {arguments[0]!r}", file=sys.stderr)
        return 2
    try:
        return commands[arguments[0]][1](arguments[1:])
    except (ValueError, *_OF_A_PATH) as error:
        print(f"sglang-dflash {arguments[0]}: {error}", file=sys.stderr)
        return 2


def serve(argv: list[str]) -> int:
    """Become SGLang's server. Returns only with --dry-run or --help."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    options, flags = parser.parse_known_args(argv)
    if options.help:
        print(_SERVE_USAGE.format(names=", ".join(recipe.names())))
        return 0
    launch = plan(options.recipe, flags, start=not options.dry_run)
    if options.dry_run:
        print(launch.render())
        return 0
    sys.stdout.flush()
    os.execve(launch.command[0], launch.command, {**os.environ, **launch.environment})


def train(argv: list[str]) -> int:
    """Make data for a drafter, train it, write it in other forms."""
    from sglang_dflash.train import cli

    return cli.main(argv)


def token_map(argv: list[str]) -> int:
    """Write the tokens that a target's answers hold most often."""
    from sglang_dflash import token_map

    return token_map.main(argv)


def bench(argv: list[str]) -> int:
    """Measure engines beside each other on this machine."""
    from sglang_dflash.bench import cli

    return cli.main(argv)


def plan(recipe_name: str | None, flags: list[str], *, start: bool) -> Launch:
    """What `serve` runs: what neither recipe nor user gave, the recipe's flags, the user's, which win.

    Args:
        recipe_name: name or file of a recipe, None for none.
        flags: the user's flags of `sglang.launch_server`.
        start: the server is to run here: the recipe must suit this machine, and the demo's models are made.

    Raises ValueError where recipe, command line and machine contradict each other.
    """
    if recipe_name is not None and "--config" in flags:
        raise ValueError("expected --recipe or --config, got both; give one")
    path = recipe.find(recipe_name) if recipe_name is not None else None
    chosen = recipe.load(path) if path is not None else None
    environment = dict(chosen.config.environment) if chosen is not None else {}
    if chosen is None:
        on_cpu = bootstrap.wanted(_last_value("--device", flags))
    else:
        on_cpu = chosen.config.hardware == "cpu"
        if start and on_cpu != bootstrap.wanted(_last_value("--device", flags) or chosen.device):
            raise ValueError(
                f"recipe {recipe_name}: expected {'the CPU' if on_cpu else f'a GPU ({chosen.config.hardware})'}, got "
                f"{'a GPU' if on_cpu else 'the CPU'} by --device, {bootstrap.ENV_CPU} or what this machine has; choose "
                f"another of {', '.join(recipe.names())}"
            )
    defaults = [["--speculative-algorithm", "DFLASH"]]
    if on_cpu:
        environment |= _install_cpu_engine()
        defaults += [_as_flag(name, value) for name, value in cpu.engine_arguments().items()]
    if path is not None and chosen is not None:
        flags = [*_expand(["--config", str(path)]), *_demo_models(chosen, start), *flags]
    elif "--config" in flags:
        flags = _expand(flags)
    given = {flag.partition("=")[0] for flag in flags}
    missing = [part for default in defaults if default[0] not in given for part in default]
    # -P: a folder of this package's name in the current directory must not stand in for the installed package.
    return Launch(environment, (sys.executable, "-P", "-m", "sglang.launch_server", *missing, *flags))


def _install_cpu_engine() -> dict[str, str]:
    """Set the CPU engine up before SGLang is imported; the variables that carry it to the server."""
    before = dict(os.environ)
    bootstrap.install()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def _expand(flags: list[str]) -> list[str]:
    """Put a config file's content in place of `--config FILE`, as SGLang reads it, without a recipe's record."""
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    expanded: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(flags)
    if "--config" in expanded:
        record = expanded.index("--config")
        del expanded[record : record + 2]
    return expanded


def _demo_models(chosen: recipe.Recipe, make: bool) -> list[str]:
    """Flags with the full paths of the demo's models, none where the recipe names models of the hub."""
    if chosen.config.models == "hub":
        return []
    from sglang_dflash import demo as demo_module

    models = demo_module.prepare() if make else demo_module.locate()
    names = (demo_module.TARGET_NAME, demo_module.DRAFTER_NAME)
    if (chosen.model_path, chosen.speculative_draft_model_path) != names:
        raise ValueError(
            f"config.models: demo: expected the models {' and '.join(names)}; write models: hub for others"
        )
    return ["--model-path", str(models.target), "--speculative-draft-model-path", str(models.drafter)]


def _last_value(name: str, flags: Sequence[str]) -> str | None:
    value = None
    for flag, following in zip(flags, [*flags[1:], None], strict=False):
        if flag == name:
            value = following
        elif flag.startswith(name + "="):
            value = flag.partition("=")[2]
    return value


def _as_flag(name: str, value: object) -> list[str]:
    assert value not in (False, None), f"{name}={value} has no spelling as a flag"
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]


def check(argv: list[str]) -> int:
    """Print versions, device, contract and the worker that would run; 0 where it is ours, else 1."""
    argparse.ArgumentParser(prog="sglang-dflash check", description=check.__doc__).parse_args(argv)
    if bootstrap.wanted():
        bootstrap.install()
    from sglang_dflash import hostcheck

    report = hostcheck.report()
    problem = _plugin_problem() or _settings_problem()
    print(f"sglang-dflash  {__version__}")
    for name in ("sglang", "torch", "transformers", "triton"):
        print(f"{name:<14} {_version(name)}")
    print(f"{'python':<14} {platform.python_version()}")
    print(f"{'device':<14} {_device()}")
    print(report.render())
    if problem:
        print(f"FAIL {problem}")
    ok = report.ok and problem is None
    worker = f"sglang_dflash.worker.DFlashWorker {__version__}" if ok else "SGLang's built-in DFLASH worker"
    print(f"{'worker':<14} {worker}")
    return 0 if ok else 1


def _plugin_problem() -> str | None:
    """Why SGLang would not load the plugin, as one sentence; None where it would."""
    if PLUGIN_NAME not in {entry.name for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP)}:
        return f"expected the entry point {PLUGIN_NAME} of group {PLUGIN_GROUP}, got none; install with pip"
    # SGLang's own list of the plugins it may load; unset or empty means all.
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if allowed and PLUGIN_NAME not in allowed:
        return f"expected {PLUGIN_NAME} in SGLANG_PLUGINS, got {', '.join(sorted(allowed))}; add it or unset that"
    return None


def _settings_problem() -> str | None:
    """What is wrong with this package's settings in the environment; None where they can be read."""
    try:
        config.load()
    except ValueError as error:
        return str(error)
    return None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device() -> str:
    import torch

    if bootstrap.wanted():
        return f"cpu ({os.cpu_count()} cores, {platform.machine()})"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def demo(argv: list[str]) -> int:
    """Run the demo, or prepare its models and print where they are."""
    parser = argparse.ArgumentParser(prog="sglang-dflash demo", description=demo.__doc__)
    parser.add_argument("--paths", action="store_true", help="prepare the models and print their folders")
    options = parser.parse_args(argv)
    from sglang_dflash import demo as demo_module

    return demo_module.print_paths() if options.paths else demo_module.run()


if __name__ == "__main__":
    sys.exit(main())
