"""The hooks: two on argument resolution, one on the choice of the worker, eight in the scheduler.

Where `bench profile` measures SGLang's built-in worker there is one alone, which marks that worker's stages. All are
AROUND hooks of SGLang's own registry; `hostcheck` lists their targets with signatures.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from sglang_dflash import __version__, config

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import (
        UpdateWeightFromDiskReqInput,
        UpdateWeightsFromDistributedReqInput,
        UpdateWeightsFromTensorReqInput,
    )

logger = logging.getLogger(__name__)

_RESOLUTION = "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding"
_DFLASH_ARGUMENTS = "sglang.srt.arg_groups.speculative_hook._handle_dflash"
_CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
_VALIDATE_REQUEST = "sglang.srt.speculative.dflash_utils.validate_dflash_request"
_SERVER_INFO = (
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative"
)
_ROW_HEADROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
_WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATE_FROM_DISK = f"{_WEIGHT_UPDATER}.update_weights_from_disk"
_UPDATE_FROM_TENSOR = f"{_WEIGHT_UPDATER}.update_weights_from_tensor"
_UPDATE_FROM_DISTRIBUTED = f"{_WEIGHT_UPDATER}.update_weights_from_distributed"
_UPDATE_FROM_IPC = f"{_WEIGHT_UPDATER}.update_weights_from_ipc"
_END_UPDATE = f"{_WEIGHT_UPDATER}.end_weight_update"
_FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
# Targets that carry our hook in this process.
_OURS: set[str] = set()


def install() -> list[str]:
    """Install the hooks that every process needs; sentences about targets that could not be hooked."""
    if os.environ.get(config.RANGES_VARIABLE) == "stock":
        return _apply({_CREATE_WORKER: _mark_stock})
    return _apply(
        {_RESOLUTION: _before_resolution, _DFLASH_ARGUMENTS: _resolve_arguments, _CREATE_WORKER: _create_worker}
    )


def _apply(hooks: dict[str, Any]) -> list[str]:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    new = {target: hook for target, hook in hooks.items() if target not in _OURS}
    # SGLang patches a target once and then drops every later hook on it without a word.
    problems = [
        f"another plugin has hooked {target} already; name one of the plugins in SGLANG_PLUGINS."
        for target in new
        if target in HookRegistry._patched
    ]
    if problems:  # all or none: SGLang's own worker must not serve with some of our hooks
        return problems
    for target, hook in new.items():
        HookRegistry.register(target, hook, HookType.AROUND)
        # SGLang applies hooks after all plugins ran and only logs a failure; applied here, a failure can be told.
        HookRegistry.apply_hooks()
        if target in HookRegistry._patched:
            _OURS.add(target)
        else:
            problems.append(f"the hook on {target} could not be applied; see SGLang's log.")
    return problems


def _before_resolution(original: Any, server_args: Any) -> None:
    """A drafter in the speculators form becomes one in the form SGLang reads, before SGLang looks at it."""
    from sglang_dflash.host import arguments

    arguments.point_to_readable_drafter(server_args)
    original(server_args)


def _resolve_arguments(original: Any, server_args: Any) -> None:
    """Ours where we serve the configuration; SGLang's own resolution, for its own worker, where we do not."""
    from sglang_dflash.host import arguments

    reasons = arguments.reasons_for_stock(server_args)
    if not reasons:
        arguments.resolve(server_args)
        return
    _hand_over(server_args, reasons)
    original(server_args)


def _create_worker(original: Any, self: Any, server_args: Any) -> Any:
    """The class that SGLang calls to make the speculative worker."""
    if not self.is_dflash():
        return original(self, server_args)
    from sglang_dflash import hostcheck
    from sglang_dflash.host import arguments, ends

    reasons = arguments.reasons_for_stock(server_args) or hostcheck.problems(hostcheck.WORKER)
    validate = functools.partial(
        _validate_request,
        seeded=server_args.enable_deterministic_inference,
        grammar_backend=server_args.grammar_backend,
    )
    hooks = {
        _VALIDATE_REQUEST: validate,
        _FINISH: ends.update_finish_state,
        _SERVER_INFO: _add_server_info,
        _ROW_HEADROOM: _row_headroom,
        _UPDATE_FROM_DISK: _update_from_disk,
        _UPDATE_FROM_TENSOR: _update_one_model,
        _UPDATE_FROM_DISTRIBUTED: _update_one_model,
        _UPDATE_FROM_IPC: _update,
        _END_UPDATE: _update,
    }
    reasons = reasons or _apply(hooks)
    if reasons:
        _hand_over(server_args, reasons)
        return original(self, server_args)
    from sglang_dflash.worker import DFlashWorker

    if os.environ.get(config.RANGES_VARIABLE) == "ours":
        from sglang_dflash.bench import ranges

        ranges.mark("ours")
    return DFlashWorker


def _mark_stock(original: Any, self: Any, server_args: Any) -> Any:
    """SGLang's own class, its stages marked."""
    from sglang_dflash.bench import ranges

    ranges.mark("stock")
    return original(self, server_args)


def _hand_over(server_args: Any, reasons: list[str]) -> None:
    """Tell that SGLang's built-in worker serves, and why; refuse in strict mode."""
    why, settings = "; ".join(reasons), config.load()
    if settings.strict:
        raise ValueError(
            f"sglang-dflash does not serve this configuration: {why}. Remove the option, or unset "
            f"{config.STRICT_VARIABLE} to let SGLang's built-in DFLASH worker serve it."
        )
    from sglang_dflash.host import arguments

    given = {
        "--speculative-token-map": arguments.has_token_map(server_args),
        config.CONFIG_VARIABLE: settings != config.Config(),
    }
    names = [name for name, present in given.items() if present]
    ignored = f" It ignores {' and '.join(names)}." if names else ""
    logger.warning("SGLang's built-in DFLASH worker serves, not sglang-dflash %s: %s.%s", __version__, why, ignored)


def _validate_request(
    original: Any, req: Any, enable_overlap: bool, seeded: bool, grammar_backend: str | None
) -> str | None:
    from sglang_dflash.host import requests

    return requests.refusal(req, seeded, grammar_backend) or original(req, enable_overlap)


def _add_server_info(original: Any, self: Any, state: dict[str, Any]) -> None:
    original(self, state)
    state["speculative_worker"] = f"sglang_dflash.worker.DFlashWorker {__version__}"


def _row_headroom(original: Any) -> int:
    """Columns of the request-to-token table past the context's end: all that a round reserves there.

    With pages of one token SGLang leaves room for one block where a round reserves two: the slots of a request that
    reaches the context's end would overwrite the next row's, and would never be freed.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return max(original(), get_alloc_reserve_per_decode())


def _update_from_disk(original: Any, self: Any, recv_req: UpdateWeightFromDiskReqInput) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    from sglang_dflash.host import weights

    if refusal := weights.folder_refusal(recv_req.model_path):
        return UpdateWeightFromDiskReqOutput(success=False, message=refusal)
    return _update(original, self, recv_req)


def _update_one_model(
    original: Any, self: Any, recv_req: UpdateWeightsFromTensorReqInput | UpdateWeightsFromDistributedReqInput
) -> Any:
    """Tensors that are sent to no model in particular are the target's. They come between a begin and an end."""
    if recv_req.selector == "all":
        recv_req.selector = "target"
    return original(self, recv_req)


def _update(original: Any, self: Any, recv_req: Any) -> Any:
    """A whole update, or the end of one that came in parts, or in place with no call for the weights themselves."""
    output = original(self, recv_req)
    self.draft_worker.weights_updated()
    return output
