"""A server of the tests' models as a user starts it, and a client of its native endpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from sglang_dflash import cpu, demo
from tests.engine.setup import HAS_CUDA, PYTHONPATH, engine_args

START_TIMEOUT_S = 300
REQUEST_TIMEOUT_S = 600


@contextlib.contextmanager
def serve(models: demo.Models, log: Path, env: dict[str, str], *, plain: bool = False, **args: Any) -> Iterator[str]:
    """`sglang-dflash serve` on a free port of this machine, or SGLang's server without speculation; its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = ["sglang.launch_server"] if plain else ["sglang_dflash.cli", "serve"]
    command = [sys.executable, "-m", *module, "--host", "127.0.0.1", "--port", str(port)]
    args = {**engine_args(models), **args}
    if plain:
        args = {name: value for name, value in args.items() if not name.startswith("speculative_")}
        args |= {} if HAS_CUDA else cpu.engine_arguments()
    for name, value in args.items():
        flag = f"--{name.replace('_', '-')}"
        values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        if value is not False:
            command += [flag] if value is True else [flag, *values]
    environment = {**os.environ, "SGLANG_DFLASH_STRICT": "1", "PYTHONPATH": PYTHONPATH, **env}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(process, url, log)
        yield url
        assert process.poll() is None, f"the server ended\n{tail(log)}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended while starting\n{tail(log)}"
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(f"{url}/health", timeout=30).status_code == 200:
                return
        time.sleep(1)
    raise AssertionError(f"the server was not up after {START_TIMEOUT_S} s\n{tail(log)}")


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])


def generate(url: str, input_ids: list[int], rid: str, max_new_tokens: int, **params: Any) -> dict[str, Any]:
    """One greedy request to the native endpoint; its JSON answer."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **params}
    body = {"input_ids": input_ids, "rid": rid, "sampling_params": sampling}
    response = requests.post(f"{url}/generate", json=body, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()
