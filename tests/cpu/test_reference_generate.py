"""spec_generate against Transformers' own generate, on tiny targets with random weights."""

from dataclasses import replace

import pytest
import torch
from test_reference_drafter import make_drafter
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from sglang_dflash.checkpoint import DrafterConfig
from sglang_dflash.reference import Drafter, spec_generate
from sglang_dflash.reference import generate as generate_module

BLOCK = 6
VOCAB = 500


def make_target(kind: str, vocab_size: int = VOCAB):
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        # Large weights: the greedy output wanders instead of repeating one token.
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    configs = {
        "llama": LlamaConfig(**sizes, rope_theta=1000.0, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**sizes, head_dim=16),
        "qwen3-sliding": Qwen3Config(
            **sizes, head_dim=16, use_sliding_window=True, sliding_window=9, max_window_layers=2
        ),
    }
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(configs[kind], dtype=torch.float32).eval()


def drafter_config(target) -> DrafterConfig:
    return DrafterConfig(
        block_size=BLOCK,
        mask_token_id=1,
        target_layer_ids=(1, 2, 4),
        num_target_layers=6,
        hidden_size=target.config.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size=64,
        vocab_size=target.config.vocab_size,
    )


def prompt(length: int = 13, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randint(0, vocab_size, (1, length), generator=torch.Generator().manual_seed(length))


def greedy(target, input_ids: torch.Tensor, num_tokens: int, stop: int | None = None) -> torch.Tensor:
    return target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=0,
    )


class Scripted(Drafter):
    """Drafts the known answer, wrong from a chosen slot on in each round (BLOCK: nowhere)."""

    def __init__(self, config: DrafterConfig, answer: torch.Tensor, first_wrong: list[int]) -> None:
        super().__init__(config)
        self.load_state_dict(make_drafter(config).state_dict())
        self.answer, self.first_wrong, self.contexts = answer, first_wrong, []

    def new_context(self):
        self.contexts.append(super().new_context())
        return self.contexts[-1]

    def draft_logits(self, target, anchor, context, block_size=None):
        hidden, logits = super().draft_logits(target, anchor, context, block_size)
        position = context.num_tokens
        assert anchor == self.answer[0, position], "the anchor stands right behind the context"
        wrong, width = self.first_wrong.pop(0), logits.shape[0]
        for slot in range(1, width):
            token = int(self.answer[0, position + slot])
            logits[slot, token if slot != wrong else (token + 1) % VOCAB] = 1e9
        return hidden, logits


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3-sliding"])
def target(request):
    return make_target(request.param)


@pytest.fixture(scope="module")
def answer(target):
    """The plain greedy continuation of prompt(), long enough for every test."""
    ids = greedy(target, prompt(), 80)
    assert ids[0, 13:].unique().numel() > 15, "a target that repeats itself would hide mistakes"
    return ids


@pytest.mark.parametrize("block_size", [None, 2, 3])
def test_random_drafter_gives_the_greedy_output(target, block_size):
    for length in (1, 13, 40):
        out = spec_generate(
            target, make_drafter(drafter_config(target)), prompt(length), max_new_tokens=30, block_size=block_size
        )
        assert torch.equal(out.output_ids, greedy(target, prompt(length), 30))


@pytest.mark.parametrize("block_size", [None, 2])
def test_draft_logits_are_those_of_the_anchor_and_masks(target, block_size):
    drafter, width = make_drafter(drafter_config(target)), block_size or BLOCK
    context = drafter.new_context()
    drafter.inject(torch.randn(5, 144, generator=torch.Generator().manual_seed(0)), context)
    with torch.no_grad():
        hidden, logits = drafter.draft_logits(target, 42, context, block_size)
        embeds = target.model.embed_tokens.weight[[42] + [drafter.config.mask_token_id] * (width - 1)]
        expected = drafter(embeds, context)
        assert not torch.allclose(hidden, drafter.draft_logits(target, 43, context, block_size)[0], atol=1e-3)
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(logits, expected @ target.lm_head.weight.T, rtol=1e-4, atol=1e-4)
    assert logits.shape == (width, VOCAB)


def test_every_accepted_length(target, answer):
    script = [6, 1, 2, 3, 4, 5, 6, 6, 1, 5, 3]
    drafter = Scripted(drafter_config(target), answer, script.copy())
    num_tokens = 1 + sum(script)
    out = spec_generate(target, drafter, prompt(), max_new_tokens=num_tokens)
    assert torch.equal(out.output_ids, answer[:, : 13 + num_tokens])
    assert out.acceptance_lengths == script
    assert out.num_rounds == len(script)
    assert out.mean_acceptance_length == pytest.approx(sum(script) / len(script))
    assert out.num_prompt_tokens == 13


def test_context_equals_one_recomputed_from_the_committed_tokens(target, answer):
    drafter = Scripted(drafter_config(target), answer, [6, 1, 4, 2])
    out = spec_generate(target, drafter, prompt(), max_new_tokens=14)
    (context,) = drafter.contexts
    # Everything but the last anchor, whose features no pass has computed yet.
    assert context.num_tokens == out.output_ids.shape[1] - 1
    with torch.no_grad():
        states = target(out.output_ids[:, :-1], output_hidden_states=True).hidden_states
        fresh = super(Scripted, drafter).new_context()
        drafter.inject(torch.cat([states[i + 1][0] for i in (1, 2, 4)], dim=-1), fresh)
    for (keys, values), (fresh_keys, fresh_values) in zip(context.kv, fresh.kv, strict=True):
        torch.testing.assert_close(keys, fresh_keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(values, fresh_values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 7, 8, 12])
def test_max_new_tokens_inside_a_block(target, answer, num_tokens):
    drafter = Scripted(drafter_config(target), answer, [6, 6, 6])
    out = spec_generate(target, drafter, prompt(), max_new_tokens=num_tokens)
    assert torch.equal(out.output_ids, answer[:, : 13 + num_tokens])
    assert out.num_rounds == -(-(num_tokens - 1) // 6)
    assert (out.mean_acceptance_length == 6) if num_tokens > 1 else (out.mean_acceptance_length == 0)


@pytest.mark.parametrize("where", [0, 2, 5, 6])
def test_stop_token_inside_a_block(target, answer, where):
    new = answer[0, 13:].tolist()
    stop = new[where]
    first = new.index(stop)
    drafter = Scripted(drafter_config(target), answer, [6, 6])
    out = spec_generate(target, drafter, prompt(), max_new_tokens=30, stop_token_ids=[stop, VOCAB + 1])
    assert out.output_ids[0, -1] == stop
    assert torch.equal(out.output_ids, answer[:, : 13 + first + 1])
    assert torch.equal(out.output_ids, greedy(target, prompt(), 30, stop))


def test_sampling_has_the_targets_distribution():
    """Joint frequencies of the second and third token against their exact probabilities, at vocabulary 4."""
    target = make_target("llama", vocab_size=4)
    drafter, ids, num_runs = make_drafter(drafter_config(target)), prompt(4, 4), 500
    generator = torch.Generator().manual_seed(5)
    counts, accepted = torch.zeros(4, 4), 0
    for _ in range(num_runs):
        out = spec_generate(target, drafter, ids, max_new_tokens=3, temperature=1.5, block_size=3, generator=generator)
        counts[out.output_ids[0, -2], out.output_ids[0, -1]] += 1
        accepted += out.acceptance_lengths[0] - 1
    assert accepted > num_runs / 20, "acceptance itself has to be exercised"
    with torch.no_grad():

        def next_probs(prefixes: torch.Tensor) -> torch.Tensor:
            return (target(torch.cat((ids.expand(len(prefixes), -1), prefixes), 1)).logits[:, -1] / 1.5).softmax(-1)

        one = torch.arange(4)[:, None]
        first = next_probs(torch.empty(1, 0, dtype=torch.long))[0]
        second = next_probs(one)
        pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        third = next_probs(pairs).view(4, 4, 4)
    expected = torch.einsum("a,ab,abc->bc", first, second, third) * num_runs
    chi2 = ((counts - expected) ** 2 / expected.clamp(min=1e-3))[expected > 5].sum()
    degrees = int((expected > 5).sum())
    assert degrees > 10, "too few cells to judge"
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5


def test_count_accepted():
    drafts = torch.tensor([5, 6, 7])
    assert generate_module.count_accepted(drafts, torch.tensor([5, 6, 7, 1])) == 3
    assert generate_module.count_accepted(drafts, torch.tensor([5, 1, 7, 1])) == 1
    assert generate_module.count_accepted(drafts, torch.tensor([1, 6, 7, 7])) == 0


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, {"block_size": 7}, "expected a block of 2 to 6, the trained width, got 7"),
        ({}, {"block_size": 1}, "expected a block of 2 to 6, the trained width, got 1"),
        ({}, {"block_size": 0}, "expected a block of 2 to 6, the trained width, got 0"),
        ({}, {"max_new_tokens": 0}, "expected max_new_tokens of at least 1, got 0"),
        ({}, {"temperature": -1.0}, r"expected a temperature of at least 0, got -1\.0"),
        ({"target_layer_ids": (1, 2, 5)}, {}, r"expected taps 0 to 4, got \(1, 2, 5\)"),
        ({"hidden_size": 32}, {}, "expected hidden size 48, got 32"),
        ({"mask_token_id": None}, {}, "mask_token_id: expected an id in config.json, got none"),
    ],
)
def test_refusals(change, arguments, message):
    target = make_target("llama")
    drafter = make_drafter(replace(drafter_config(target), **change))
    with pytest.raises(ValueError, match=message):
        spec_generate(target, drafter, prompt(), **({"max_new_tokens": 4} | arguments))


@pytest.mark.parametrize("shape", [(2, 4), (4,), (1, 0)])
def test_one_prompt_only(shape):
    target = make_target("llama")
    with pytest.raises(ValueError, match=r"expected input_ids of shape \(1, tokens\)"):
        spec_generate(
            target, make_drafter(drafter_config(target)), torch.zeros(shape, dtype=torch.long), max_new_tokens=4
        )
