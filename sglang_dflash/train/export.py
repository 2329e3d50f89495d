"""A trained drafter in the speculators form, which vLLM reads.

The tensors keep their names and bits; only config.json differs. In this form taps count Transformers' `hidden_states`
(one higher than the z-lab form's layers), and the target is named as the verifier.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from sglang_dflash import checkpoint
from sglang_dflash.drafter_config import DrafterConfig

# The release of the speculators library whose form is written.
SPECULATORS_VERSION = "0.9.0"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Keys of the z-lab form that are no part of a Qwen3 layer's config.
_NOT_OF_LAYERS = ("architectures", "block_size", "dflash_config", "num_target_layers", "is_causal")


def to_speculators(src: str | Path, dst: str | Path, verifier: Mapping[str, Any], *, link: bool = False) -> Path:
    """Write the z-lab drafter `src` in the speculators form to `dst`, a new or empty folder, and return the folder.

    Args:
        verifier: the target: `name_or_path`, a hub id or a path that the server can open, and `architectures`, a list
            as in the target's config.json.
        link: make symbolic links to the weight files of `src` instead of copies, where they hold the drafter's tensors
            alone and under their standard names; otherwise they are written again.

    Read back, a drafter whose layers are all bidirectional says `is_causal` False, also where `src` left that open.

    Raises:
        ValueError: `src` is not a sound drafter of the z-lab form, the form cannot express it, `verifier` is wrong, or
            `dst` holds files.
    """
    source, directory = Path(src), Path(dst)
    config = checkpoint.read_config(source)
    if config.form != "z-lab":
        raise ValueError(f"{source}: expected a drafter of the z-lab form, got the {config.form} form; use it as it is")
    checkpoint.check_tensors(source, config)
    raw = speculators_json(config, verifier, _dtype(source))
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory}: expected a new or empty folder, got one with files; name another or empty it")
    directory.mkdir(parents=True, exist_ok=True)
    headers = checkpoint.read_headers(source)
    if {header.name for header in headers} == checkpoint.expected_tensors(config).keys():
        _place(source, directory, {header.file for header in headers}, link)
    else:
        tensors = checkpoint.load_tensors(source, config)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    # Last: without config.json the folder is no drafter.
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    return directory


def speculators_json(config: DrafterConfig, verifier: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of the speculators form; `dtype` is the tensors' dtype by torch's name.

    `sliding_window_non_causal` is set wherever every layer is bidirectional: the library reads it for sliding layers
    alone, but some releases of vLLM make every layer of the drafter causal where it is false.

    Raises ValueError that lists what the form cannot express.
    """
    sliding = [config.layer_type(i) == "sliding_attention" for i in range(config.num_hidden_layers)]
    causal = [config.layer_is_causal(i) for i in range(config.num_hidden_layers)]
    problems = _verifier_problems(verifier)
    if config.mask_token_id is None:
        token = "the mask token" if config.mask_token is None else repr(config.mask_token)
        problems.append(f"mask_token_id: expected an id, got none; add the tokenizer's id of {token} to config.json")
    if config.attention_value_scale is not None:
        scale = config.attention_value_scale
        problems.append(f"attention_value_scale: expected none, got {scale}; multiply the weights of v_proj by it")
    if any(is_causal and not is_sliding for is_causal, is_sliding in zip(causal, sliding)):
        problems.append("is_causal: expected full layers that are bidirectional, got causal ones; serve it with SGLang")
    if problems:
        raise ValueError(f"{config.source}: no export to the speculators form:\n  - " + "\n  - ".join(problems))
    layers = {k: v for k, v in checkpoint.config_json(config, dtype).items() if k not in _NOT_OF_LAYERS}
    optional = {"num_target_layers": config.num_target_layers, "mask_token": config.mask_token}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            # The anchor is given: a block of K tokens drafts K - 1.
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "default_proposal_method": "greedy",
            "verifier": {key: verifier[key] for key in ("name_or_path", "architectures")},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not any(causal),
        "dtype": dtype,
        **{key: value for key, value in optional.items() if value is not None},
    }


def _verifier_problems(verifier: Mapping[str, Any]) -> list[str]:
    problems = []
    name, architectures = verifier.get("name_or_path"), verifier.get("architectures")
    if not isinstance(name, str) or not name:
        problems.append(f"verifier.name_or_path: expected the target's hub id or path, got {name!r}; pass it")
    if (
        not isinstance(architectures, list)
        or not architectures
        or not all(isinstance(x, str) and x for x in architectures)
    ):
        problems.append(
            f"verifier.architectures: expected the list of the target's config.json, got {architectures!r}; pass it"
        )
    if unknown := sorted(verifier.keys() - {"name_or_path", "architectures"}):
        problems.append(f"verifier: expected name_or_path and architectures, got {', '.join(unknown)} too; remove it")
    return problems


def _dtype(source: Path) -> str:
    kinds = {header.dtype for header in checkpoint.read_headers(source)}
    if len(kinds) != 1 or not kinds <= _DTYPES.keys():
        raise ValueError(f"{source}: expected tensors of one of {sorted(_DTYPES)}, got {sorted(kinds)}; convert them")
    return _DTYPES[kinds.pop()]


def _place(source: Path, directory: Path, weights: set[Path], link: bool) -> None:
    index = source / _INDEX
    for file in sorted(weights | ({index} if index.is_file() else set())):
        if link:
            (directory / file.name).symlink_to(file.resolve())
        else:
            shutil.copyfile(file, directory / file.name)
