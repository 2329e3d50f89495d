"""The rules of the code's structure: each a function from sources to complaints, shown to complain of a bad sample."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_dflash import recipe

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
STAGES = ("draft", "accept", "inject")
# Modules and packages of sglang_dflash that may import SGLang. A stage reads its batches and pools through host/.
MAY_IMPORT_SGLANG = ("host", "worker", "plugin", "hooks", "hostcheck", "cpu", "cli", "demo", "offline", "bench")
PLUGIN_IMPORTS = ("sglang.srt.plugins",)

Sources = dict[str, str]  # path relative to the repository -> text
Rule = Callable[[Sources], list[str]]


def read_sources() -> Sources:
    paths = [path for folder in ("sglang_dflash", "kernels") for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def imports(path: str, text: str, *, module_level_only: bool = False) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported; relative imports are resolved."""
    tree = ast.parse(text, path)
    for node in _module_level(tree) if module_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_name(path).split(".")
                package = package if path.endswith("__init__.py") else package[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run at import: everything but the bodies of functions and of `if TYPE_CHECKING`."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        pending.extend(ast.iter_child_nodes(node))


def module_name(path: str) -> str:
    return path.removeprefix("kernels/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def part_of(path: str) -> str:
    """The module or package directly under sglang_dflash that a file belongs to."""
    return module_name(path).split(".")[1] if "." in module_name(path) else ""


def is_or_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def files_are_short(sources: Sources) -> list[str]:
    counts = {path: len(text.splitlines()) for path, text in sources.items()}
    return [f"{path}: {n} lines, at most {MAX_FILE_LINES}" for path, n in counts.items() if n > MAX_FILE_LINES]


def functions_are_short(sources: Sources) -> list[str]:
    """Counts the body: a docstring explains, and the formatter gives a kernel's many parameters a line each."""
    complaints = []
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text, path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0
            if lines > MAX_FUNCTION_LINES:
                complaints.append(f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    return complaints


def stages_are_independent(sources: Sources) -> list[str]:
    complaints = []
    for path, text in sources.items():
        stage = part_of(path)
        if not path.startswith("sglang_dflash/") or stage not in STAGES:
            continue
        others = [f"sglang_dflash.{other}" for other in STAGES if other != stage]
        for line, name in imports(path, text):
            if any(is_or_under(name, other) for other in others):
                complaints.append(f"{path}:{line}: the stage {stage} imports {name}; records.py is what stages share")
    return complaints


def few_import_sglang(sources: Sources) -> list[str]:
    complaints = []
    for path, text in sources.items():
        if path.startswith("sglang_dflash/") and part_of(path) not in MAY_IMPORT_SGLANG:
            for line, name in imports(path, text):
                if is_or_under(name, "sglang"):
                    complaints.append(f"{path}:{line}: imports {name}; only {', '.join(MAY_IMPORT_SGLANG)} may")
    return complaints


def policy_is_pure(sources: Sources) -> list[str]:
    complaints = []
    for path, text in sources.items():
        if not path.startswith("sglang_dflash/policy/"):
            continue
        for line, name in imports(path, text):
            if is_or_under(name, "torch") or is_or_under(name, "sglang"):
                complaints.append(f"{path}:{line}: the policy imports {name}; it works on numbers alone")
    return complaints


def kernels_stand_alone(sources: Sources) -> list[str]:
    complaints = []
    for path, text in sources.items():
        if path.startswith("kernels/sglang_dflash_kernels/"):
            for line, name in imports(path, text):
                if is_or_under(name, "sglang") or is_or_under(name, "sglang_dflash"):
                    complaints.append(f"{path}:{line}: a kernel imports {name}; kernels know tensors alone")
    return complaints


def plugin_is_light(sources: Sources) -> list[str]:
    complaints = []
    path = "sglang_dflash/plugin.py"
    for line, name in imports(path, sources.get(path, ""), module_level_only=True):
        allowed = name.split(".")[0] in sys.stdlib_module_names
        if not allowed and not any(is_or_under(name, package) for package in PLUGIN_IMPORTS):
            complaints.append(f"{path}:{line}: imports {name} in every process of SGLang; import it in a function")
    return complaints


def no_catch_all(sources: Sources) -> list[str]:
    """`except BaseException` may stand where the handler raises again: it hides nothing."""
    complaints = []
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text, path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = "everything" if node.type is None else ast.unparse(node.type)
            too_wide = node.type is None or any(
                isinstance(part, ast.Name) and part.id in ("Exception", "BaseException") for part in ast.walk(node.type)
            )
            raises_again = any(isinstance(last, ast.Raise) and last.exc is None for last in node.body[-1:])
            if too_wide and not (raises_again and caught == "BaseException"):
                complaints.append(f"{path}:{node.lineno}: catches {caught}; name the exceptions that are expected")
    return complaints


def recipe_folders_are_hardware(folders: Sources) -> list[str]:
    """Takes the files under recipes/."""
    complaints = []
    for path in folders:
        parts = path.split("/")
        if len(parts) != 3 or parts[1] not in recipe.HARDWARE:
            complaints.append(f"{path}: expected recipes/<{'|'.join(recipe.HARDWARE)}>/<target>.yaml")
    return complaints


RULES: list[Rule] = [
    files_are_short,
    functions_are_short,
    stages_are_independent,
    few_import_sglang,
    policy_is_pure,
    kernels_stand_alone,
    plugin_is_light,
    no_catch_all,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps(rule: Rule) -> None:
    sources = read_sources()
    assert "sglang_dflash/plugin.py" in sources
    complaints = rule(sources)
    assert not complaints, "\n" + "\n".join(complaints)


def test_recipe_folders_keep_their_rule() -> None:
    files = {path.relative_to(ROOT).as_posix(): "" for path in (ROOT / "recipes").rglob("*.yaml")}
    assert files
    assert not recipe_folders_are_hardware(files)


def test_every_package_is_installed_and_exists() -> None:
    """A package missing from pyproject.toml is missing from the wheel; one without a file breaks a fresh clone."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert settings["package-dir"]["sglang_dflash.recipes"] == "recipes"
    folders = {path.rsplit("/", 1)[0].removeprefix("kernels/").replace("/", ".") for path in read_sources()}
    packages = {name for name in folders if name.startswith("sglang_dflash") and not name.endswith("cpu.site")}
    assert set(settings["packages"]) == packages | {"sglang_dflash.recipes"}


BAD: list[tuple[Rule, str, str]] = [
    (files_are_short, "sglang_dflash/worker.py", "pass\n" * (MAX_FILE_LINES + 1)),
    (functions_are_short, "sglang_dflash/worker.py", "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES + 1)),
    (functions_are_short, "kernels/x.py", "class A:\n  async def f(self):\n" + "    pass\n" * (MAX_FUNCTION_LINES + 1)),
    (stages_are_independent, "sglang_dflash/draft/block.py", "from sglang_dflash.inject import features"),
    (stages_are_independent, "sglang_dflash/draft/block.py", "from ..accept import greedy"),
    (stages_are_independent, "sglang_dflash/accept/__init__.py", "def f():\n    import sglang_dflash.inject"),
    (few_import_sglang, "sglang_dflash/buffers.py", "import sglang"),
    (few_import_sglang, "sglang_dflash/accept/greedy.py", "def f():\n    from sglang.srt import environ"),
    (policy_is_pure, "sglang_dflash/policy/fixed.py", "import torch"),
    (policy_is_pure, "sglang_dflash/policy/fixed.py", "from torch.cuda import Event"),
    (policy_is_pure, "sglang_dflash/policy/fixed.py", "from sglang.srt import environ"),
    (kernels_stand_alone, "kernels/sglang_dflash_kernels/op.py", "from sglang_dflash import records"),
    (kernels_stand_alone, "kernels/sglang_dflash_kernels/op.py", "import sglang.srt"),
    (plugin_is_light, "sglang_dflash/plugin.py", "import torch"),
    (plugin_is_light, "sglang_dflash/plugin.py", "try:\n    from sglang_dflash import worker\nfinally:\n    pass"),
    (plugin_is_light, "sglang_dflash/plugin.py", "from sglang.srt.server_args import ServerArgs"),
    (no_catch_all, "sglang_dflash/worker.py", "try:\n    f()\nexcept Exception as error:\n    raise"),
    (no_catch_all, "sglang_dflash/worker.py", "try:\n    f()\nexcept (ValueError, Exception):\n    pass"),
    (no_catch_all, "sglang_dflash/worker.py", "try:\n    f()\nexcept:\n    pass"),
    (no_catch_all, "sglang_dflash/worker.py", "try:\n    f()\nexcept BaseException:\n    g()"),
    (recipe_folders_are_hardware, "recipes/h2000/qwen3-8b.yaml", ""),
    (recipe_folders_are_hardware, "recipes/qwen3-8b.yaml", ""),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_each_rule_complains_of_a_bad_sample(rule: Rule, path: str, text: str) -> None:
    [complaint] = rule({path: text})
    assert complaint.startswith(path)


GOOD: list[tuple[Rule, str, str]] = [
    (functions_are_short, "sglang_dflash/worker.py", "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES),
    (stages_are_independent, "sglang_dflash/draft/block.py", "from sglang_dflash.draft import proposer\nimport torch"),
    (stages_are_independent, "sglang_dflash/worker.py", "from sglang_dflash import draft, inject"),
    (few_import_sglang, "sglang_dflash/buffers.py", "import sglang_dflash_kernels\nfrom sglang_dflash import host"),
    (few_import_sglang, "sglang_dflash/host/rounds.py", "from sglang.srt import environ"),
    (plugin_is_light, "sglang_dflash/plugin.py", "import os\ndef register():\n    import torch"),
    (plugin_is_light, "sglang_dflash/plugin.py", "from sglang.srt.plugins.hook_registry import HookRegistry"),
    (plugin_is_light, "sglang_dflash/plugin.py", "if TYPE_CHECKING:\n    import torch"),
    (no_catch_all, "sglang_dflash/worker.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
]


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_no_rule_complains_of_a_good_sample(rule: Rule, path: str, text: str) -> None:
    assert rule({path: text}) == []
