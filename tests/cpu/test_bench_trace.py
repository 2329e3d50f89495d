"""A decode round by stage from traces written by hand, in the form of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.bench import trace

THREAD = 77
ROUND_US = 1000
NUM_ROUNDS = 5  # two are skipped, and the last one only ends the window: two count

Event = dict[str, Any]


def span(name: str, start: float, end: float, thread: int = THREAD) -> Event:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "tid": thread}


def launch(correlation: int, at: float, cat: str = "cuda_runtime") -> Event:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": "launch", "ts": at, "dur": 2, "tid": THREAD, "args": args}


def kernel(name: str, correlation: int | None, start: float, end: float, cat: str = "kernel") -> Event:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": 7, "args": args}


def host_round(t: float) -> list[Event]:
    """A round of 800 us: draft 200, verify 300 with a forward named draft inside, accept 50, inject 100."""
    return [
        span("dflash.round", t, t + 800),
        span("dflash.draft", t + 50, t + 250),
        span("dflash.verify", t + 250, t + 550),
        span("dflash.draft", t + 260, t + 540),
        span("dflash.accept", t + 560, t + 610),
        span("dflash.accept", t + 570, t + 580),
        span("dflash.inject", t + 620, t + 720),
        span("other library", t + 620, t + 720),
        {"ph": "X", "cat": "gpu_user_annotation", "name": "dflash.round", "ts": t, "dur": 9, "tid": 7},
        {"ph": "M", "name": "process_name"},
    ]


def device_round(t: float, number: int, argmax: str = "_split_kernel") -> list[Event]:
    """Kernels of a round, 100 us behind the host. The draft's graph: layers 150 us, head 40; then a gap of 20."""
    c = 100 * number
    device = t + 100
    return [
        launch(c + 1, t + 10),
        launch(c + 2, t + 60),
        launch(c + 3, t + 300, "cuda_driver"),
        launch(c + 4, t + 565),
        launch(c + 5, t + 630),
        launch(c + 6, t + 900),
        kernel("prepare", c + 1, device, device + 10),
        kernel("sm90_xmma_gemm_qkv", c + 2, device + 10, device + 100),
        kernel("rms_norm", c + 2, device + 100, device + 160),
        kernel("nvjet_head", c + 2, device + 160, device + 190),
        kernel(argmax, c + 2, device + 190, device + 200),
        kernel("nvjet_target", c + 3, device + 220, device + 500),
        kernel("argmax of logits", c + 4, device + 490, device + 520),
        kernel("store", c + 5, device + 520, device + 560),
        kernel("Memcpy DtoH", c + 6, device + 560, device + 570, "gpu_memcpy"),
    ]


def write(folder: Path, events: list[Event], packed: bool = True) -> Path:
    text = json.dumps({"traceEvents": events})
    path = folder / ("t.trace.json.gz" if packed else "t.trace.json")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def rounds(make: Any, *args: Any) -> list[Event]:
    return [
        event for i in range(NUM_ROUNDS) for event in make(i * ROUND_US, *([i, *args] if make is device_round else []))
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_host_times_of_a_trace_without_kernels(tmp_path: Path, packed: bool) -> None:
    events = rounds(host_round)
    for i in range(NUM_ROUNDS):
        events.append(span("dflash.head", i * ROUND_US + 200, i * ROUND_US + 230))  # inside the draft
        events.append(span("dflash.head", i * ROUND_US + 730, i * ROUND_US + 740))  # of its own
        events.append(span("dflash.verify", i * ROUND_US + 850, i * ROUND_US + 950))  # a prefill's, in no round
    result = trace.read(write(tmp_path, events, packed))
    assert (result.num_rounds, result.round_ms, result.busy_ms, result.notes) == (2, 1.0, None, ())
    host = {name: stage.host_ms for name, stage in result.stages.items()}
    expected = {
        "draft": 0.17,
        "head": 0.04,
        "verify": 0.3,
        "accept": 0.05,
        "inject": 0.1,
        "glue": 0.14,
        "scheduler": 0.2,
    }
    assert host == pytest.approx(expected)
    assert sum(host.values()) == pytest.approx(result.round_ms)


@pytest.mark.parametrize("argmax", ["_split_kernel", "at::native::reduce_kernel<ArgMaxOps<BFloat16>>"])
def test_device_times_by_stage(tmp_path: Path, argmax: str) -> None:
    result = trace.read(write(tmp_path, rounds(host_round) + rounds(device_round, argmax)))
    busy = {name: stage.busy_ms for name, stage in result.stages.items()}
    # The argmax of the logits overlaps the target's last 10 us, which are the target's.
    expected = {
        "draft": 0.15,
        "head": 0.04,
        "verify": 0.28,
        "accept": 0.02,
        "inject": 0.04,
        "glue": 0.01,
        "scheduler": 0.01,
    }
    assert busy == pytest.approx(expected)
    assert result.busy_ms == pytest.approx(0.55)
    kernels = {name: stage.num_kernels for name, stage in result.stages.items()}
    assert kernels == {"draft": 2, "head": 2, "verify": 1, "accept": 1, "inject": 1, "glue": 1, "scheduler": 1}
    gaps = {name: stage.gap_ms for name, stage in result.stages.items()}
    # Of two rounds one begins with a gap of 430 us: the one before lies outside of the window.
    assert gaps.pop("glue") == pytest.approx(0.43 / 2)
    assert gaps.pop("verify") == pytest.approx(0.02)
    assert set(gaps.values()) == {0}
    assert result.notes == ()


def test_time_is_counted_once_where_kernels_overlap(tmp_path: Path) -> None:
    """A short kernel beside the target's long one takes no time from anyone."""
    events = rounds(host_round) + rounds(device_round)
    for i in range(NUM_ROUNDS):
        t = i * ROUND_US
        events += [launch(100 * i + 9, t + 575), kernel("beside", 100 * i + 9, t + 400, t + 410)]
    result = trace.read(write(tmp_path, events))
    assert result.busy_ms == pytest.approx(0.55)
    assert result.stages["verify"].busy_ms == pytest.approx(0.28)
    assert result.stages["accept"].num_kernels == 2
    assert result.stages["accept"].busy_ms == pytest.approx(0.02)
    assert result.stages["accept"].gap_ms == 0


def test_an_attention_that_combines_is_not_taken_for_the_head(tmp_path: Path) -> None:
    events = rounds(host_round) + rounds(device_round)
    for event in [e for e in events if e["name"] == "rms_norm"]:
        event["name"] = "flash_fwd_splitkv_combine_kernel"
    assert trace.read(write(tmp_path, events)).stages["head"].busy_ms == pytest.approx(0.04)


def test_the_heads_product_is_told_by_any_of_its_names(tmp_path: Path) -> None:
    for name in ("nvjet_head", "_fp8_logits_kernel", "_skinny_linear_kernel", "sm90_xmma_gemm"):
        events = rounds(host_round) + rounds(device_round)
        for event in [e for e in events if e["name"] == "nvjet_head"]:
            event["name"] = name
        assert trace.read(write(tmp_path, events)).stages["head"].busy_ms == pytest.approx(0.04), name


def test_a_split_product_is_of_the_head_with_its_sum(tmp_path: Path) -> None:
    events = rounds(host_round) + rounds(device_round)
    for event in [e for e in events if e["name"] == "rms_norm"]:
        event["name"] = "nvjet_split_product"
    for event in [e for e in events if e["name"] == "nvjet_head"]:
        event["name"] = "cublasLt::splitKreduce_kernel"
    result = trace.read(write(tmp_path, events))
    assert result.stages["head"].busy_ms == pytest.approx(0.1)
    assert result.stages["draft"].num_kernels == 1


def test_injection_in_the_targets_graph_is_told_by_its_kernels(tmp_path: Path) -> None:
    """From the projection of the features on, their norm and their keys and values included."""
    events = rounds(host_round) + rounds(device_round)
    for i in range(NUM_ROUNDS):
        device = i * ROUND_US + 700
        names = ("nvjet_head", "nvjet_fc", "splitKreduce_kernel", "kernel_cutlass_kernel_rmsnorm", "nvjet_kv")
        for number, name in enumerate((*names, "_store_features_kernel")):
            start = device + 10 * number
            events.append(kernel(name, 100 * i + 3, start, start + 10))
    stages = trace.read(write(tmp_path, events)).stages
    assert stages["verify"].num_kernels == 2
    assert stages["inject"].num_kernels == 1 + 5
    assert stages["inject"].busy_ms == pytest.approx(0.04 + 0.05)


def test_the_targets_argmax_in_its_graph_is_acceptance(tmp_path: Path) -> None:
    """Attention that splits its keys has a kernel of a like name."""
    result = trace.read(write(tmp_path, rounds(host_round) + rounds(device_round)))
    names = ("FlashAttnFwdCombine_kernel", "_split_kernel", "_combine_kernel")
    events = []
    for i in range(NUM_ROUNDS):
        c, device = 100 * i + 3, i * ROUND_US + 700  # of the target's graph
        events += [kernel(name, c, device + 2 * j, device + 2 * j + 2) for j, name in enumerate(names)]
    more = trace.read(write(tmp_path, rounds(host_round) + rounds(device_round) + events))
    added = {name: more.stages[name].num_kernels - stage.num_kernels for name, stage in result.stages.items()}
    assert added == {**dict.fromkeys(added, 0), "verify": 1, "accept": 2}


def test_what_cannot_be_told_is_said(tmp_path: Path) -> None:
    events = rounds(host_round) + rounds(device_round, "another head's kernel")
    lost = [e for e in events if e.get("cat") == "cuda_runtime" and e["args"]["correlation"] % 100 == 5]
    result = trace.read(write(tmp_path, [e for e in events if e not in lost]))
    assert "head" not in result.stages
    assert result.stages["draft"].num_kernels == 4
    assert result.stages["unattributed"].busy_ms == pytest.approx(0.04)
    head, launches = result.notes
    assert "draft head could not be told" in head
    assert launches.startswith("2 of 18 kernels have no launch")


def test_a_head_outside_of_the_graph_is_told_by_its_range(tmp_path: Path) -> None:
    events = rounds(host_round) + rounds(device_round, "another head's kernel")
    for i in range(NUM_ROUNDS):
        t = i * ROUND_US
        events += [
            span("dflash.head", t + 40, t + 49),
            launch(100 * i + 9, t + 45),
            kernel("k", 100 * i + 9, t + 670, t + 673),
        ]
    result = trace.read(write(tmp_path, events))
    assert result.stages["head"].busy_ms == pytest.approx(0.003)
    assert result.notes == ()


def test_launches_of_another_thread_are_the_schedulers(tmp_path: Path) -> None:
    events = rounds(host_round) + rounds(device_round)
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            event["tid"] = THREAD + 1
    assert set(trace.read(write(tmp_path, events)).stages) & {"draft", "verify"} == {"draft", "verify"}, "host times"
    stages = trace.read(write(tmp_path, events)).stages
    assert stages["verify"].num_kernels == 0
    assert stages["scheduler"].num_kernels == 9


def test_kernels_beside_the_rounds_are_not_the_rounds(tmp_path: Path) -> None:
    events = [*rounds(host_round), launch(1, -50), kernel("prefill", 1, -40, -30)]
    result = trace.read(write(tmp_path, events))
    assert result.busy_ms is None
    assert result.notes == ("no kernel was launched inside a round: nothing of the device is known",)


def test_too_few_rounds_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [event for i in range(3) for event in host_round(i * ROUND_US)])
    with pytest.raises(ValueError, match="expected 4 rounds or more, got 3; raise --new-tokens"):
        trace.read(path)
