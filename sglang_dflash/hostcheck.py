"""Every name of SGLang that this package uses, with the parameters it passes; nothing else of SGLang is relied on.

A host of another version, or one whose functions changed, is refused with a sentence that names what differs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import pkgutil

SGLANG_VERSION = "0.5.23"


@dataclasses.dataclass(frozen=True)
class Contract:
    """One name of SGLang.

    Attributes:
        path: dotted path of a function, method or class.
        parameters: names we pass, or, for a class without a constructor of interest, attributes we read.
        exact: the function's parameters must be exactly these (a hook wraps it and passes them on).
    """

    path: str
    parameters: tuple[str, ...] = ()
    exact: bool = False

    def problem(self) -> str | None:
        """What differs, as one sentence; None when the host fits."""
        try:
            target = pkgutil.resolve_name(self.path)
        except (ImportError, AttributeError) as error:
            return f"SGLang has no {self.path} ({error}); install sglang=={SGLANG_VERSION}."
        found = _names(target)
        missing = [name for name in self.parameters if name not in found]
        if missing or (self.exact and tuple(found) != self.parameters):
            return (
                f"{self.path}: expected parameters ({', '.join(self.parameters)}), got ({', '.join(found)}); "
                f"install sglang=={SGLANG_VERSION}."
            )
        return None


def _names(target: object) -> list[str]:
    if isinstance(target, type):
        names = [name for name in inspect.signature(target).parameters if not name.startswith("_")]
        return names + [name for name in dir(target) if not name.startswith("__")]
    if callable(target):
        return list(inspect.signature(target).parameters)
    return []


# Cheap to resolve: checked in every process.
REGISTRATION = (
    Contract("sglang.srt.plugins.hook_registry.HookType", ("AROUND", "REPLACE")),
    Contract("sglang.srt.plugins.hook_registry.HookRegistry", ("_patched",)),
    Contract("sglang.srt.plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type")),
    Contract("sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks"),
    Contract(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", ("self", "server_args"), exact=True
    ),
    Contract("sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding", ("server_args",), exact=True),
    Contract("sglang.srt.arg_groups.speculative_hook._handle_dflash", ("server_args",), exact=True),
    Contract("sglang.srt.arg_groups.speculative_hook._resolve_dflash_draft_attention_backend", ("server_args",)),
    Contract("sglang.srt.arg_groups.overrides.declare_resolution", ("server_args", "source", "fields")),
    Contract("sglang.srt.arg_groups.overrides.resolving_view", ("server_args",)),
    Contract("sglang.srt.arg_groups.model_override_base.model_config_of", ("server_args",)),
    Contract("sglang.srt.runtime_context.attn_dp_enabled_of", ("cfg",)),
    Contract("sglang.srt.utils.common.get_device_memory_capacity", ("device",)),
)

# The scheduler's side: checked where the worker is made, and by `sglang-dflash check`.
WORKER = (
    Contract("sglang.srt.speculative.dflash_utils.validate_dflash_request", ("req", "enable_overlap"), exact=True),
    Contract(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        ("self", "state"),
        exact=True,
    ),
    *(
        Contract(
            f"sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.{update}",
            ("self", "recv_req"),
            exact=True,
        )
        for update in (
            *(f"update_weights_from_{source}" for source in ("ipc", "disk", "tensor", "distributed")),
            "end_weight_update",
        )
    ),
    Contract("sglang.srt.managers.io_struct.UpdateWeightFromDiskReqInput", ("model_path",)),
    Contract("sglang.srt.managers.io_struct.UpdateWeightsFromTensorReqInput", ("selector",)),
    Contract("sglang.srt.managers.io_struct.UpdateWeightsFromDistributedReqInput", ("selector",)),
    Contract("sglang.srt.managers.io_struct.UpdateWeightFromDiskReqOutput", ("success", "message")),
    Contract(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater",
        ("begin_weight_update", "end_weight_update"),
    ),
    Contract(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor",
        ("self", "named_tensors", "load_format"),
    ),
    Contract(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.load_weights_from_distributed",
        ("self", "named_tensors"),
    ),
    Contract("sglang.srt.model_executor.model_runner.ModelRunner.check_weights"),
    Contract("sglang.srt.models.dflash.DFlashDraftModel.load_weights", ("weights",)),
    Contract("sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len", (), exact=True),
    Contract("sglang.srt.managers.schedule_batch.Req.update_finish_state", ("self", "new_accepted_len"), exact=True),
    Contract("sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode"),
    Contract(
        "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.forward_extend",
        (
            *("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "q_rope", "k_rope", "sinks"),
            *("q_descale", "k_descale", "v_descale", "score_mod", "aux_tensors", "rel_bias", "rel_bias_event"),
            "return_lse",
        ),
        exact=True,
    ),
    Contract("sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.get_paged_mha_kv_cache"),
    Contract(
        "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.init_forward_metadata_out_graph",
        ("forward_batch",),
    ),
    Contract(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._make_graph_key", ("size",)
    ),
    Contract(
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.replay",
        ("shape_key", "static_forward_batch"),
    ),
    Contract(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._resolve_shared_read_ends",
        ("attn_backend", "forward_mode"),
    ),
    Contract(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._publish_read_done",
        ("in_graph",),
    ),
    Contract("sglang.srt.model_executor.cuda_graph_buffer_registry.CudaGraphBufferRegistry.slot_names"),
    Contract("sglang.srt.layers.attention.base_attn_backend.SharedReadEnds", ("IN_REPLAY",)),
    Contract("sglang.srt.layers.moe.utils.get_moe_a2a_backend"),
    Contract("sglang.srt.state_capturer.indexer_topk.get_global_indexer_capturer"),
    Contract("sglang.srt.state_capturer.routed_experts.get_global_experts_capturer"),
    Contract("sglang.srt.debug_utils.dumper.dumper"),
    Contract("sglang.srt.utils.device_timer.device_timer_ctx", ("timer", "category")),
    Contract("sglang.srt.layers.radix_attention.AttentionType", ("DECODER", "DECODER_BIDIRECTIONAL", "ENCODER_ONLY")),
    Contract("sglang.srt.layers.radix_attention.RadixAttention"),
    Contract("sglang.srt.environ.envs.SGLANG_USE_SGL_FA3_KERNEL"),
    Contract(
        "sglang.srt.layers.rotary_embedding.RotaryEmbedding.forward_cuda",
        ("positions", "query", "key", "fused_set_kv_buffer_arg"),
    ),
    *(
        Contract(
            f"sglang.srt.models.{name}.forward", ("self", "positions", "hidden_states", "forward_batch"), exact=True
        )
        for name in ("llama.LlamaAttention", "qwen2.Qwen2Attention", "qwen3.Qwen3Attention")
    ),
    Contract(
        "sglang.srt.models.utils.apply_qk_norm",
        ("q", "k", "q_norm", "k_norm", "head_dim", "alt_stream", "allow_inplace"),
    ),
    Contract("sglang.srt.models.utils.create_fused_set_kv_buffer_arg", ("value", "layer", "forward_batch"), exact=True),
    Contract("sglang.srt.models.utils.enable_fused_set_kv_buffer", ("forward_batch",), exact=True),
    Contract("sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod.embedding", ("layer", "input_")),
    Contract("sglang.srt.layers.linear.LinearBase"),
    Contract("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod"),
    Contract("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply", ("layer", "x", "bias")),
    Contract("sglang.srt.layers.quantization.unquant.get_bf16_gemm_backend"),
    Contract("sglang.srt.layers.quantization.unquant.Bf16GemmBackend.is_auto"),
    Contract("sglang.srt.model_executor.runner_utils.capture_mode.get_is_capture_mode"),
    Contract("sglang.srt.runtime_context.get_flags"),
    Contract("sglang.srt.runtime_context.DpFlags.capturing_prefill_graph"),
    Contract("sglang.srt.layers.quantization.fp8_utils.apply_fp8_linear", ("input", "weight", "weight_scale", "bias")),
    Contract("sglang.srt.layers.activation.SiluAndMul"),
    Contract("sglang.srt.layers.quantization.fp8.Fp8LinearMethod"),
    Contract("sglang.srt.layers.quantization.fp8.Fp8LinearMethod.apply", ("layer", "x", "bias")),
    Contract("sglang.kernels.fused_op.get_fused_op_backend"),
    Contract("sglang.srt.mem_cache.memory_pool.KVWriteLoc"),
    Contract(
        "sglang.srt.speculative.base_spec_worker.BaseSpecWorker",
        (
            "alloc_memory_pool",
            "init_attention_backends",
            "init_cuda_graphs",
            "prewarm_sampling",
            "init_hicache_draft_plan",
            "weight_update_runners",
            "spec_v2_attn_backends",
            "last_shared_read_runner",
            "on_verify_complete_cpu",
        ),
    ),
    Contract(
        "sglang.srt.speculative.draft_worker_common.build_draft_tp_worker",
        ("server_args", "gpu_id", "nccl_port", "target_model_config", "algo_label"),
    ),
    Contract("sglang.srt.speculative.draft_worker_common.make_draft_input_v2", ("bonus_tokens", "new_seq_lens")),
    Contract("sglang.srt.speculative.draft_worker_common.make_draft_block_spec_info", ("draft_token_num", "device")),
    Contract(
        "sglang.srt.speculative.spec_utils.sample_simulated_acc_len",
        ("simulate_acc_len", "simulate_acc_method", "max_len"),
    ),
    Contract(
        "sglang.srt.speculative.dflash_info.DFlashVerifyInput",
        (
            "draft_token",
            "positions",
            "draft_token_num",
            "custom_mask",
            "capture_hidden_mode",
            "kv_loc_plan",
            "kv_loc_cols",
        ),
    ),
    Contract(
        "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify",
        ("batch", "target_worker", "defer_metadata_init"),
    ),
    Contract("sglang.srt.speculative.dflash_info_v2.DFlashDraftInputV2.create_idle_input", ("device",)),
    Contract("sglang.srt.speculative.spec_utils.GrammarTree.from_linear_chain", ("verify_ids_2d",)),
    Contract(
        "sglang.srt.speculative.spec_utils.build_grammar_vocab_mask",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    Contract("sglang.srt.speculative.spec_utils.SIMULATE_ACC_LEN"),
    Contract("sglang.srt.speculative.spec_utils.SIMULATE_ACC_METHOD"),
    Contract("sglang.srt.speculative.spec_utils.SIMULATE_ACC_TOKEN_MODE"),
    Contract("sglang.srt.configs.hybrid_arch.mambaish_config", ("model_config",)),
    Contract("sglang.srt.runtime_context.get_exec"),
    Contract("sglang.srt.runtime_context.get_spec"),
    Contract(
        "sglang.srt.utils.hf_transformers_utils.get_tokenizer",
        ("tokenizer_name", "tokenizer_mode", "trust_remote_code", "kwargs"),
    ),
    Contract("sglang.srt.utils.common.async_h2d", ("dtype", "device")),
    Contract(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        ("batch", "forward_batch", "pp_proxy_tensors", "is_verify", "capture_hidden_mode", "return_kv_loc_plan"),
    ),
    Contract(
        "sglang.srt.managers.utils.GenerationBatchResult",
        (
            *("logits_output", "next_token_ids", "accept_lens", "can_run_cuda_graph", "next_draft_input"),
            *("speculative_num_draft_tokens", "new_seq_lens", "routed_experts_output", "indexer_topk_output"),
        ),
    ),
    Contract(
        "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits",
        ("self", "hidden_states", "lm_head", "logits_metadata", "embedding_bias", "use_logits_buffer"),
        exact=True,
    ),
    Contract(
        "sglang.srt.layers.logits_processor.should_apply_lm_head_quant_method", ("lm_head", "quant_method"), exact=True
    ),
    Contract("sglang.srt.layers.logits_processor.LogitsProcessorOutput", ("next_token_logits",)),
    Contract(
        "sglang.srt.layers.logprob_processor.compute_spec_logprobs",
        ("batch", "logits_output", "predict", "chain_stride"),
    ),
    Contract(
        "sglang.srt.layers.sampler.Sampler.forward",
        ("logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs", "positions"),
    ),
    Contract(
        "sglang.srt.layers.sampler.Sampler._sample_from_probs",
        ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
        exact=True,
    ),
    Contract(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo",
        (
            *("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias", "is_all_greedy"),
            *("is_any_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"),
            *("sampling_mask_batch_indices", "acc_additive_penalties", "acc_scaling_penalties"),
            *("penalizer_orchestrator", "has_custom_logit_processor", "custom_logit_processor", "custom_params"),
        ),
    ),
    Contract(
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.plan",
        ("req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent"),
    ),
    Contract("sglang.srt.mem_cache.kv_loc_plan.KVLocPlan.bind", ("batch", "reader")),
    Contract(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        (
            "forward_mode",
            "batch_size",
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "out_cache_loc",
            "seq_lens_sum",
            "seq_lens_cpu",
            "positions",
            "spec_algorithm",
            "spec_info",
            "capture_hidden_mode",
            "num_token_non_padded",
            "global_num_token_non_padded_cpu",
            "can_run_decode_cuda_graph",
        ),
    ),
    Contract("sglang.srt.model_executor.forward_batch_info.enable_num_token_non_padded"),
    Contract("sglang.srt.model_executor.forward_batch_info.ForwardMode", ("TARGET_VERIFY",)),
    Contract("sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode", ("FULL", "NULL")),
    Contract("sglang.srt.model_executor.cuda_graph_config.Backend", ("DISABLED", "FULL")),
    Contract("sglang.srt.models.dflash.DFlashDraftModel.project_target_hidden", ("target_hidden",)),
    Contract("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool", ("is_quantized_kv_cache",)),
)

# The CPU engine's: checked at registration where it runs.
CPU = (
    Contract("sglang.srt.arg_groups.choices.add_attention_backend_choices"),
    Contract("sglang.srt.arg_groups.choices.add_draft_attention_backend_choices"),
    Contract("sglang.srt.arg_groups.choices.add_deterministic_attention_backend_choices"),
    Contract("sglang.srt.arg_groups.choices.add_radix_supported_deterministic_attention_backend_choices"),
    Contract(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode", ("self",), exact=True
    ),
    Contract("sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS"),
    Contract("sglang.srt.layers.attention.attention_registry.register_attention_backend", ("name",)),
    Contract("sglang.srt.layers.attention.base_attn_backend.AttentionBackend", ("init_forward_metadata",)),
    Contract("sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"),
    Contract(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        exact=True,
    ),
    Contract("sglang.srt.mem_cache.allocation.get_last_loc_torch"),
)

# What the commands and the tests' engines call: checked by `sglang-dflash check` alone.
COMMANDS = (
    Contract("sglang.srt.server_args.ServerArgs.add_cli_args", ("parser",)),
    Contract(
        "sglang.srt.utils.server_args_config_parser.ConfigArgumentMerger.merge_config_with_args", ("self", "cli_args")
    ),
    Contract("sglang.Engine"),
    Contract("sglang.Engine.start_profile"),
    Contract("sglang.Engine.stop_profile"),
    # `bench profile` marks these.
    Contract("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"),
    Contract("sglang.srt.model_executor.model_runner.ModelRunner.forward"),
    Contract("sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.forward_batch_generation", ("batch",)),
    Contract("sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._greedy_sample_from_vocab_parallel_head"),
    Contract("sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._accept_block"),
    Contract("sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc"),
)


def problems(contracts: tuple[Contract, ...]) -> list[str]:
    """Sentences that say what of the host does not fit; empty when all does."""
    found = installed_version()
    if found != SGLANG_VERSION:
        return [f"expected sglang {SGLANG_VERSION}, got {found or 'none'}; run: pip install sglang=={SGLANG_VERSION}."]
    return [problem for contract in contracts if (problem := contract.problem())]


def installed_version() -> str | None:
    """Version of the installed `sglang` distribution, None without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclasses.dataclass(frozen=True)
class Report:
    """What `sglang-dflash check` prints.

    Attributes:
        ok: our worker would run.
        lines: one a contract, with what differs, if anything.
    """

    ok: bool
    lines: tuple[str, ...]

    def render(self) -> str:
        return "\n".join(self.lines)


def report() -> Report:
    """Check the whole contract; imports SGLang's scheduler side (about 10 s)."""
    lines = [f"sglang: expected {SGLANG_VERSION}, got {installed_version() or 'none'}"]
    if installed_version() != SGLANG_VERSION:
        return Report(False, (*lines, *problems(())))
    ok = True
    for contract in REGISTRATION + WORKER + CPU + COMMANDS:
        problem = contract.problem()
        ok = ok and problem is None
        lines.append(f"{'FAIL' if problem else 'ok  '} {problem or contract.path}")
    return Report(ok, tuple(lines))
