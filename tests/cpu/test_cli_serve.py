"""`sglang-dflash serve --recipe` from start to stop: the process becomes SGLang's server, and our worker answers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import __version__
from sglang_dflash.cpu import bootstrap

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not bootstrap.wanted(), reason="the recipe is for a machine without a GPU"),
]

START_S = 300
STOP_S = 60


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("serve")
    # A folder of the package's name must not hide the installed one.
    (folder / "sglang_dflash").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # What conftest set for engines in this process must not reach a server that users start from a shell.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "PYTHONPATH", "TRITON_"))}
    if home := os.environ.get("SGLANG_DFLASH_HOME"):
        environment["SGLANG_DFLASH_HOME"] = home
    script = str(Path(sys.executable).with_name("sglang-dflash"))
    log_path = folder / "log"
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [script, "serve", "--recipe", "cpu/smollm2-135m", "--port", str(port), "--max-running-requests", "4"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}", log_path)
            yield f"http://127.0.0.1:{port}"
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            # Not /health: it answers before the model does.
            with urllib.request.urlopen(f"{url}/health_generate", timeout=60):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    pytest.fail(
        f"no server after {START_S} s, exit code {process.poll()}:\n{log_path.read_text(errors='replace')[-4000:]}"
    )


def test_our_worker_serves_with_the_recipes_flags_and_the_users(server: str) -> None:
    info = call(f"{server}/server_info")
    assert info["internal_states"][0]["speculative_worker"] == f"sglang_dflash.worker.DFlashWorker {__version__}"
    assert info["dtype"] == "float32"
    assert info["speculative_num_draft_tokens"] == 8
    assert info["max_running_requests"] == 4


def test_it_answers(server: str) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "default", "messages": [question], "temperature": 0, "max_tokens": 16}
    answer = call(f"{server}/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
