"""Answers of tiny random targets against Transformers' own generate, one prompt at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sglang_dflash.train import answers, static_decode
from sglang_dflash.train.answers import GREEDY, Sampling

VOCAB = 96
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_target(name: str, device: str = "cpu", **changes: Any) -> Any:
    """A random target whose next token depends on what it attends to; large weights keep its choices far apart."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": [],
        "pad_token_id": 0,
    }
    kinds = {
        "llama": (LlamaConfig, LlamaForCausalLM, {}),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "num_key_value_heads": 1}),
        "mistral": (
            MistralConfig,
            MistralForCausalLM,
            {"sliding_window": 200},
        ),  # windows in all layers, unsaid by layer
        "gemma3": (
            Gemma3TextConfig,
            Gemma3ForCausalLM,
            {"head_dim": 8, "sliding_window": 200, "tie_word_embeddings": False},
        ),
    }
    make_config, make_model, own = kinds[name]
    torch.manual_seed(1)
    model = make_model(make_config(**{**values, **own, **changes})).to(device).eval()
    model.generation_config.eos_token_id = None
    return model


def make_prompts(count: int, longest: int = 45) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def by_index(batches: Any) -> list[list[int]]:
    found = {answer.index: answer.ids for batch in batches for answer in batch}
    return [found[i] for i in range(len(found))]


def reference(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy answers that nothing ends."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def cut(text: list[int], stop_ids: set[int]) -> list[int]:
    return next((text[: i + 1] for i, token in enumerate(text) if token in stop_ids), text)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_greedy_answers_are_those_of_generate(name: str, device: str) -> None:
    """Mixed lengths, a last batch that is not full, rows that end early, and more tokens than a window has."""
    model, prompts = make_target(name, device), make_prompts(7)
    free = reference(model, prompts, 110)
    assert len({tuple(text) for text in free}) == 7, "the target does not look at its prompt"
    stop_ids = {free[0][5], free[1][60]}
    expected = [cut(text, stop_ids) for text in free]
    assert len({len(text) for text in expected}) > 2
    batches = list(answers.generate(model, prompts, max_new_tokens=110, batch_size=3, stop_ids=stop_ids))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert by_index(batches) == expected


def test_the_model_is_left_as_it_was() -> None:
    model = make_target("llama")
    before = model.config._attn_implementation
    list(answers.generate(model, [[1]], max_new_tokens=2, batch_size=4, stop_ids=set()))
    assert model.config._attn_implementation == before != static_decode.ATTENTION


def test_a_batch_ends_when_all_its_rows_have() -> None:
    """A row that no prompt fills, as in the second batch here, keeps none waiting."""
    model = make_target("llama")
    first = reference(model, [[1, 2, 3]], 2)[0]
    calls = []
    model.register_forward_hook(lambda *args: calls.append(1))
    batches = answers.generate(model, [[1, 2, 3]] * 3, max_new_tokens=50, batch_size=2, stop_ids={first[1]})
    assert by_index(batches) == [first] * 3
    assert len(calls) == 4


def test_steps_read_only_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths = make_target("llama"), []
    forward = static_decode.Decoder._forward

    def spy(self: Any, ids_BQ: Any, positions_BQ: Any, visible_BQK: torch.Tensor) -> torch.Tensor:
        widths.append(visible_BQK.shape[-1])
        return forward(self, ids_BQ, positions_BQ, visible_BQK)

    monkeypatch.setattr(static_decode.Decoder, "_forward", spy)
    list(answers.generate(model, [[1] * 33], max_new_tokens=100, batch_size=1, stop_ids=set()))
    assert widths == [64] + [128] * 64 + [256] * 35


@pytest.mark.parametrize("device", DEVICES)
def test_samples_follow_the_probabilities_above_min_p(device: str) -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], device=device))
    generator = torch.Generator(device).manual_seed(0)
    for temperature, min_p, expected in [
        (1.0, 0.0, [0.1, 0.4, 0.05, 0.3, 0.15]),
        (1.0, 0.3, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        (1.0, 0.9, [0.0, 1.0, 0.0, 0.0, 0.0]),
        (0.5, 0.0, [p * p / 0.285 for p in (0.1, 0.4, 0.05, 0.3, 0.15)]),
        # Of the probabilities at the temperature: 0.15 ** 2 is 0.14 of 0.4 ** 2, 0.1 ** 2 is 0.06 of it.
        (0.5, 0.1, [0, 0.16 / 0.2725, 0, 0.09 / 0.2725, 0.0225 / 0.2725]),
    ]:
        tokens = answers.choose(logits.expand(20_000, 5), Sampling(temperature, min_p), generator)
        shares = torch.bincount(tokens, minlength=5).cpu() / 20_000
        torch.testing.assert_close(shares, torch.tensor(expected), atol=0.015, rtol=0)
        assert [p == 0 for p in expected] == [p == 0 for p in shares.tolist()]


def test_samples_depend_on_seed_and_batch_alone() -> None:
    model, prompts = make_target("llama"), [[5, 6]] * 4

    def draw(seed: int, count: int, first_batch: int = 0) -> list[list[int]]:
        sampling = Sampling(1.0, 0.01, seed)
        return by_index(
            answers.generate(
                model,
                prompts[:count],
                max_new_tokens=12,
                batch_size=2,
                stop_ids=set(),
                sampling=sampling,
                first_batch=first_batch,
            )
        )

    texts = draw(0, 4)
    assert len({tuple(text) for text in texts}) == 4
    assert draw(0, 4) == texts
    assert draw(0, 2, first_batch=1) == texts[2:]
    assert draw(1, 4) != texts


def test_loops_are_cut_after_the_first_repeat() -> None:
    head, period = list(range(100, 150)), list(range(1, 41))
    assert answers.cut_loop(head + period * 5) == (head + period + period[:32], True)
    assert answers.cut_loop(head + period * 5)[0][: -answers.NGRAM] == head + period
    assert answers.cut_loop([7] * 100) == ([7] * 33, True)
    assert answers.cut_loop([7] * 33) == ([7] * 33, True)
    assert answers.cut_loop([7] * 32) == ([7] * 32, False)
    assert answers.cut_loop(head + period[:31] + head[:10] + period[:31]) == (
        head + period[:31] + head[:10] + period[:31],
        False,
    )


def test_progress_counts_prompts_and_tokens() -> None:
    seen: list[answers.Progress] = []
    list(
        answers.generate(
            make_target("llama"),
            make_prompts(5),
            max_new_tokens=3,
            batch_size=2,
            stop_ids=set(),
            stage="x",
            progress=seen.append,
        )
    )
    assert [(p.stage, p.done, p.total, p.num_tokens) for p in seen] == [
        ("x", 2, 5, 6),
        ("x", 4, 5, 12),
        ("x", 5, 5, 15),
    ]
    assert all(p.tokens_per_s > 0 for p in seen)


def test_out_of_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, prompts: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(static_decode.Decoder, "prefill", fail)
    with pytest.raises(ValueError, match=r"lower batch_size \(now 2\) or max_new_tokens \(now 9\)"):
        list(answers.generate(make_target("llama"), [[1], [2]], max_new_tokens=9, batch_size=8, stop_ids=set()))


def generate(model: Any, num_prompt: int = 1, max_new_tokens: int = 4, **changes: Any) -> None:
    values = {"batch_size": 1, "stop_ids": set(), "max_new_tokens": max_new_tokens, **changes}
    list(answers.generate(model, [[1] * num_prompt], **values))


def test_what_cannot_be_decoded_is_refused() -> None:
    generate(make_target("llama"), 500, 12)
    with pytest.raises(ValueError, match="within 512 tokens, the target's context, got 513"):
        generate(make_target("llama"), 500, 13)
    for name in ("gemma3", "mistral"):
        generate(make_target(name), 197, 3)
        with pytest.raises(ValueError, match="within 200 tokens, the target's sliding window, got 201"):
            generate(make_target(name), 197, 4)
    with pytest.raises(ValueError, match="at least 1"):
        generate(make_target("llama"), max_new_tokens=0)
    with pytest.raises(ValueError, match="at least 1"):
        generate(make_target("llama"), batch_size=0)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="layers of attention, got linear_attention"):
        generate(mamba)
    query = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="s_aux"):
        static_decode.grouped_attention(torch.nn.Module(), query, query, query, torch.zeros(1, 1, 1, 1), s_aux=query)
    for temperature, min_p in [(-1, 0), (1, -0.1), (1, 1.1)]:
        with pytest.raises(ValueError, match="temperature"):
            Sampling(temperature, min_p)
    assert list(answers.generate(make_target("llama"), [], max_new_tokens=1, batch_size=1, stop_ids=set())) == []


def test_stop_tokens_are_those_of_the_settings_and_the_tokenizer() -> None:
    class Tokenizer:
        eos_token_id = 9

    model = make_target("llama", eos_token_id=5)
    assert answers.stop_ids_of(model) == {5}
    model.generation_config.eos_token_id = [3, 4]
    assert answers.stop_ids_of(model) == {3, 4}
    assert answers.stop_ids_of(model, Tokenizer()) == {3, 4, 9}
    assert GREEDY.temperature == 0
