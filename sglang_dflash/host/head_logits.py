"""The target's logits of a verified block: its greedy choices inside the graph, and no float32 for them.

SGLang's head ends in a copy of its logits to float32, and plain decoding takes the argmax of that. Numbers of 16 bits
keep their order and their ties in float32, so the argmax of what the head says is the same token, for a third of the
bytes. Sampling, penalties, masks and logprobs get float32 from the same numbers, in the rounds that have them.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, should_apply_lm_head_quant_method

_SHORT = (torch.float16, torch.bfloat16)


class GreedyChoices:
    """The most probable token after every token of the blocks that a graph verified."""

    def __init__(self, ops: Any, max_requests: int, block_size: int, device: torch.device) -> None:
        from sglang_dflash_kernels import top1_workspace

        self._top1 = ops.top1
        self._tokens_N = torch.zeros(max_requests * block_size, dtype=torch.int64, device=device)
        self._probabilities_N = torch.zeros(max_requests * block_size, device=device)
        self._workspace = top1_workspace(max_requests * block_size, device)

    def score(self, logits_NV: torch.Tensor) -> None:
        """Choose after each of N tokens: the first of the largest logits, as torch.argmax. Capture-safe."""
        num_tokens = logits_NV.shape[0]
        self._top1(
            logits_NV,
            tokens_N=self._tokens_N[:num_tokens],
            confidence_N=self._probabilities_N[:num_tokens],
            workspace=self._workspace,
        )

    def tokens(self, num_requests: int, width: int) -> torch.Tensor:
        """What `score` chose for B blocks, int64 (B, W)."""
        return self._tokens_N[: num_requests * width].view(num_requests, width)


def keep_dtype(runner: Any) -> bool:
    """Let the head of a target leave its logits as it says them, where a graph verifies blocks; whether it does.

    Call before the graphs are captured. Heads that do more than a product of 16-bit numbers stay as they are.
    """
    processor: Any = getattr(runner.model, "logits_processor", None)
    if type(processor) is not LogitsProcessor or not _plain(processor) or not _dense(runner.model.lm_head):
        return False
    processor._get_logits = _ShortLogits(processor)
    return True


def _plain(processor: Any) -> bool:
    return not (
        processor.do_tensor_parallel_all_gather
        or processor.do_tensor_parallel_all_gather_dp_attn
        or processor.use_fp32_lm_head
        or processor.use_fp32_lm_head_output
        or processor.logit_scale is not None
        or processor.final_logit_softcapping
        or processor.rl_on_policy_target is not None
    )


def _dense(head: Any) -> bool:
    return (
        head.weight.dtype in _SHORT  # `TargetModel.head` wants a dense weight
        and not hasattr(head, "set_lora")
        and not should_apply_lm_head_quant_method(head, getattr(head, "quant_method", None))
    )


class _ShortLogits:
    """In place of a LogitsProcessor's `_get_logits`: blocks in a graph here, all else as before."""

    def __init__(self, processor: Any) -> None:
        self._original = processor._get_logits
        self._vocab_size = processor.vocab_size

    def __call__(
        self,
        hidden_states: torch.Tensor,
        lm_head: Any,
        logits_metadata: Any,
        embedding_bias: torch.Tensor | None = None,
        use_logits_buffer: bool = True,
    ) -> torch.Tensor:
        """Logits (N, V); arguments as of `LogitsProcessor._get_logits`."""
        buffer_NV, weight = logits_metadata.next_token_logits_buffer, lm_head.weight
        shape = (hidden_states.shape[0], weight.shape[0])
        if (
            buffer_NV is None
            or not use_logits_buffer
            or embedding_bias is not None
            or not logits_metadata.forward_mode.is_target_verify()
            or hidden_states.dtype != weight.dtype
            or shape[0] * shape[1] > 2 * buffer_NV.numel()
        ):
            return self._original(hidden_states, lm_head, logits_metadata, embedding_bias, use_logits_buffer)
        # All graphs share the buffer for float32 logits; each would keep its own logits otherwise.
        out = buffer_NV.flatten().view(weight.dtype)[: shape[0] * shape[1]].view(shape)
        return torch.mm(hidden_states, weight.T, out=out)[:, : self._vocab_size]
