"""An SGLang offline engine in a process of its own, so that several with different settings can stand side by side."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from sglang_dflash.cpu import bootstrap

Kind = Literal["plain", "stock", "ours"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request's answer.

    Attributes:
        token_ids: generated tokens.
        text: the same as text.
        meta: SGLang's meta_info, speculative counts among it.
    """

    token_ids: list[int]
    text: str
    meta: dict[str, Any]

    @property
    def num_rounds(self) -> int:
        """Decode rounds of this request; 0 for plain decoding."""
        return int(self.meta.get("spec_verify_ct", 0))

    @property
    def accepted_histogram(self) -> list[int]:
        """Entry i: rounds that accepted i drafts (the bonus token not counted)."""
        return list(self.meta.get("spec_correct_drafts_histogram", []))


class EngineProcess:
    """A context manager around one engine.

    Args:
        kind: `plain` decoding, SGLang's built-in (`stock`) DFLASH worker, or `ours`.
        log: file of the engine's output.
        env: environment variables of the engine's processes.
        server_args: arguments of `sglang.Engine`; without a GPU those of the CPU engine are added.

    Construction and calls raise ValueError where the engine raised one (its arguments are wrong, or it refuses the
    request, and goes on), and RuntimeError with the log's end where it failed otherwise.
    """

    def __init__(self, kind: Kind, log: Path, env: dict[str, str] | None = None, **server_args: Any) -> None:
        self.kind = kind
        self.log = log
        if kind == "plain":
            server_args = {k: v for k, v in server_args.items() if not k.startswith("speculative_")}
        else:
            server_args = {"speculative_algorithm": "DFLASH", **server_args}
        environment = {"SGLANG_PLUGINS": "none"} if kind == "stock" else {"SGLANG_DFLASH_STRICT": "1"}
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        environment |= env or {}
        self._process = context.Process(target=_serve, args=(remote, str(log), environment, server_args))
        self._process.start()
        remote.close()
        try:
            self._receive()
        except ValueError:
            self._end()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and its children."""
        if self._process.is_alive():
            self._connection.send(None)
            self._process.join(60)
            if self._process.is_alive():
                self._process.kill()

    def generate(
        self,
        input_ids: list[list[int]],
        *,
        rids: list[str] | None = None,
        each: list[dict[str, Any]] | None = None,
        request: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> tuple[list[Answer], float]:
        """Answers to a batch of prompts and the call's wall seconds.

        Sampling parameters are `sampling` and, for every prompt, its entry of `each`; greedy where neither says more.
        `request` holds other arguments of `sglang.Engine.generate`.
        """
        params = [{"temperature": 0, **sampling, **own} for own in each or [{}] * len(input_ids)]
        self._connection.send(("generate", (input_ids, rids, params, request or {})))
        answers, wall_s = self._receive()
        return [Answer(*answer) for answer in answers], wall_s

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Any other method of `sglang.Engine`, such as `flush_cache` or `get_server_info`."""
        self._connection.send((method, (args, kwargs)))
        return self._receive()

    def _receive(self) -> Any:
        try:
            outcome, value = self._connection.recv()
        except EOFError:
            outcome, value = "error", f"the engine ended with exit code {self._process.exitcode}"
        if outcome == "mistake":
            raise ValueError(value)
        if outcome != "ok":
            self._end()
            tail = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-40:])
            raise RuntimeError(f"{self.kind} engine: {value}\n--- end of {self.log} ---\n{tail}")
        return value

    def _end(self) -> None:
        """Of an engine that failed nothing is left when its failure is told."""
        self._process.join(20)
        self._process.kill()
        self._process.join(20)


def precision(dtype: str | None = None) -> dict[str, Any]:
    """Arguments of `sglang.Engine` for float32 or bfloat16; None means bfloat16 on a GPU and float32 on a CPU."""
    dtype = dtype or ("float32" if bootstrap.wanted() else "bfloat16")
    # FlashAttention 3, SGLang's choice on Hopper, has no float32.
    triton = dtype == "float32" and not bootstrap.wanted()
    return {"dtype": dtype, **({"attention_backend": "triton"} if triton else {})}


def _serve(connection: Connection, log: str, env: dict[str, str], server_args: dict[str, Any]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(env)
    try:
        engine = _start(server_args)
        connection.send(("ok", None))
        while (request := connection.recv()) is not None:
            try:
                connection.send(("ok", _answer(engine, *request)))
            except ValueError as refusal:
                connection.send(("mistake", str(refusal)))
        engine.shutdown()
    except BaseException as error:
        traceback.print_exc()
        # Whole: a misfit names every problem on a line of its own.
        mistake = isinstance(error, ValueError)
        told = str(error) if mistake else "".join(traceback.format_exception_only(error)).strip()
        connection.send(("mistake" if mistake else "error", told))
        # SGLang would wait for its other processes, which wait for requests.
        for child in multiprocessing.active_children():
            child.kill()
        raise


def _start(server_args: dict[str, Any]) -> Any:
    from sglang_dflash import cpu

    if bootstrap.wanted():
        bootstrap.install()
        server_args = {**cpu.engine_arguments(), **server_args}
    import sglang

    return sglang.Engine(**server_args)


def _answer(engine: Any, method: str, args: tuple[Any, ...]) -> Any:
    if method != "generate":
        positional, keywords = args
        return getattr(engine, method)(*positional, **keywords)
    input_ids, rids, sampling, request = args
    start = time.perf_counter()
    outputs = engine.generate(input_ids=input_ids, sampling_params=sampling, rid=rids, **request)
    wall_s = time.perf_counter() - start
    return [(o["output_ids"], o.get("text", ""), o["meta_info"]) for o in outputs], wall_s


def generate_in_batches(
    engine: EngineProcess, prompts: Sequence[Sequence[int]], size: int, **sampling: Any
) -> tuple[list[Answer], float]:
    """Answers to all prompts, `size` at a time, and the wall seconds of the calls; the last batch may be smaller."""
    answers, seconds = [], 0.0
    for start in range(0, len(prompts), size):
        batch, wall_s = engine.generate([list(prompt) for prompt in prompts[start : start + size]], **sampling)
        answers += batch
        seconds += wall_s
    return answers, seconds
