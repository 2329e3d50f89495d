"""The plugin inside SGLang's own loader: each scenario is a process that breaks something and calls `load_plugins`.

The processes are forks of one that has imported SGLang (and nothing of ours), so a scenario takes a tenth of a second.
Nothing of ours is imported at the top: that is the scenarios' business.
"""

from __future__ import annotations

import importlib.metadata
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: SGLang resolves for it")

PRELOAD = ["sglang.srt.server_args", "sglang.srt.managers.scheduler", "sglang.srt.speculative.dflash_worker_v2"]
STRICT, CONFIG_VARIABLE = "SGLANG_DFLASH_STRICT", "SGLANG_DFLASH_CONFIG"
OURS = "sglang_dflash.worker.DFlashWorker"
STOCK = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
INACTIVE = "sglang-dflash is not active: "


@dataclass(frozen=True)
class Outcome:
    code: int | None
    log: str

    def lines(self, part: str) -> list[str]:
        return [line for line in self.log.splitlines() if part in line]

    @property
    def created(self) -> list[str]:
        """What the scenario's workers would be made with."""
        return [line.removeprefix("created ") for line in self.log.splitlines() if line.startswith("created ")]


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run a scenario in strict mode or not; its exit code, and what it printed and logged."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    log = tmp_path_factory.mktemp("plugin") / "log"

    def run(scenario: Callable[..., None], *args: Any, strict: bool, settings: str = "") -> Outcome:
        environment = {STRICT: "1" if strict else "0", CONFIG_VARIABLE: settings}
        process = context.Process(target=_scenario, args=(str(log), environment, scenario, args))
        process.start()
        process.join(300)
        return Outcome(process.exitcode, log.read_text())

    yield run
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _scenario(log: str, environment: dict[str, str], scenario: Callable[..., None], args: tuple[Any, ...]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    os.environ.update(environment)
    os.environ.pop("SGLANG_PLUGINS", None)
    assert not any(name.startswith("sglang_dflash.h") for name in sys.modules), "the plugin was imported too early"
    scenario(*args)


def load() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


def created(algorithm: str = "DFLASH", server_args: Any = None) -> str:
    """What SGLang would make its speculative worker with."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    worker = SpeculativeAlgorithm[algorithm].create_worker(server_args or raw_args(algorithm))
    return f"{worker.__module__}.{worker.__qualname__}"


def raw_args(algorithm: str = "DFLASH", **options: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path="none", speculative_algorithm=algorithm, device="cpu", **options)


def load_and_create() -> None:
    load()
    print("created", created())


# -- what may be wrong ------------------------------------------------------------------------------------------------


def another_version() -> None:
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.5.22" if name == "sglang" else real(name)


def missing_target() -> None:
    from sglang.srt.arg_groups import speculative_hook

    del speculative_hook._handle_dflash


def changed_signature() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    real = SpeculativeAlgorithm.create_worker
    SpeculativeAlgorithm.create_worker = lambda self, server_args, more=None: real(self, server_args)


def broken_import() -> None:
    sys.modules["sglang_dflash.hooks"] = None  # type: ignore[assignment]


def wrong_settings() -> None:
    os.environ["SGLANG_DFLASH_CONFIG"] = '{"propose": "argmax"}'


def unhookable_target() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    real = HookRegistry._apply_target.__func__  # type: ignore[attr-defined]

    def apply(cls: type, target: str, hooks: list[Any]) -> None:
        if target.endswith("create_worker"):
            raise TypeError("cannot be set")
        real(cls, target, hooks)

    HookRegistry._apply_target = classmethod(apply)


def another_plugins_hook() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
    HookRegistry.register(target, lambda result, *args: result, HookType.AFTER)
    HookRegistry.apply_hooks()


def bug() -> None:
    from sglang_dflash import hostcheck

    hostcheck.problems = None  # type: ignore[assignment]


PROBLEMS = [
    (another_version, "expected sglang 0.5.23, got 0.5.22; run: pip install sglang==0.5.23."),
    (missing_target, "SGLang has no sglang.srt.arg_groups.speculative_hook._handle_dflash ("),
    (
        changed_signature,
        "create_worker: expected parameters (self, server_args), got (self, server_args, more); install",
    ),
    (broken_import, "ModuleNotFoundError: import of sglang_dflash.hooks halted"),
    (wrong_settings, "ValueError: SGLANG_DFLASH_CONFIG: unknown key propose; the keys are draft_head, proposer"),
    (unhookable_target, "the hook on sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker could not be"),
    (another_plugins_hook, "another plugin has hooked sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_w"),
    (bug, "TypeError: 'NoneType' object is not callable"),
]


def broken(problem: Callable[[], None]) -> None:
    problem()
    load_and_create()


@pytest.mark.parametrize(("problem", "sentence"), PROBLEMS, ids=lambda value: getattr(value, "__name__", ""))
def test_in_strict_mode_the_process_ends_with_one_sentence(run: Run, problem: Any, sentence: str) -> None:
    outcome = run(broken, problem, strict=True)
    assert outcome.code == 1
    [line] = outcome.lines(INACTIVE)
    assert line.startswith(INACTIVE)
    assert sentence in line
    assert not outcome.created
    assert outcome.log.splitlines()[-1] == line, "the sentence is what the user sees last"


@pytest.mark.parametrize(("problem", "sentence"), PROBLEMS, ids=lambda value: getattr(value, "__name__", ""))
def test_otherwise_one_sentence_is_logged_and_the_stock_worker_stays(run: Run, problem: Any, sentence: str) -> None:
    outcome = run(broken, problem, strict=False)
    assert outcome.code == 0
    [line] = outcome.lines(INACTIVE)
    assert line.startswith(f"ERROR {INACTIVE}")
    assert sentence in line
    assert f"SGLang's built-in DFLASH worker would serve; set {STRICT}=1 to fail instead." in line
    # SGLang adds a traceback where there is something to debug.
    assert bool(outcome.lines("Failed to execute general plugin")) == (problem is bug)
    assert outcome.created == [STOCK]


# -- the hooks where all is well --------------------------------------------------------------------------------------


def resolved_args(target: str, drafter: str, **options: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    from sglang_dflash import cpu

    args = ServerArgs(
        model_path=target,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=drafter,
        **cpu.engine_arguments(),
    )
    args.resolve_once()
    if options:
        from sglang.srt.arg_groups.overrides import declare_resolution

        # The CPU has no stock worker to resolve for, so what it would not have served is declared afterwards.
        declare_resolution(args, "test", **options)
    return args


def create_for(target: str, drafter: str, options: dict[str, Any]) -> None:
    load()
    args = resolved_args(target, drafter, **options)
    print("resolved")
    print("created", created(server_args=args))


@pytest.fixture(scope="module")
def models(random_models: Any) -> tuple[str, str]:
    return str(random_models.target), str(random_models.drafter)


def test_a_served_configuration_gets_our_worker(run: Run, models: tuple[str, str]) -> None:
    for strict in (True, False):
        outcome = run(create_for, *models, {}, strict=strict)
        assert outcome.code == 0, outcome.log
        assert outcome.created == [OURS]
        assert not outcome.lines("built-in")


def test_an_unserved_configuration_goes_to_stock_with_one_line(run: Run, models: tuple[str, str]) -> None:
    with_map, settings = {"speculative_token_map": "map.pt"}, '{"draft_head": "fp8"}'
    for options, given, told in (
        ({}, "", ""),
        (with_map, "", " It ignores --speculative-token-map."),
        (with_map, settings, f" It ignores --speculative-token-map and {CONFIG_VARIABLE}."),
    ):
        unserved = {"enable_mixed_chunk": True, "enable_lora": True}
        outcome = run(create_for, *models, unserved | options, strict=False, settings=given)
        assert outcome.code == 0, outcome.log
        assert outcome.created == [STOCK]
        [line] = outcome.lines("built-in")
        assert line.startswith("WARNING SGLang's built-in DFLASH worker serves, not sglang-dflash ")
        assert line.endswith(f": --enable-lora; --enable-mixed-chunk.{told}")


def test_an_unserved_configuration_is_refused_in_strict_mode(run: Run, models: tuple[str, str]) -> None:
    outcome = run(create_for, *models, {"enable_mixed_chunk": True}, strict=True)
    assert outcome.code == 1
    assert outcome.lines("resolved")
    assert not outcome.created
    last = outcome.log.splitlines()[-1]
    assert last.startswith("ValueError: sglang-dflash does not serve this configuration: --enable-mixed-chunk. Remove ")
    assert last.endswith(f"or unset {STRICT} to let SGLang's built-in DFLASH worker serve it.")


def create_on_a_changed_scheduler(target: str, drafter: str) -> None:
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

    load()
    args = resolved_args(target, drafter)
    SchedulerInternalStateController._add_speculative = lambda self, state, more: None
    print("created", created(server_args=args))


def test_a_changed_scheduler_is_told_when_the_worker_is_made(run: Run, models: tuple[str, str]) -> None:
    difference = "_add_speculative: expected parameters (self, state), got (self, state, more); install sglang==0.5.23."
    outcome = run(create_on_a_changed_scheduler, *models, strict=False)
    assert outcome.created == [STOCK]
    assert len(outcome.lines(difference)) == 1
    outcome = run(create_on_a_changed_scheduler, *models, strict=True)
    assert outcome.code == 1
    assert difference in outcome.log.splitlines()[-1]


def other_algorithms() -> None:
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    stock = SpeculativeAlgorithm.create_worker
    before = {name: stock(SpeculativeAlgorithm[name], raw_args(name)) for name in ("EAGLE", "EAGLE3", "NGRAM")}
    load()
    assert SpeculativeAlgorithm.create_worker is not stock
    after = {name: SpeculativeAlgorithm[name].create_worker(raw_args(name)) for name in before}
    assert before == after
    assert speculative_hook.handle_speculative_decoding.__wrapped__  # type: ignore[attr-defined]
    args = raw_args("NGRAM", page_size=1)
    speculative_hook.handle_speculative_decoding(args)
    print("created", after)


def test_other_algorithms_are_left_alone(run: Run) -> None:
    for strict in (True, False):
        outcome = run(other_algorithms, strict=strict)
        assert outcome.code == 0, outcome.log
        assert len(outcome.created) == 1
        assert not outcome.lines("DFLASH worker")


def scheduler_side(target: str, drafter: str) -> None:
    """The scheduler has imported `validate_dflash_request` by name long before the worker is made."""
    from types import SimpleNamespace

    from sglang.srt.managers import scheduler
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController
    from sglang.srt.sampling.sampling_params import SamplingParams

    load()
    args = resolved_args(target, drafter)
    for _ in range(2):
        created(server_args=args)
    options = ("return_logprob", "return_hidden_states", "return_sampling_mask", "custom_logit_processor")
    plain = dict.fromkeys((*options, "lora_id", "positional_embed_overrides"))
    greedy, marked = SamplingParams(temperature=0), SamplingParams(temperature=0, watermark={"enabled": True})
    assert scheduler.validate_dflash_request(SimpleNamespace(**plain, sampling_params=greedy), True) is None
    print("refused", scheduler.validate_dflash_request(SimpleNamespace(**plain, sampling_params=marked), True))
    controller = SimpleNamespace(
        scheduler=SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: False, is_dspark=lambda: False)),
        _average_accept_length=lambda: 2.5,
    )
    state: dict[str, Any] = {}
    SchedulerInternalStateController._add_speculative(controller, state)
    print("state", state)
    name = "get_req_to_token_extra_context_len"
    found = [vars(module)[name] for module in list(sys.modules.values()) if name in vars(module)]
    assert len(found) > 1
    assert all(hasattr(function, "__wrapped__") for function in found)


def test_requests_are_checked_and_the_server_tells_its_worker(run: Run, models: tuple[str, str]) -> None:
    outcome = run(scheduler_side, *models, strict=True)
    assert outcome.code == 0, outcome.log
    [refused] = outcome.lines("refused")
    assert "cannot serve watermark" in refused
    [state] = outcome.lines("state {")
    assert "'avg_spec_accept_length': 2.5, 'speculative_worker': 'sglang_dflash.worker.DFlashWorker " in state


@pytest.mark.parametrize(("theirs", "reserved", "columns"), [(16, 32, 32), (40, 32, 40)])
def test_a_row_of_the_token_table_has_room_for_all_that_a_round_reserves(
    monkeypatch: pytest.MonkeyPatch, theirs: int, reserved: int, columns: int
) -> None:
    from sglang.srt.mem_cache import allocation_sizing

    from sglang_dflash import hooks

    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: reserved)
    assert hooks._row_headroom(lambda: theirs) == columns


def check(problem: Callable[[], None] | None) -> None:
    from sglang_dflash import cli

    if problem is not None:
        problem()
    sys.exit(cli.main(["check"]))


@pytest.mark.parametrize(
    ("problem", "code", "worker"),
    [
        (None, 0, "sglang_dflash.worker.DFlashWorker"),
        (another_version, 1, "SGLang's built-in DFLASH worker"),
        (missing_target, 1, "SGLang's built-in DFLASH worker"),
    ],
)
def test_the_check_command_tells_which_worker_would_run(run: Run, problem: Any, code: int, worker: str) -> None:
    outcome = run(check, problem, strict=True)
    assert outcome.code == code, outcome.log
    assert outcome.log.splitlines()[-1].startswith(f"worker         {worker}")
    failures = outcome.lines("FAIL") + outcome.lines("got 0.5.22; run")
    assert len(failures) == (0 if problem is None else 1)


def test_sglangs_own_refusal_of_a_request_stays() -> None:
    from types import SimpleNamespace

    from sglang_dflash import hooks
    from sglang_dflash.host import requests

    asked: list[Any] = []

    def original(req: Any, enable_overlap: bool) -> str:
        asked.append((req, enable_overlap))
        return "theirs"

    req = SimpleNamespace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "refusal", lambda req, seeded, grammar_backend: None)
        assert hooks._validate_request(original, req, True, seeded=False, grammar_backend=None) == "theirs"
        assert asked == [(req, True)]
        patch.setattr(requests, "refusal", lambda req, seeded, grammar_backend: "ours")
        assert hooks._validate_request(original, req, True, seeded=False, grammar_backend=None) == "ours"
        assert len(asked) == 1


LIGHT = """
import sys, sglang.srt.plugins
before = set(sys.modules)
sglang.srt.plugins.load_plugins()
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
assert SpeculativeAlgorithm.create_worker.__wrapped__
added = sorted(set(sys.modules) - before)
heavy = {"sglang_dflash.worker", "sglang_dflash_kernels", "sglang.srt.mem_cache.memory_pool"}
assert not heavy & set(added)
assert len(added) < 200, added
"""


def test_loading_costs_a_process_next_to_nothing(tmp_path: Path) -> None:
    """Every process of SGLang loads plugins, the tokenizer's and the detokenizer's too. In a process of its own."""
    environ = {**os.environ, STRICT: "1", "SGLANG_PLUGINS": "sglang_dflash"}
    environ |= {"SGLANG_DFLASH_CPU": "0", "SGLANG_USE_CPU_ENGINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


def profiled_stock() -> None:
    os.environ["SGLANG_DFLASH_RANGES"] = "stock"
    load()
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    before = DFlashWorkerV2._accept_block
    print("created", created())
    print("marked", DFlashWorkerV2._accept_block is not before)


def test_the_built_in_worker_that_is_profiled_is_itself_with_its_stages_marked(run: Run) -> None:
    outcome = run(profiled_stock, strict=True)
    assert outcome.code == 0, outcome.log
    assert outcome.created == [STOCK]
    assert outcome.lines("marked True")
    assert not outcome.lines(INACTIVE)


def test_where_one_target_is_taken_none_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_dflash import hooks

    registered: list[str] = []
    monkeypatch.setattr(HookRegistry, "_patched", {"theirs"})
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: registered.append(target))
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: HookRegistry._patched.update(registered))
    monkeypatch.setattr(hooks, "_OURS", set())
    [problem] = hooks._apply({"free": print, "theirs": print})
    assert problem.startswith("another plugin has hooked theirs already; ")
    assert not registered
    assert hooks._apply({"free": print}) == []
    assert registered == ["free"]
