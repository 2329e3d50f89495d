"""A block's attention: planned once a pass, queries not copied, and SGLang's own path for all that it does not know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.cpu import bootstrap

if bootstrap.wanted():
    bootstrap.install()

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_dflash.host import attention

HEADS, KV_HEADS, SIZE, TOKENS, LAYERS = 4, 2, 8, 6, 3
SCALING, LOGIT_CAP, K_SCALE, V_SCALE = 0.5, 30.0, 0.25, 0.125


class Backend:
    """SGLang's FlashAttentionBackend, as far as it is read: it writes down what it is asked for."""

    use_mla, topk, kv_cache_dtype_str = False, 1, "auto"
    local_attn_builder, use_sliding_window_kv_pool, page_size, num_splits = None, False, 16, 0
    fa_skip_kv_cache = _disable_scheduler_metadata_precompute = False

    def __init__(self) -> None:
        self.fa_impl_ver: int | None = 3
        self.forward_metadata = SimpleNamespace(
            cache_seqlens_int32=torch.tensor([20, 30]),
            cu_seqlens_q=torch.tensor([0, 3, 6]),
            max_seq_len_q=3,
            page_table=torch.zeros(2, 5, dtype=torch.int32),
            swa_out_cache_loc=None,
        )
        self.events: list[tuple[str, Any]] = []
        self.token_to_kv_pool = SimpleNamespace(set_kv_buffer=lambda *args: self.events.append(("store", args)))

    def forward_extend(self, *args: Any, **options: Any) -> str:
        return "SGLang's own"

    def get_paged_mha_kv_cache(self, layer: Any) -> tuple[str, str]:
        return f"keys {layer.layer_id}", f"values {layer.layer_id}"

    def _get_scheduler_metadata(self, **options: Any) -> str:
        self.events.append(("plan", options))
        return f"plan {sum(name == 'plan' for name, _ in self.events)}"

    def flash_attn_with_kvcache(self, **options: Any) -> torch.Tensor:
        self.events.append(("attend", options))
        return options["q"] + 1


def a_layer(layer_id: int, **options: Any) -> RadixAttention:
    layer = RadixAttention(HEADS, SIZE, SCALING, KV_HEADS, layer_id, **{"logit_cap": LOGIT_CAP} | options)
    layer.k_scale, layer.v_scale = K_SCALE, V_SCALE
    return layer


def a_batch(**fields: Any) -> Any:
    mode = SimpleNamespace(is_target_verify=lambda: True)
    slots = torch.arange(TOKENS)
    defaults = {"forward_mode": mode, "batch_size": 2, "out_cache_loc": slots, "kv_loc_plan": None}
    return SimpleNamespace(**defaults | fields)


def a_runner(layers: list[RadixAttention], **fields: Any) -> Any:
    backend = Backend()
    for name, value in fields.items():
        setattr(backend, name, value)
    return SimpleNamespace(model=torch.nn.ModuleList(layers), attn_backend=backend)


def run(backend: Any, layer: Any, batch: Any, qkv: torch.Tensor, **options: Any) -> Any:
    q, k, v = qkv.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=1)
    return backend.forward_extend(q, k, v, layer, batch, **options)


@pytest.fixture
def qkv() -> torch.Tensor:
    return torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE)


@pytest.fixture(autouse=True)
def _where(monkeypatch: pytest.MonkeyPatch) -> None:
    place = SimpleNamespace(for_layer=lambda batch, layer, swa_loc: ("slots", batch.out_cache_loc, swa_loc))
    monkeypatch.setattr(attention, "KVWriteLoc", place)


@pytest.mark.parametrize("first", [0, 2])
def test_a_pass_is_planned_by_its_first_layer(qkv: torch.Tensor, first: int) -> None:
    layers = [a_layer(first + i) for i in range(LAYERS)]
    runner = a_runner(layers[::-1])
    assert attention.plan_once(runner)
    backend = runner.attn_backend
    for _ in range(2):
        for layer in layers:
            out = run(backend, layer, a_batch(), qkv)
            assert torch.equal(out, qkv[:, : HEADS * SIZE] + 1)
    names = [name for name, _ in backend.events]
    assert names == ["store", "plan", "attend", "store", "attend", "store", "attend"] * 2
    attended = [options for name, options in backend.events if name == "attend"]
    assert [options["scheduler_metadata"] for options in attended] == ["plan 1"] * 3 + ["plan 2"] * 3
    assert [options["k_cache"] for options in attended[:3]] == [f"keys {first + i}" for i in range(3)]
    assert attended[0]["q"].data_ptr() == qkv.data_ptr(), "queries are read where they stand"
    planned = next(options for name, options in backend.events if name == "plan")
    assert planned["max_seqlen_k"] == 5 * 16
    # The kernel sizes its splits by the same figures as the plan.
    for name in ("cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "causal", "num_splits"):
        assert planned[name] is attended[0][name], name
    expected = {"num_heads": HEADS, "num_heads_k": KV_HEADS, "headdim": SIZE, "headdim_v": SIZE, "batch_size": 2}
    expected |= {"page_size": 16, "has_softcap": True, "qkv_dtype": torch.float32}
    assert {name: planned[name] for name in expected} == expected
    expected = {"v_cache": f"values {first}", "softmax_scale": SCALING, "softcap": LOGIT_CAP}
    assert {name: attended[0][name] for name in expected} == expected
    assert attended[0]["page_table"] is backend.forward_metadata.page_table


@pytest.mark.parametrize(
    ("kind", "causal"),
    [
        (AttentionType.DECODER, True),
        (AttentionType.ENCODER_ONLY, False),
        (AttentionType.DECODER_BIDIRECTIONAL, False),
    ],
)
def test_a_drafters_block_sees_itself_both_ways(qkv: torch.Tensor, kind: AttentionType, causal: bool) -> None:
    layer = a_layer(0, attn_type=kind)
    runner = a_runner([layer])
    assert attention.plan_once(runner)
    run(runner.attn_backend, layer, a_batch(), qkv)
    assert [options["causal"] for name, options in runner.attn_backend.events if name != "store"] == [causal] * 2


def test_keys_are_stored_unless_they_stand_already(qkv: torch.Tensor) -> None:
    layer, batch = a_layer(0), a_batch()
    runner = a_runner([layer])
    assert attention.plan_once(runner)
    events = runner.attn_backend.events
    run(runner.attn_backend, layer, batch, qkv)
    stored_layer, where, keys, values, *scales = events[0][1]
    assert stored_layer is layer
    assert where == ("slots", batch.out_cache_loc, None)
    assert torch.equal(torch.cat((keys, values), dim=1), qkv[:, HEADS * SIZE :])
    assert scales == [K_SCALE, V_SCALE]
    events.clear()
    run(runner.attn_backend, layer, batch, qkv, save_kv_cache=False)
    assert [name for name, _ in events] == ["plan", "attend"]
    events.clear()
    runner.attn_backend.forward_extend(qkv[:, : HEADS * SIZE], None, None, layer, batch)
    assert [name for name, _ in events] == ["plan", "attend"], "a layer without keys of its own stores none"


@pytest.mark.parametrize(
    "fields",
    [
        {"fa_impl_ver": 4},
        {"fa_impl_ver": None},
        {"_disable_scheduler_metadata_precompute": True},
        {"use_mla": True},
        {"topk": 4},
        {"kv_cache_dtype_str": "fp8_e4m3"},
        {"local_attn_builder": object()},
        {"use_sliding_window_kv_pool": True},
        {"fa_skip_kv_cache": True},
    ],
    ids=str,
)
def test_a_backend_it_does_not_know_stays_as_it_is(qkv: torch.Tensor, fields: dict[str, Any]) -> None:
    layer = a_layer(0)
    runner = a_runner([layer], **fields)
    assert not attention.plan_once(runner)
    assert run(runner.attn_backend, layer, a_batch(), qkv) == "SGLang's own"


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [a_layer(0), a_layer(1, sliding_window_size=64)],
        [a_layer(0), a_layer(1, is_cross_attention=True)],
        [a_layer(0), RadixAttention(HEADS, SIZE, SCALING, HEADS, 1, logit_cap=LOGIT_CAP)],
        [a_layer(0), RadixAttention(HEADS, 2 * SIZE, SCALING, KV_HEADS, 1, logit_cap=LOGIT_CAP)],
        [a_layer(0), a_layer(1, v_head_dim=2 * SIZE)],
        [a_layer(0), a_layer(1, logit_cap=0.0)],
        [a_layer(0), a_layer(1, attn_type=AttentionType.ENCODER_ONLY)],
    ],
    ids=["none", "window", "cross attention", "heads", "head size", "value size", "cap", "both ways"],
)
def test_a_model_it_does_not_know_stays_as_it_is(layers: list[RadixAttention]) -> None:
    runner = a_runner(layers)
    assert not attention.plan_once(runner)
    assert not isinstance(runner.attn_backend.forward_extend, attention.PlannedBlocks)


def test_another_build_of_the_kernel_stays_sglangs_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_SGL_FA3_KERNEL", "0")
    assert not attention.plan_once(a_runner([a_layer(0)]))


def test_a_wrapper_of_the_backend_stays_as_it_is() -> None:
    """Its own `forward` calls the backend inside."""

    class Wrapper:
        def __init__(self, inner: Backend) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    assert not attention.plan_once(
        SimpleNamespace(model=torch.nn.ModuleList([a_layer(0)]), attn_backend=Wrapper(Backend()))
    )


def test_a_backend_of_another_kind_stays_as_it_is() -> None:
    runner = SimpleNamespace(model=torch.nn.ModuleList([a_layer(0)]), attn_backend=SimpleNamespace())
    assert not attention.plan_once(runner)


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        ({"forward_mode": SimpleNamespace(is_target_verify=lambda: False)}, {}),
        ({"_attn_output": torch.zeros(1)}, {}),
        ({}, {"sinks": torch.zeros(1)}),
        ({}, {"return_lse": True}),
    ],
    ids=str,
)
def test_what_it_does_not_know_goes_sglangs_way(
    qkv: torch.Tensor, batch: dict[str, Any], options: dict[str, Any]
) -> None:
    layer = a_layer(0)
    runner = a_runner([layer])
    assert attention.plan_once(runner)
    assert run(runner.attn_backend, layer, a_batch(**batch), qkv, **options) == "SGLang's own"
    assert not runner.attn_backend.events


def test_options_that_say_nothing_change_nothing(qkv: torch.Tensor) -> None:
    layer = a_layer(0)
    runner = a_runner([layer])
    assert attention.plan_once(runner)
    out = run(runner.attn_backend, layer, a_batch(), qkv, q_rope=None, sinks=None, return_lse=False)
    assert isinstance(out, torch.Tensor)
