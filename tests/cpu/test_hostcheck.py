"""The host's contract: it holds on the installed SGLang, names all we import, and tells what differs."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dflash import hooks, hostcheck
from sglang_dflash.hostcheck import Contract

PACKAGE = Path(hostcheck.__file__).parent
CONTRACTS = hostcheck.REGISTRATION + hostcheck.WORKER + hostcheck.CPU + hostcheck.COMMANDS
INSTALL = f"install sglang=={hostcheck.SGLANG_VERSION}."


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.path)
def test_the_installed_sglang_fulfils(contract: Contract) -> None:
    assert contract.problem() is None


def test_the_version_is_the_one_that_the_package_requires() -> None:
    required = [r for r in importlib.metadata.requires("sglang-dflash") or [] if re.match(r"sglang\b(?!-)", r)]
    assert required == [f"sglang=={hostcheck.SGLANG_VERSION}"]
    assert hostcheck.problems(CONTRACTS) == []


def imported_of_sglang() -> Iterator[tuple[str, str]]:
    """File and full name of everything that the package imports from SGLang at run time."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for_types = {
            child
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for child in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("sglang.") and node not in for_types:
                yield from ((path.name, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_name_that_we_import_is_listed() -> None:
    paths = [contract.path for contract in CONTRACTS]
    names = dict((name, file) for file, name in imported_of_sglang())
    assert len(names) > 30
    unlisted = {n for n in names if not any(path == n or path.startswith(n + ".") for path in paths)}
    assert unlisted == set()


def test_every_listed_name_is_used() -> None:
    ours = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "hostcheck.py")
    assert {contract.path for contract in CONTRACTS if contract.path.rsplit(".", 1)[1] not in ours} == set()


def test_every_hook_target_is_listed_with_its_exact_signature() -> None:
    targets = {text for text in vars(hooks).values() if isinstance(text, str) and text.startswith("sglang.srt")}
    targets.remove(hooks._WEIGHT_UPDATER)
    assert len(targets) == 12
    assert targets <= {contract.path for contract in CONTRACTS if contract.exact}


def function(a: int, b: int = 0, *, c: int = 0) -> int:
    return a + b + c


class Record:
    attribute = 1

    def __init__(self, first: int, second: int) -> None:
        self.first, self.second = first, second

    def method(self, x: int) -> int:
        return x


HERE = "stand_in_for_sglang"


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


@pytest.mark.parametrize(
    "contract",
    [
        Contract(f"{HERE}.function"),
        Contract(f"{HERE}.function", ("c", "a")),
        Contract(f"{HERE}.function", ("a", "b", "c"), exact=True),
        Contract(f"{HERE}.Record", ("second", "method", "attribute")),
        Contract(f"{HERE}.Record.method", ("self", "x"), exact=True),
        Contract(f"{HERE}.HERE"),
    ],
)
def test_a_host_that_fits(contract: Contract) -> None:
    assert contract.problem() is None


@pytest.mark.parametrize(
    ("contract", "complaint"),
    [
        (Contract("gone.f"), "SGLang has no gone.f (No module named 'gone'); "),
        (Contract("sglang.srt.gone.f"), "SGLang has no sglang.srt.gone.f (module 'sglang.srt' has no attribute "),
        (Contract(f"{HERE}.Record.gone"), f"SGLang has no {HERE}.Record.gone (type object 'Record' has no attribute "),
        (Contract(f"{HERE}.function", ("a", "d")), f"{HERE}.function: expected parameters (a, d), got (a, b, c); "),
        (Contract(f"{HERE}.Record", ("third",)), f"{HERE}.Record: expected parameters (third), got (first, second, "),
        # A hook passes on what it was given: one parameter more, or another order, is another contract.
        (
            Contract(f"{HERE}.function", ("a", "b"), exact=True),
            f"{HERE}.function: expected parameters (a, b), got (a, ",
        ),
        (
            Contract(f"{HERE}.function", ("b", "a", "c"), exact=True),
            f"{HERE}.function: expected parameters (b, a, c), ",
        ),
        # What is no function and no class has no parameters.
        (Contract(f"{HERE}.HERE", ("x",)), f"{HERE}.HERE: expected parameters (x), got (); "),
    ],
)
def test_a_host_that_differs_is_told_in_one_sentence(contract: Contract, complaint: str) -> None:
    problem = contract.problem()
    assert problem is not None
    assert problem.startswith(complaint)
    assert problem.endswith(INSTALL)
    assert "\n" not in problem


def test_problems_are_those_of_the_given_contracts() -> None:
    good, bad = Contract(f"{HERE}.function", ("a",)), Contract(f"{HERE}.function", ("z",))
    assert hostcheck.problems((good,)) == []
    assert hostcheck.problems((bad, good, bad)) == [bad.problem(), bad.problem()]


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    real = importlib.metadata.version

    def fake(name: str) -> str:
        if name != "sglang":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", fake)


@pytest.mark.parametrize(("version", "told"), [("0.5.22", "0.5.22"), ("0.5.23.post1", "0.5.23.post1"), (None, "none")])
def test_another_version_is_the_only_complaint(monkeypatch: pytest.MonkeyPatch, version: str | None, told: str) -> None:
    installed(monkeypatch, version)
    # Other versions may lack every module: none is resolved.
    monkeypatch.setattr(Contract, "problem", lambda self: pytest.fail(f"{self.path} was resolved"))
    sentence = f"expected sglang 0.5.23, got {told}; run: pip install sglang==0.5.23."
    assert hostcheck.problems(CONTRACTS) == [sentence]
    report = hostcheck.report()
    assert report == hostcheck.Report(False, (f"sglang: expected 0.5.23, got {told}", sentence))


def test_the_report_of_a_host_that_fits() -> None:
    report = hostcheck.report()
    assert report.ok
    assert report.lines[0] == "sglang: expected 0.5.23, got 0.5.23"
    assert list(report.lines[1:]) == [f"ok   {contract.path}" for contract in CONTRACTS]
    assert report.render() == "\n".join(report.lines)


@pytest.mark.parametrize("table", ["REGISTRATION", "WORKER", "CPU", "COMMANDS"])
def test_the_report_marks_what_differs(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    bad = Contract(f"{HERE}.function", ("z",))
    monkeypatch.setattr(hostcheck, table, (*getattr(hostcheck, table)[:1], bad))
    report = hostcheck.report()
    assert not report.ok
    assert [line for line in report.lines if line.startswith("FAIL")] == [f"FAIL {bad.problem()}"]
