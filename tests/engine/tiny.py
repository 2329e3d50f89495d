"""A tiny random Llama, its byte-level tokenizer and a tiny random drafter: engines that answer in milliseconds.

The same seed gives the same files. Weights are scaled so that the next token is neither certain nor anybody's guess,
and depends on the tokens before it; printable ASCII is likelier than other bytes, so that answers are text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_dflash import checkpoint, demo

SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<|im_start|>", "<|im_end|>")
BOS, EOS, MASK = 1, 2, 3
# Merged pairs of byte symbols: tokens of several bytes, some across the borders of JSON's syntax.
MERGES = (
    "t h", "th e", "i n", "a n", "e r", "r e", "o n", "a t", "e n", "n d", "s t", "e s", "o r", "i s", "i t", "a r",
    "in g", "an d", "t r", "f a", "tr u", "tru e", "0 0", "1 2", "a b", "ab c", '{ "', '" :', '" ,', '" }', ", Ġ",
    "Ġ the", ". Ċ",
)  # fmt: skip
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 64, 3, 4, 2, 96
# Every embedding holds this in its first dimension, which no layer writes: by it the head makes tokens rare.
CONSTANT = 3.0


def make(folder: Path, seed: int = 0) -> demo.Models:
    """Write target and drafter under `folder`, float32."""
    target = folder / "tiny-target"
    target.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(target)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    (target / "config.json").write_text(json.dumps(config))
    save_file(_weights(tokenizer, seed), target / "model.safetensors", metadata={"format": "pt"})
    drafter = checkpoint.random_drafter(
        folder / "tiny-drafter",
        config,
        seed=seed,
        mask_token_id=MASK,
        num_layers=1,
        target_layer_ids=(0, 1),
        dtype=torch.float32,
    )
    return demo.Models(target, drafter)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Any text is tokens and back: 256 bytes, the specials and the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokens = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=SPECIAL[0]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=SPECIAL[0],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        additional_special_tokens=list(SPECIAL[MASK:]),
        chat_template=CHAT_TEMPLATE,
    )


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _weights(tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.empty(shape).normal_(std=std, generator=generator)

    vocab_size, kv = len(tokenizer), HIDDEN // HEADS * KV_HEADS
    embedding, head = normal(vocab_size, HIDDEN, std=1.0), normal(vocab_size, HIDDEN, std=0.4)
    embedding[:, 0] = CONSTANT
    head[:, 0] = torch.tensor([_liking(tokenizer, token) for token in range(vocab_size)])
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        # Attention that prefers some keys over others, and writes as much as the embedding holds.
        tensors |= {
            f"{name}.self_attn.q_proj.weight": normal(HIDDEN, HIDDEN, std=0.25),
            f"{name}.self_attn.k_proj.weight": normal(kv, HIDDEN, std=0.25),
            f"{name}.self_attn.v_proj.weight": normal(kv, HIDDEN, std=0.2),
            f"{name}.self_attn.o_proj.weight": normal(HIDDEN, HIDDEN, std=0.2),
            f"{name}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN, std=0.2),
            f"{name}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN, std=0.2),
            f"{name}.mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE, std=0.15),
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
        for written in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{name}.{written}.weight"][0] = 0.0
    return tensors


def _liking(tokenizer: PreTrainedTokenizerFast, token: int) -> float:
    """The head's weight of the constant dimension: printable text is liked, the end of the text a little less."""
    if token == EOS:
        return -1.0
    text = tokenizer.decode([token])
    return 0.0 if token >= len(SPECIAL) and text.isascii() and (text.isprintable() or text == "\n") else -5.0
