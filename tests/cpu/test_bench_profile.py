"""`sglang-dflash bench profile` with engines that are played, the floor, and `bench cpu-products`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sglang_dflash import checkpoint, cli, drafter_config
from sglang_dflash.bench import columns, floor, products
from sglang_dflash.cpu import bootstrap
from sglang_dflash.offline import Answer
from tests.cpu.played import TARGET
from tests.cpu.test_bench_trace import device_round, host_round, rounds, write

STEP_MS = 1.5


class _Engine:
    """A round takes STEP_MS and commits one token; `stop_profile` writes a trace of kernels, on a CPU without them."""

    on_cpu: ClassVar[bool] = False
    started: ClassVar[list[dict[str, Any]]] = []
    asked: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, kind: str, log: Path, env: dict[str, str], **arguments: Any) -> None:
        _Engine.started.append({"kind": kind, "env": env})
        self.profiled_tokens = 0
        self.folder: Path | None = None

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def generate(self, input_ids: list[list[int]], max_new_tokens: int, **sampling: Any) -> tuple[list[Answer], float]:
        self.profiled_tokens += max_new_tokens
        meta = {"spec_verify_ct": max_new_tokens - 1}
        return [Answer([7] * max_new_tokens, "", meta) for _ in input_ids], max_new_tokens * STEP_MS / 1000

    def call(self, method: str, **options: Any) -> None:
        if method == "start_profile":
            _Engine.asked.append(options)
            self.folder, self.profiled_tokens = Path(options["output_dir"]), 0
            return
        assert method == "stop_profile"
        assert self.folder is not None
        assert self.profiled_tokens == 40
        path = write(self.folder, rounds(host_round) + ([] if _Engine.on_cpu else rounds(device_round)))
        path.rename(self.folder / "1-TP-0.trace.json.gz")
        (self.folder / "1-TP-1.trace.json.gz").write_text("another rank's")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr(columns, "EngineProcess", _Engine)
    monkeypatch.setattr(bootstrap, "wanted", lambda device=None: _Engine.on_cpu)
    monkeypatch.setattr("sglang_dflash.bench.setup.card", lambda: "a card")
    monkeypatch.setattr(
        floor, "measure", lambda *args: {"weight_bytes": {"target": 2e9}, "copy_gbytes_per_s": 4000.0, "floor_ms": 0.5}
    )
    for name, value in (("on_cpu", False), ("started", []), ("asked", [])):
        monkeypatch.setattr(_Engine, name, value)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET))
    checkpoint.random_drafter(tmp_path / "drafter", TARGET, seed=0, mask_token_id=3, num_layers=1, block_size=4)
    models = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    files = ["--logs", str(tmp_path / "logs"), "--out", str(tmp_path / "p.json"), "--traces", str(tmp_path / "traces")]
    return ["bench", "profile", *models, *files, "--new-tokens", "40", "--repeats", "2"]


def _rows(out: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    return {line[0]: line[1:] for line in lines}


def test_ours_beside_stock(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--forced-acceptance", "6.49"]) == 0
    stock, ours = _Engine.started
    assert (stock["kind"], ours["kind"]) == ("stock", "ours")
    assert stock["env"] == {
        "SGLANG_DFLASH_RANGES": "stock",
        "SGLANG_PLUGINS": "sglang_dflash",
        "SGLANG_DFLASH_STRICT": "1",
        "SGLANG_SIMULATE_ACC_LEN": "6.49",
    }
    assert ours["env"]["SGLANG_DFLASH_RANGES"] == "ours"
    assert "SGLANG_PLUGINS" not in ours["env"]
    assert all(options["activities"] == ["CPU", "GPU"] for options in _Engine.asked)
    assert all(options["with_stack"] is options["record_shapes"] is False for options in _Engine.asked)
    out = capsys.readouterr().out
    table = _rows(out)
    assert table["draft"][:2] == table["draft"][4:6] == ["0.150", "2.0"]
    assert table["sum"][:2] == ["0.550", "9.0"]
    assert table["step, no profiler"][::4] == ["1.500", "1.500"]
    assert table["idle"][::4] == ["0.950", "0.950"]
    assert table["floor"][::4] == ["0.500", "0.500"]
    assert "floor: target 2.000 GB, read at 4000 GB/s" in out
    result = json.loads((tmp_path / "p.json").read_text())
    assert result["batches"]["1"]["rounds"]["ours"]["stages"]["head"]["busy_ms"] == pytest.approx(0.04)
    assert (tmp_path / "traces" / "ours-batch1" / "1-TP-0.trace.json.gz").exists()


@pytest.mark.parametrize(
    ("flags", "floors"),
    [
        (["--ours", 'other={"draft_head": "fp8"}'], ["0.500", "0.500", "-"]),
        (["--ours", 'other={"engine": {"speculative_token_map": "map.pt"}}'], ["0.500", "0.500", "-"]),
        (["--ours", 'other={"engine": {"speculative_draft_model_quantization": "fp8"}}'], ["0.500", "0.500", "-"]),
        (["--ours", 'other={"engine": {"page_size": 16}}'], ["0.500", "0.500", "0.500"]),
        (["--engine", 'speculative_draft_model_quantization="fp8"'], ["-", "-"]),
    ],
)
def test_the_floor_is_of_columns_that_read_as_much(
    command: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], floors: list[str]
) -> None:
    assert cli.main([*command, *flags]) == 0
    assert _rows(capsys.readouterr().out)["floor"][::4] == floors


def test_on_a_cpu_stages_are_wall_times_of_ours(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Engine, "on_cpu", True)
    assert cli.main([*command, "--batches", "1,2"]) == 0
    assert [engine["kind"] for engine in _Engine.started] == ["ours"]
    assert [options["activities"] for options in _Engine.asked] == [["CPU"], ["CPU"]]
    out = capsys.readouterr().out
    table = _rows(out)
    assert (table["draft"], table["sum"], table["idle"]) == (["0.200"], ["1.000"], ["-"])
    assert "batch 2" in out


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--kinds", "plain,ours"], "expected stock and ours, got plain"),
        (["--new-tokens", "16"], "expected --new-tokens of more than 16"),
        (["--repeats", "0"], "--repeats of at least 1, got 40 and 0"),
    ],
)
def test_mistakes(command: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str) -> None:
    assert cli.main([*command, *flags]) == 2
    assert complaint in capsys.readouterr().err
    assert not _Engine.started


@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_the_floor_counts_what_a_round_reads(tmp_path: Path, tied: bool, dtype: str) -> None:
    target = {**TARGET, "tie_word_embeddings": tied}
    folder = checkpoint.random_drafter(tmp_path, target, seed=0, mask_token_id=3, num_layers=1, block_size=4)
    drafter = drafter_config.read_config(folder)
    item = {"float32": 4, "bfloat16": 2}[dtype]
    attention = 32 * (4 + 2 + 2) * 8 + 32 * 32
    layers = 6 * (attention + 3 * 32 * 48 + 2 * 32) + 32
    head = 64 * 32
    expected = sum(math.prod(shape) for shape in checkpoint.expected_tensors(drafter).values())
    got = floor.weight_bytes(target, drafter, dtype)
    assert got == {"target": item * (layers + head), "drafter": item * expected, "draft_head": item * head}


def test_the_floor_of_a_quantized_target_is_not_guessed(tmp_path: Path) -> None:
    folder = checkpoint.random_drafter(tmp_path, TARGET, seed=0, mask_token_id=3, num_layers=1, block_size=4)
    with pytest.raises(ValueError, match="expected a target with dense weights"):
        floor.weight_bytes({**TARGET, "quantization_config": {}}, drafter_config.read_config(folder), "bfloat16")


def test_the_copy_rate_counts_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(floor.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(floor, "COPY_BYTES", 4_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert floor.copy_rate() == pytest.approx(2e6 / 1e9)


def test_products_are_those_of_a_step() -> None:
    shapes = products.product_shapes(TARGET)
    assert shapes == [(64, 32), (32, 32), (96, 32), (32, 48)] * 6 + [(64, 32)]


def test_both_libraries_compute_every_product_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []
    monkeypatch.setattr(products, "_mkl", lambda a, b: calls.append(("MKL", (a.shape[0], b.shape[1]))))
    monkeypatch.setattr(products.products, "mm", lambda a, b: calls.append(("oneDNN", (a.shape[0], b.shape[1]))))
    times = products.measure([(6, 4), (3, 5)], [1, 2], repeats=1)
    assert {rows: set(row) for rows, row in times.items()} == {rows: {"MKL", "oneDNN"} for rows in (1, 2)}
    one = [("MKL", (1, 6)), ("MKL", (1, 3)), ("oneDNN", (1, 6)), ("oneDNN", (1, 3))]
    assert calls[:8] == [*one, *one[2:], *one[:2]], "warm-up, then a repeat that starts with the other"
    assert len(calls) == 16


def test_the_table_of_products(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    command = ["bench", "cpu-products", "--target", str(tmp_path), "--rows", "1,3", "--repeats", "1", "--threads", "1"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert set(_rows(out)) == {"1", "3"}
    assert "25 products a step, float32, 1 threads" in out


@pytest.mark.parametrize("rows", [1, 3])
def test_mkl_computes_the_product(rows: int) -> None:
    a, weight = torch.randn(rows, 5), torch.randn(4, 5)
    torch.testing.assert_close(products._mkl(a, weight.T), a @ weight.T)
