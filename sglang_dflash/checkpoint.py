"""Drafter checkpoints: every tensor accounted for before a weight is read, then read or written.

The config's part is in `drafter_config`, the comparison with a target in `drafter_fit`; both are re-exported here.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_dflash.drafter_config import (
    DrafterConfig,
    config_for_target,
    config_json,
    default_taps,
    read_config,
)
from sglang_dflash.drafter_fit import TargetFacts, last_tap, resolve_mask_token_id, validate
from sglang_dflash.drafter_variants import MASK_EMBEDDING_FILE, SERVED

__all__ = [
    "DrafterConfig",
    "TargetFacts",
    "check_tensors",
    "config_for_target",
    "config_json",
    "default_taps",
    "expected_tensors",
    "last_tap",
    "load_mask_embedding",
    "load_tensors",
    "random_drafter",
    "read_config",
    "read_headers",
    "resolve_mask_token_id",
    "sglang_form",
    "standard_name",
    "validate",
    "write_checkpoint",
]

# Names of the encoder's export that SGLang's loader accepts too.
_ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}

# Tensors that a checkpoint of the speculators form may carry beside the drafter, and why they are not read.
_TARGETS_OWN = {
    "embed_tokens.weight": "the target's own embedding is used",
    "lm_head.weight": "the target's own head is used",
    "verifier_lm_head.weight": "of training only; the target's own head is used",
    "verifier_norm.weight": "of training only; the target's own norm is used",
}

# What an unexpected tensor tells about the drafter, by a part of its name.
_CAUSES = (
    (("t2d", "d2t"), "a reduced draft vocabulary is not served; export the drafter with the whole vocabulary"),
    (("prefix_gru.", "embed_proj."), "a Domino drafter whose config lost projector_type"),
    (("candidate_selector.",), "a DFlash2 drafter whose config lost selector_rank and selector_top_k"),
    (("attention_conv.", "mlp_conv."), "a DFlash2 drafter whose config lost conv_kernel_size and conv_group_size"),
    (("lilicorr.",), "a LiLiCorr drafter whose config lost its lilicorr_* keys"),
    (("markov", "confidence"), "a DSpark drafter whose config lost markov_rank"),
    (("aux_hidden_norms.", "g_proj."), "a Laguna drafter"),
    (("qkv_proj.", "gate_up_proj."), "fused projections; split them into q/k/v_proj and gate/up_proj"),
    (("scale", "zero_point", "packed"), "a quantized drafter; use the unquantized one"),
    (("embed_tokens", "lm_head"), "a drafter with its own embedding or head is not served"),
    ((".bias",), "attention_bias in config.json says otherwise"),
    (("layers.",), "num_hidden_layers in config.json may be too small"),
)


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a safetensors header describes it. Filled by `read_headers`."""

    name: str  # as in the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as BF16
    file: Path


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a drafter: 11 a layer, 4 more with attention_bias, and 3 besides."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * head, config.num_key_value_heads * head
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_hidden_layers):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, q_size),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if config.attention_bias:
            sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size, "o_proj": hidden}
            layer |= {f"self_attn.{name}.bias": (size,) for name, size in sizes.items()}
        tensors |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return tensors


def read_headers(path: str | Path) -> list[TensorHeader]:
    """Every tensor of a checkpoint directory from the safetensors headers alone: no weight is read.

    The files are those of `model.safetensors.index.json`, else every `*.safetensors`.
    """
    return [header for file in _weight_files(Path(path)) for header in _read_header(file)]


def check_tensors(path: str | Path, config: DrafterConfig) -> dict[str, str]:
    """Compare a checkpoint's tensors with the drafter's, by name and shape, without reading a weight.

    Returns the tensors that are present and not read, with the reason. Raises one ValueError that names every missing,
    unexpected, doubled or misshapen tensor and a file cut short, with the likely cause where it is known.
    """
    if config.variant not in SERVED:
        raise ValueError(f"{path}: expected a plain DFlash drafter, got variant {config.variant}; serve it another way")
    expected, ignored, problems = expected_tensors(config), dict[str, str](), list[str]()
    found: set[str] = set()
    for header in read_headers(path):
        name = standard_name(header.name)
        if name in found or name in ignored:
            problems.append(f"{name}: expected once, got again in {header.file.name}; remove one of the files")
        elif name.endswith("rotary_emb.inv_freq"):
            ignored[name] = "recomputed from rope_theta"
        elif (reason := _ignorable(name, header.shape, config)) is not None:
            ignored[name] = reason
        elif name not in expected:
            problems.append(f"{name} {list(header.shape)}: unexpected; {_cause(name)}")
        else:
            found.add(name)
            if header.shape != expected[name]:
                problems.append(_misshapen(name, header.shape, expected[name], config))
    problems += _missing(expected.keys() - found, config)
    problems += [problem for file in _weight_files(Path(path)) if (problem := _cut_short(file))]
    if problems:
        raise ValueError(f"{path}: the tensors do not fit config.json:\n  - " + "\n  - ".join(problems))
    return ignored


def load_tensors(
    path: str | Path, config: DrafterConfig, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """The drafter's tensors under their standard names, all of `expected_tensors`, checked first.

    `dtype` None keeps the file's.
    """
    check_tensors(path, config)
    expected, tensors = expected_tensors(config), dict[str, torch.Tensor]()
    for file in _weight_files(Path(path)):
        with safe_open(file, framework="pt", device=str(device)) as weights:
            for name in weights.keys():  # noqa: SIM118 - a safe_open handle does not iterate
                if (standard := standard_name(name)) in expected:
                    tensors[standard] = weights.get_tensor(name).to(dtype=dtype)
    return tensors


def load_mask_embedding(path: str | Path, config: DrafterConfig, mask_token_id: int) -> torch.Tensor | None:
    """The trained embedding (H) of the block's mask slots from `mask_embedding.pt`; None where there is no such file.

    Raises ValueError where the file is of another drafter or mask token, or holds an embedding for each position.
    """
    file = Path(path) / MASK_EMBEDDING_FILE
    if not file.exists():
        return None
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        embedding_H, trained_id = saved["embedding"], int(saved["mask_token_id"])
    except (pickle.UnpicklingError, RuntimeError, LookupError, TypeError, ValueError, EOFError) as error:
        raise ValueError(f"{file}: expected embedding and mask_token_id, got {error!r}; save the two") from error
    if trained_id != mask_token_id:
        raise ValueError(f"{file}: expected mask_token_id {mask_token_id}, got {trained_id}; correct the config's")
    if saved.get("per_position") or tuple(embedding_H.shape) != (config.hidden_size,):
        got = "one for each position" if saved.get("per_position") else list(embedding_H.shape)
        raise ValueError(f"{file}: expected an embedding [{config.hidden_size}], got {got}; train one for all slots")
    return embedding_H


def write_checkpoint(path: str | Path, config: DrafterConfig, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a checkpoint in the z-lab form, which SGLang 0.5.23 reads, and return its directory.

    `tensors` are all of `expected_tensors`, of one dtype. config.json is written last: without it, no checkpoint.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != expected_tensors(config):
        wrong = sorted({name for name, _ in shapes.items() ^ expected_tensors(config).items()})
        raise ValueError(f"expected the tensors of expected_tensors(config), got a difference in {wrong}; pass those")
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1:
        raise ValueError(f"expected one dtype, got {sorted(map(str, dtypes))}; convert the tensors to one")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_config(directory, config, str(dtypes.pop()).removeprefix("torch."))
    return directory


def sglang_form(path: str | Path, cache_dir: str | Path) -> Path:
    """A directory that SGLang 0.5.23 can load the drafter from.

    A checkpoint of the z-lab form is returned as it is. One of the speculators form is written again in the z-lab form
    under `cache_dir`, its weight files linked where they hold the drafter alone, copied without the rest otherwise.

    A sliding layer of the speculators form sees `sliding_window` tokens before the anchor from every slot of the block;
    SGLang counts the window from the slot itself, so late slots see up to `block_size` tokens less.
    """
    source = Path(path)
    config = read_config(source)
    if config.form == "z-lab":
        return source
    ignored = check_tensors(source, config)
    files, mask = _weight_files(source), list(source.glob(MASK_EMBEDDING_FILE))
    stamp = [
        (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
        for file in [source / "config.json", *files, *mask]
    ]
    directory = Path(cache_dir) / f"{source.name}-{hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]}"
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    for file in mask:
        shutil.copy(file, directory)
    if all(name.endswith("rotary_emb.inv_freq") for name in ignored):
        index = source / "model.safetensors.index.json"
        for file in [*files, index] if index.exists() else files:
            link = directory / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file.resolve())
        _write_config(directory, config, _dtype_name(source, config))
        return directory
    return write_checkpoint(directory, config, load_tensors(source, config))


def random_drafter(
    path: str | Path,
    target_config: Mapping[str, Any],
    *,
    seed: int,
    mask_token_id: int,
    num_layers: int = 5,
    block_size: int = 16,
    target_layer_ids: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write an untrained drafter for a target, for demos, tests and benchmarks, and return its directory.

    Sizes come from the target's config.json (`target_config`). Matrices are normal with deviation 0.02, norms 1; the
    same seed gives the same file. Its drafts are right about as often as chance.
    """
    config = config_for_target(target_config, num_layers, block_size, mask_token_id, target_layer_ids)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape, dtype=dtype)
        if len(shape) == 1
        else torch.empty(shape).normal_(std=0.02, generator=generator).to(dtype)
        for name, shape in expected_tensors(config).items()
    }
    return write_checkpoint(path, config, tensors)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text()).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: expected a weight_map, got {weight_map!r}; download the index again")
        names = sorted(set(weight_map.values()))
        files = [directory / name for name in names]
        if absent := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{directory}: expected the shards of {index.name}, got none of {absent}; download them")
        return files
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        other = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
        got = (
            f"{other}; convert them with safetensors.torch.save_file"
            if other
            else "no weight file; download the weights"
        )
        raise ValueError(f"{directory}: expected *.safetensors, got {got}")
    return files


def _header_json(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file (8 bytes of length, little endian, then JSON) and the offset of its data."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length <= os.fstat(stream.fileno()).st_size else b""
    try:
        return json.loads(text), 8 + length
    except ValueError:
        raise ValueError(f"{file}: expected a safetensors header, got none; download the file again") from None


def _read_header(file: Path) -> list[TensorHeader]:
    header, _ = _header_json(file)
    return [
        TensorHeader(name, tuple(entry["shape"]), entry["dtype"], file)
        for name, entry in header.items()
        if name != "__metadata__"
    ]


def _cut_short(file: Path) -> str | None:
    header, start = _header_json(file)
    end = start + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    size = file.stat().st_size
    return None if size == end else f"{file.name}: expected {end} bytes, got {size}; download the file again"


def standard_name(name: str) -> str:
    """A tensor's name as `expected_tensors` has it, from one that SGLang's loader accepts."""
    return _ALIASES.get(name, name.removeprefix("model."))


def _ignorable(name: str, shape: tuple[int, ...], config: DrafterConfig) -> str | None:
    """Why a tensor need not be read: the speculators form may carry copies of the target's own tensors."""
    whole = (config.vocab_size, config.hidden_size)
    if config.form != "speculators" or shape not in (whole, (config.hidden_size,)):
        return None
    return _TARGETS_OWN.get(name)


def _cause(name: str) -> str:
    for parts, cause in _CAUSES:
        if any(part in name for part in parts):
            return cause
    return "no part of a DFlash drafter"


def _misshapen(name: str, got: tuple[int, ...], expected: tuple[int, ...], config: DrafterConfig) -> str:
    problem = f"{name}: expected {list(expected)}, got {list(got)}"
    if name == "fc.weight" and len(got) == 2 and got[1] % config.hidden_size == 0 and got[0] == config.hidden_size:
        taps, listed = got[1] // config.hidden_size, len(config.target_layer_ids)
        return f"{problem}; trained with {taps} taps, target_layer_ids lists {listed}: correct the list"
    keys = {
        "self_attn": "num_attention_heads, num_key_value_heads, head_dim and hidden_size",
        "mlp": "intermediate_size and hidden_size",
    }
    key = next((keys[part] for part in keys if f".{part}." in name), "hidden_size")
    return f"{problem}; correct {key} in config.json"


def _missing(names: set[str], config: DrafterConfig) -> list[str]:
    """One line a missing tensor, one for a layer that is missing altogether."""
    problems = []
    size = len(expected_tensors(replace(config, num_hidden_layers=1))) - 3
    for i in range(config.num_hidden_layers):
        layer = {name for name in names if name.startswith(f"layers.{i}.")}
        if len(layer) == size:
            problems.append(f"layers.{i}.*: missing; num_hidden_layers in config.json may be too large")
            names = names - layer
    return problems + [f"{name}: missing; export the drafter again" for name in sorted(names)]


def _dtype_name(directory: Path, config: DrafterConfig) -> str:
    """The dtype of the drafter's tensors by torch's name."""
    expected = expected_tensors(config)
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    kinds = {header.dtype for header in read_headers(directory) if standard_name(header.name) in expected}
    if len(kinds) != 1 or not kinds <= names.keys():
        raise ValueError(f"{directory}: expected tensors of one of {sorted(names)}, got {sorted(kinds)}; convert them")
    return names[kinds.pop()]


def _write_config(directory: Path, config: DrafterConfig, dtype: str) -> None:
    (directory / "config.json").write_text(json.dumps(config_json(config, dtype), indent=2) + "\n")
