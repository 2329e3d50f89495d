"""The draft model inside SGLang: its worker, its share of the KV pool, its graphs, and its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded as counts_real_tokens
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker, make_draft_block_spec_info
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.draft.block import BlockLayout
from sglang_dflash.host import arguments, fp8_drafter, rounds
from sglang_dflash.host.round_graphs import RoundGraphs
from sglang_dflash.host.target_model import TargetModel
from sglang_dflash.host.weights import DrafterWeights
from sglang_dflash.inject.features import DraftLayers, project
from sglang_dflash.records import Block, Round

# Of N tokens: the drafter's hidden states (N, H), and their ids (N).
Score = Callable[[torch.Tensor, torch.Tensor], None]
# The fused context (N, H) to keys and values of every draft layer (N, L, E).
Projection = Callable[[torch.Tensor], torch.Tensor]


class DraftModel:
    """SGLang's worker of the drafter, as the round uses it."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target: TargetModel, block_size: int, ops: Any
    ) -> None:
        bundle = build_draft_tp_worker(
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            target_model_config=target.runner.model_config,
            algo_label="DFLASH",
        )
        self.worker = bundle.draft_worker
        self.runner = bundle.draft_model_runner
        self.model = bundle.draft_model
        _require_dtype(self.runner.dtype, target.runner.dtype)
        self.model.set_block_size(block_size)
        # SGLang's draft model embeds its block with this, inside the graph; given embeddings it would cast to bfloat16.
        self.model.forward_embed = target.embed
        attention = [layer.self_attn for layer in self.model.layers]
        _require_served(attention)
        # Before the KV pool takes the free memory.
        quantized = fp8_drafter.is_fp8(self.model)
        self._project = self._projection_in_fp8(ops) if quantized else self._projection(attention)
        self._k_norm_LD = _stack_in_place([a.k_norm.weight for a in attention])
        self.weights = DrafterWeights(self.runner, arguments.drafter(server_args), quantized)
        self._spec_info = make_draft_block_spec_info(draft_token_num=block_size, device=self.runner.device)
        self._target_runner = target.runner
        self._layout: BlockLayout | None = None
        self._score: Score | None = None
        self._graphs: RoundGraphs | None = None

    @staticmethod
    def _projection(attention: list[Any]) -> Projection:
        """By the layers' own weights, which move into one tensor."""
        q_size = attention[0].q_size
        weight_LEH = _stack_in_place([a.qkv_proj.weight for a in attention])
        biases = [a.qkv_proj.bias for a in attention]
        bias_LE = None if biases[0] is None else _stack_in_place(biases)
        return partial(project, weight_LEH[:, q_size:], None if bias_LE is None else bias_LE[:, q_size:])

    def _projection_in_fp8(self, ops: Any) -> Projection:
        linear, num_layers = fp8_drafter.refit(self.model, ops), len(self.model.layers)
        return lambda context_NH: linear(context_NH).unflatten(1, (num_layers, -1))

    def init_graphs(self, layout: BlockLayout, score: Score, graphs: RoundGraphs | None) -> None:
        """Capture the drafter's graphs, each ending in `score`; `graphs` replays them, or SGLang."""
        self._layout, self._score, self._graphs = layout, score, graphs
        capture = get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED
        if capture:
            self.runner.capture_tail_hooks.append(
                lambda runner, out, forward_batch, num_tokens: score(out.hidden_states, forward_batch.input_ids)
            )
        self.worker.init_cuda_graphs(capture_decode_cuda_graph=capture)

    def forward(self, round_: Round) -> Block:
        """Lay the round's blocks out, run them through the drafter and score them.

        A block sees the injected context and, both ways, itself. Its keys and values go to its slots and stay there
        until features are injected over them.
        """
        assert self._layout is not None, "init_graphs must run before the first round"
        if self._graphs is not None and self._graphs.hold(round_.num_requests):
            self._graphs.draft(round_)
            return self._blocks(round_)
        self._layout.fill(round_.anchor_B, round_.seq_lens_B, round_.rows_B)
        block = self._blocks(round_)
        self._run(round_, block)
        return block

    def _blocks(self, round_: Round) -> Block:
        assert self._layout is not None
        return rounds.blocks(round_, self._layout, self._target_runner.kv_index_translator)

    def _run(self, round_: Round, block: Block) -> None:
        """The pass over blocks that are laid out, as SGLang runs it."""
        assert self._score is not None
        num_tokens = block.ids_BK.numel()
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=round_.num_requests,
            input_ids=block.ids_BK.view(-1),
            req_pool_indices=round_.rows_B,
            seq_lens=round_.seq_lens_B,
            out_cache_loc=block.slots_BK.view(-1),
            seq_lens_sum=round_.seq_lens_bound_sum,
            seq_lens_cpu=round_.seq_lens_bound_cpu_B,
            positions=block.positions_BK.view(-1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=self._num_real_tokens(num_tokens),
            global_num_token_non_padded_cpu=num_tokens,
        )
        block.plan.bind(forward_batch, self.runner.kv_index_translator)
        with torch.inference_mode():
            out = self.runner.forward(forward_batch)
            if not out.can_run_graph:
                self._score(out.logits_output.hidden_states, forward_batch.input_ids)

    def _num_real_tokens(self, num_tokens: int) -> torch.Tensor | None:
        if not counts_real_tokens():
            return None
        return torch.full((), num_tokens, dtype=torch.int32, device=self.runner.device)

    def layers(self) -> DraftLayers:
        """What injection reads of the drafter; call after the KV pool is allocated.

        Raises:
            ValueError: a KV pool of a kind that injection does not serve.
        """
        from sglang_dflash_kernels import CachePointers

        attention = [layer.self_attn for layer in self.model.layers]
        pool = self.runner.token_to_kv_pool
        _require_token_major(pool)
        assert pool.head_num == attention[0].num_kv_heads, "the drafter's KV pool was sized for another number of heads"
        return DraftLayers(
            fuse=self.model.project_target_hidden,
            project=self._project,
            k_norm_LD=self._k_norm_LD,
            eps_L=torch.tensor([a.k_norm.variance_epsilon for a in attention], device=self.runner.device),
            cos_sin_PR=attention[0].rotary_emb.cos_sin_cache,
            value_scale=1.0 if attention[0].v_scale is None else float(attention[0].v_scale),
            caches=CachePointers(list(pool.k_buffer), list(pool.v_buffer)),
        )


def _stack_in_place(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Move equally shaped parameters into one tensor of shape (L, ...) and return it; each becomes a view of its part.

    A weight update that writes into the parameters is then seen at once, and nothing is stored twice.
    """
    stacked = torch.stack([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, stacked, strict=True):
        parameter.data = part
    return stacked


def _require_dtype(drafter: torch.dtype, target: torch.dtype) -> None:
    """The drafter reads the target's embeddings and hidden states as they are."""
    if drafter != target:
        raise ValueError(
            f"the drafter: expected the target's dtype {target}, got {drafter}; start the server with "
            f"--dtype {str(target).removeprefix('torch.')}."
        )


def _require_served(attention: list[Any]) -> None:
    if any(a.use_gemma_norm for a in attention):
        raise ValueError("the drafter: expected RMSNorm, got Gemma norms.")
    # Injection reads SGLang's table of cosines and sines; LongRoPE, for one, keeps two tables and chooses at run time.
    rotary = [a.rotary_emb for a in attention]
    if any(not getattr(r, "is_neox_style", False) or not hasattr(r, "cos_sin_cache") for r in rotary):
        raise ValueError(f"the drafter: expected neox-style RoPE from one table, got {type(rotary[0]).__name__}.")
    if any(getattr(a.qkv_proj, "use_intel_amx_backend", False) for a in attention):
        raise ValueError("the drafter: expected weights as they were loaded, got weights repacked for AMX.")
    served = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    if any(getattr(getattr(a.qkv_proj, "weight", None), "dtype", None) not in served for a in attention):
        raise ValueError(
            "the drafter: expected dense or FP8 attention weights, got others; use the unquantized drafter."
        )
    if any(scale not in (None, 1.0) for a in attention for scale in (a.attn.k_scale, a.attn.v_scale)):
        raise ValueError("the drafter: expected key and value scales of 1, got others; use --kv-cache-dtype auto.")


def _require_token_major(pool: Any) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
        raise ValueError(
            f"the drafter's KV pool: expected SGLang's MHATokenToKVPool in the token-major layout, got "
            f"{type(pool).__name__} ({getattr(pool, 'kv_cache_layout', 'unknown')}); leave the KV-cache flags at their "
            "defaults."
        )
    if pool.store_dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"the drafter's KV pool: expected a float dtype, got {pool.store_dtype}; use --kv-cache-dtype auto."
        )
