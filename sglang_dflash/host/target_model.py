"""The target model inside SGLang: prefill with feature capture, and verification of a block."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dflash.host import grammar, head_logits, sampling
from sglang_dflash.host.head_logits import GreedyChoices
from sglang_dflash.host.penalties import Penalties
from sglang_dflash.host.processors import LogitProcessors
from sglang_dflash.host.round_graphs import RoundGraphs
from sglang_dflash.records import Accepted, Block, Draft, Round, Verified

logger = logging.getLogger(__name__)

# Of N tokens: their features (N, D), positions (N) and cache slots (N).
Inject = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class TargetModel:
    """SGLang's worker of the target, as the round uses it."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.runner = worker.model_runner
        scale = getattr(self.runner.model, "get_dflash_noise_embedding_scale", None)
        self._penalties = Penalties(int(self.runner.model_config.vocab_size), torch.device(worker.device))
        self._processors = LogitProcessors()
        self._embedding = self.runner.model.get_input_embeddings()
        _gather_embeddings(self._embedding)
        sampling.keep_greedy(self.runner.sampler)
        self._embedding_scale = 1.0 if scale is None else float(scale())
        self._mask: tuple[int, torch.Tensor] | None = None
        self._inject: Inject | None = None
        self._choices: GreedyChoices | None = None
        self._graphs: RoundGraphs | None = None

    def init_graphs(self, inject: Inject, choices: GreedyChoices, graphs: RoundGraphs | None) -> None:
        """Let every pass over blocks end in `choices` and `inject`, inside the graphs that SGLang captures next.

        `graphs` replays them, or SGLang. Injection takes all of a block's tokens: which of them are accepted is not
        known yet, and need not be. A rejected token's slot lies past the committed length, where the next round's block
        is written before anything reads it.
        """
        self._inject, self._choices, self._graphs = inject, choices, graphs
        if get_exec().graph.cuda_graph_config.decode.backend == Backend.DISABLED:
            return
        kept = head_logits.keep_dtype(self.runner)
        logger.info("The target's logits in a graph have %s.", "16 bits" if kept else "float32's 32 bits")

        def end(runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
            choices.score(out.next_token_logits)
            inject(out.hidden_states, forward_batch.positions, forward_batch.out_cache_loc)

        self.runner.capture_tail_hooks.append(end)

    def head(self) -> torch.Tensor:
        """The language-model head (V, H) without padded rows, which the drafter shares.

        Raises:
            ValueError: the head is quantized or missing.
        """
        head = getattr(self.runner.model, "lm_head", None)
        weight = getattr(head, "weight", None)
        if weight is None or weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"the target {type(self.runner.model).__name__}: expected an lm_head with a dense float weight, got "
                f"{'none' if weight is None else weight.dtype}; use a target whose head is not quantized."
            )
        return weight[: int(self.runner.model_config.vocab_size)]

    def set_mask_embedding(self, mask_token_id: int, embedding_H: torch.Tensor) -> None:
        """Let `embed` give the mask token an embedding of the drafter's own; the target's table, and its head where
        the two are one, stay as they are."""
        like = self._embedding.weight
        self._mask = (mask_token_id, embedding_H.to(device=like.device, dtype=like.dtype))

    def embed(self, ids_N: torch.Tensor) -> torch.Tensor:
        """The embeddings (N, H) of a block's ids: the target's, which the drafter shares, and its own for the mask."""
        embeds_NH = self._embedding(ids_N)
        if self._mask is not None:
            mask_token_id, mask_H = self._mask
            embeds_NH = torch.where((ids_N == mask_token_id)[:, None], mask_H, embeds_NH)
        return embeds_NH if self._embedding_scale == 1.0 else embeds_NH * self._embedding_scale

    def prefill(self, batch: Any) -> tuple[Any, torch.Tensor]:
        """Run a prefill batch; SGLang's result, and the features (N, D) of its tokens, taken out of it."""
        self._penalties.begin(batch)
        result = self.worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        self._note(batch.reqs, result.next_token_ids[:, None], commit_B=None)
        features_ND = _take_features(result.logits_output)
        # Rows past the batch's tokens are padding of the target's graph.
        return result, features_ND[: int(sum(batch.extend_lens))]

    def verify(
        self,
        batch: Any,
        round_: Round,
        block: Block,
        draft: Draft,
        width: int,
        advance_grammars: Callable[[], None] | None,
    ) -> Verified:
        """One causal pass over the first `width` tokens of every block, and the target's own token after each.

        Ends in the injection of these tokens' features. Overwrites fields of `batch`; SGLang restores all of them
        after the worker returns.
        """
        tokens_BW, positions_BW = draft.tokens_BK[:, :width], block.positions_BK[:, :width]
        tree = grammar.start_copy(batch, tokens_BW)
        result = self._forward(batch, round_, block, tokens_BW)
        features_ND = _take_features(result.logits_output)
        assert self._inject is not None, "init_graphs must run before the first round"
        assert self._choices is not None
        if not result.can_run_cuda_graph:
            self._inject(features_ND, positions_BW.reshape(-1), block.slots_BK[:, :width].reshape(-1))
        elif self._all_argmax(batch, draft):
            return Verified(self._choices.tokens(*tokens_BW.shape), None, width, result)
        logits_NV = result.logits_output.next_token_logits = result.logits_output.next_token_logits.float()
        logits_BWV = logits_NV.view(*positions_BW.shape, -1)
        # The order is that of SGLang's plain decoding.
        self._penalties.apply(batch.reqs, tokens_BW, positions_BW, logits_BWV)
        grammar.mask(batch, tree, advance_grammars, logits_NV)
        sampling.add_bias(batch.sampling_info, logits_BWV)
        self._processors.apply(batch, tokens_BW, positions_BW, logits_BWV)
        choices_BW = p_BWV = None
        if draft.q is not None:
            p_BWV = sampling.distribution(self.runner, batch.sampling_info, logits_NV, positions_BW)
        else:
            # `rounds.result` reads the logits where logprobs are asked for.
            choices_BW = sampling.choose(
                self.runner, batch.sampling_info, logits_NV, positions_BW, keep_logits=batch.return_logprob
            )
        return Verified(choices_BW, p_BWV, width, result)

    def _all_argmax(self, batch: Any, draft: Draft) -> bool:
        """Whether a round wants the argmax of the target's logits and nothing else of them."""
        info = batch.sampling_info
        return (
            info.is_all_greedy
            and draft.q is None
            and not batch.return_logprob
            and not batch.has_grammar
            and info.logit_bias is None
            and not info.has_custom_logit_processor
            and not self._penalties.asked(batch.reqs)
        )

    def commit(self, batch: Any, accepted: Accepted) -> None:
        """Note what a round committed, for options that depend on the output."""
        self._note(batch.reqs, accepted.tokens_BW, accepted.commit_B)

    def _note(self, reqs: list[Any], tokens_BW: torch.Tensor, commit_B: torch.Tensor | None) -> None:
        self._penalties.add(reqs, tokens_BW, commit_B)
        self._processors.add(reqs, tokens_BW, commit_B)

    def _forward(self, batch: Any, round_: Round, block: Block, tokens_BW: torch.Tensor) -> Any:
        """The blocks on top of the cached prefixes; SGLang's result."""
        width = tokens_BW.shape[1]
        if self._graphs is not None and width == block.ids_BK.shape[1] and self._graphs.hold(round_.num_requests):
            return GenerationBatchResult(logits_output=self._graphs.verify(tokens_BW), can_run_cuda_graph=True)
        batch.out_cache_loc = block.slots_BK[:, :width].reshape(-1)
        batch.seq_lens_cpu = round_.seq_lens_bound_cpu_B
        batch.seq_lens_sum = round_.seq_lens_bound_sum
        verify_input = DFlashVerifyInput(
            draft_token=tokens_BW.reshape(-1),
            positions=block.positions_BK[:, :width].reshape(-1),
            draft_token_num=width,
            custom_mask=None,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=block.plan,
            kv_loc_cols=None if width == block.ids_BK.shape[1] else slice(0, width),
        )
        # Deferred: the runner loads the batch into its graph once, when it runs it.
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.worker, defer_metadata_init=True)
        return self.worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)


def _gather_embeddings(embedding: Any) -> None:
    """Let a table on a GPU be indexed: for at most 16 ids, one block, PyTorch's `embedding` takes a slower kernel."""
    if type(getattr(embedding, "quant_method", None)) is UnquantizedEmbeddingMethod and embedding.weight.is_cuda:
        embedding.quant_method.embedding = lambda layer, ids: layer.weight[ids]


def _take_features(logits_output: Any) -> torch.Tensor:
    """The captured features, removed from the output so that SGLang does not copy them to the host."""
    features_ND, logits_output.hidden_states = logits_output.hidden_states, None
    assert features_ND is not None, "the target captured no hidden states although the drafter's taps were set"
    return features_ND
