"""A drafter in one file of 8 bits a weight: its size, its error, the same bytes every time, and damage told."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_checkpoint_config import SMOLLM2

from sglang_dflash.checkpoint import (
    DrafterConfig,
    check_tensors,
    config_for_target,
    expected_tensors,
    load_tensors,
    random_drafter,
    read_config,
    write_checkpoint,
)
from sglang_dflash.train import compact
from sglang_dflash.train.compact import GROUP, KIND, MAX_CODE, dequantize, pack, quantize, unpack

TARGET = {
    "hidden_size": 80,  # no multiple of GROUP
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 50,
    "rope_theta": 1e5,
}
CONFIG = config_for_target(TARGET, 2, 4, 3, None)
NUM_MATRICES = 2 * 7 + 1
MAX_BYTES = 20_000_000


def drafter(path: Path, dtype: torch.dtype = torch.bfloat16, config: DrafterConfig = CONFIG) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in expected_tensors(config).items()
    }
    return write_checkpoint(path, config, tensors)


def rewritten(path: Path, source: Path, change_about=lambda about: None, change_tensors=lambda tensors: None) -> Path:
    """A copy of a compact file with its description or tensors changed; the checksum stays."""
    tensors = load_file(source)
    with safe_open(source, framework="pt") as opened:
        about = json.loads(opened.metadata()[KIND])
    change_about(about)
    change_tensors(tensors)
    save_file(tensors, path, metadata={KIND: json.dumps(about)})
    return path


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 0.02, 3.0, 1e4])
@pytest.mark.parametrize("columns", [1, GROUP, GROUP + 16, 3 * GROUP])
def test_a_weight_is_within_half_a_step(scale, columns):
    """Also where float16 scales are subnormal, whose rounding alone could be more than half a step."""
    weight = torch.randn(40, columns, generator=torch.Generator().manual_seed(1)) * scale
    weight[3, 0] = weight.abs().max() * 8  # an outlier
    weight[5] = 0
    codes, scales = quantize(weight)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float16)
    assert scales.shape == (40, -(-columns // GROUP))
    assert int(codes.min()) >= -MAX_CODE
    assert int(codes.max()) <= MAX_CODE
    step = scales.float().repeat_interleave(GROUP, dim=1)[:, :columns]
    error = (dequantize(codes, scales) - weight).abs()
    assert bool((error <= step * (0.5 + 1e-5)).all())
    assert bool((dequantize(codes, scales)[5] == 0).all())


def test_a_step_is_as_small_as_float16_allows():
    weight = torch.randn(40, 2 * GROUP, generator=torch.Generator().manual_seed(1)) * 0.02
    _, scales = quantize(weight)
    exact = weight.view(40, 2, GROUP).abs().amax(-1) / MAX_CODE
    assert bool((scales.float() >= exact).all())
    assert bool((scales.float() <= exact * (1 + 2**-10)).all())


def test_groups_do_better_than_one_scale_a_row():
    """The measured reason for GROUP: an outlier coarsens its own group alone."""
    torch.manual_seed(0)
    weight = torch.distributions.StudentT(4.0).sample((64, 576)) * 0.02
    scale = weight.abs().amax(1, keepdim=True) / MAX_CODE
    by_row = ((weight / scale).round() * scale - weight).square().mean()
    by_group = (dequantize(*quantize(weight)) - weight).square().mean()
    assert by_group < 0.6 * by_row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unpacked_it_is_the_drafter_within_half_a_step(tmp_path, dtype):
    source = drafter(tmp_path / "source", dtype)
    unpacked = unpack(pack(source, tmp_path / "drafter.safetensors"), tmp_path / "unpacked")
    config = read_config(unpacked)
    assert config == CONFIG
    assert check_tensors(unpacked, config) == {}
    want = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    assert json.loads((unpacked / "config.json").read_text()) == want
    before, after = load_tensors(source, config, torch.float32), load_tensors(unpacked, config)
    for name, tensor in after.items():
        assert tensor.dtype == torch.bfloat16
        if tensor.ndim == 1:
            assert torch.equal(tensor, before[name].bfloat16())
            continue
        codes, scales = quantize(before[name])
        assert torch.equal(tensor, dequantize(codes, scales).bfloat16())
        step = scales.float().repeat_interleave(GROUP, dim=1)[:, : tensor.shape[1]]
        # Half a step of the codes, and half of one of bfloat16, which keeps 8 bits.
        bound = step * (0.5 + 1e-5) + 2**-8 * tensor.float().abs()
        assert bool(((tensor.float() - before[name]).abs() <= bound).all())


def test_smollm2_drafter_is_small_enough_to_ship(tmp_path):
    source = random_drafter(tmp_path / "source", SMOLLM2, seed=0, mask_token_id=16)
    file = pack(source, tmp_path / "drafter.safetensors")
    num_weights = sum(tensor.numel() for tensor in load_tensors(source, read_config(source)).values())
    assert num_weights == pytest.approx(19.4e6, rel=0.01)
    assert num_weights < file.stat().st_size <= MAX_BYTES
    unpacked = unpack(file, tmp_path / "unpacked")
    assert check_tensors(unpacked, read_config(unpacked)) == {}


def test_the_same_drafter_gives_the_same_bytes(tmp_path):
    first = pack(drafter(tmp_path / "a"), tmp_path / "a.safetensors")
    # Tensors written in another order.
    other = drafter(tmp_path / "b")
    tensors = load_file(other / "model.safetensors")
    save_file(dict(reversed(tensors.items())), other / "model.safetensors", metadata={"format": "pt", "by": "another"})
    second = pack(other, tmp_path / "deeper" / "b.safetensors")
    assert first.read_bytes() == second.read_bytes()
    with safe_open(first, framework="pt") as opened:
        assert list(opened.metadata()) == [KIND]  # several keys would be written in any order
        assert sum(name.endswith(".scale") for name in opened.keys()) == NUM_MATRICES  # noqa: SIM118
    files = {path.name for path in tmp_path.rglob("*") if path.is_file() and path.parent.name not in ("a", "b")}
    assert files == {"a.safetensors", "b.safetensors"}
    again = unpack(first, tmp_path / "once"), unpack(second, tmp_path / "twice")
    assert again[0].joinpath("model.safetensors").read_bytes() == again[1].joinpath("model.safetensors").read_bytes()


def test_packing_replaces_an_older_file(tmp_path):
    file = tmp_path / "drafter.safetensors"
    file.write_bytes(b"older")
    pack(drafter(tmp_path / "source"), file)
    assert read_config(unpack(file, tmp_path / "unpacked")) == CONFIG


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_weights_that_are_no_numbers_are_refused(tmp_path, name, value):
    source = drafter(tmp_path / "source", torch.float32)
    tensors = load_file(source / "model.safetensors")
    tensors[name].flatten()[-1] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}: expected finite weights"):
        pack(source, tmp_path / "drafter.safetensors")
    assert not (tmp_path / "drafter.safetensors").exists()


def test_a_weight_past_the_scales_range_is_refused():
    assert bool(torch.isfinite(quantize(torch.full((1, 4), 8.3e6))[1]).all())
    with pytest.raises(ValueError, match="expected finite weights below"):
        quantize(torch.full((1, 4), 8.4e6))


def test_files_of_another_kind_are_told(tmp_path):
    source = drafter(tmp_path / "source")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="got no file"):
        unpack(tmp_path / "absent.safetensors", out)
    with pytest.raises(ValueError, match="got another safetensors file"):
        unpack(source / "model.safetensors", out)
    with pytest.raises(ValueError, match="got no safetensors file"):
        unpack(source / "config.json", out)
    file = pack(source, tmp_path / "drafter.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="got no safetensors file"):
        unpack(file, out)
    assert not out.exists()


def test_another_version_is_told(tmp_path):
    file = pack(drafter(tmp_path / "source"), tmp_path / "drafter.safetensors")
    newer = rewritten(tmp_path / "newer.safetensors", file, lambda about: about.update(version=2))
    with pytest.raises(ValueError, match="expected version 1 of the compact form, got 2"):
        unpack(newer, tmp_path / "out")


def test_damage_is_told(tmp_path):
    file = pack(drafter(tmp_path / "source"), tmp_path / "drafter.safetensors")
    damaged = tmp_path / "damaged.safetensors"

    def refused(words: str) -> None:
        with pytest.raises(ValueError, match=words):
            unpack(damaged, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    refused("expected checksum [0-9a-f]{64}, got [0-9a-f]{64}")
    rewritten(damaged, file, lambda about: about["config"].update(rope_theta=1e6))
    refused("expected checksum")
    rewritten(damaged, file, change_tensors=lambda tensors: tensors.pop("norm.weight"))
    refused("expected checksum")
    rewritten(damaged, file, lambda about: about.pop("sha256"))
    refused("expected checksum None")
    save_file({}, damaged, metadata={KIND: "{"})
    refused("expected a description in JSON")


def test_a_folder_is_unpacked_whole_or_not_at_all(tmp_path, monkeypatch):
    file = pack(drafter(tmp_path / "source"), tmp_path / "drafter.safetensors")
    folder = tmp_path / "deeper" / "unpacked"

    def fail(path: Path, *rest: object) -> None:
        (path / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compact.checkpoint, "write_checkpoint", fail)
        with pytest.raises(KeyboardInterrupt):
            unpack(file, folder)
    assert list(folder.parent.iterdir()) == []
    folder.mkdir()  # an empty folder will do
    unpack(file, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=re.escape(f"{folder}: expected a new or empty folder")):
        unpack(file, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(folder.parent.iterdir()) == [folder]
