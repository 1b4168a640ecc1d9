"""What differs between the releases of vLLM, in one place: the other modules of this package speak the newest one.

Each name here is that of vLLM 0.32 where that has one.  Always: a release is asked what it has, not which number it
carries, because forks keep numbers of their own; and what it lacks is either replaced without loss or refused by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import vllm
from vllm import envs
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils, single_type_kv_cache_manager
from vllm.v1.core.sched import output as sched_output

from ems.errors import ConfigError

OLDEST, NEWEST = (0, 23), (0, 32)
"""The releases that EMS is tested with, both included."""
IN_PART = (0, 33)
"""The release after them, which has no CPU build: its Python code was tested over the kernels of the one before."""


@dataclass
class _TransferResults:
    """What asynchronous transfers came to, as vLLM 0.30 and later ask for it."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


KVConnectorTransferResults: Any = getattr(base, "KVConnectorTransferResults", _TransferResults)

HOST_HIT: Any = getattr(getattr(base, "CacheHitSource", None), "HOST", None)
"""How the engine calls tokens that came from a host's memory (0.32); None where it does not tell sources apart."""

REPORTS_FAILED_REQUESTS = hasattr(base, "KVConnectorTransferResults")
"""Whether the engine can be told of a failed load by its request, and not only by blocks (0.30)."""


def untested_release(version: str = vllm.__version__) -> str | None:
    """A warning for a release that nobody tested with this EMS, else None."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return None
    first, last = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    in_part = (int(numbers[1]), int(numbers[2])) == IN_PART
    rest = f", and with this one's Python code over the kernels of {last}" if in_part else ""
    return f"this is vLLM {version}, and EMS was tested with {first} to {last}{rest}"


def runs_on_v2(vllm_config: Any) -> bool:
    configured = getattr(vllm_config, "use_v2_model_runner", None)
    return bool(getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", False) if configured is None else configured)


def may_load_in_step(vllm_config: Any) -> bool:
    """Whether the engine computes the right tokens after a load that was part of a step and failed.

    Model Runner V2 goes on as if it had not failed (vllm#49250).  Where steps overlap (asynchronous scheduling, stages
    of a pipeline) the next step has begun before that is known, and the engine takes the token that it computes.
    """
    overlap = getattr(vllm_config.scheduler_config, "async_scheduling", False)
    return not (runs_on_v2(vllm_config) or overlap or vllm_config.parallel_config.pipeline_parallel_size > 1)


def check_failures(groups: int, windows: bool, *, reports: bool = REPORTS_FAILED_REQUESTS) -> None:
    """Refuse models of which a load that failed could not be reported: before 0.30 the engine is told of blocks only.

    Several KV cache groups have blocks of one number, and the engine ends.  Behind a sliding window it computes from
    the first block that failed, with what it has dropped before that as it is.

    Raises ConfigError: so it is.
    """
    if reports or (groups == 1 and not windows):
        return
    has, instead = "a sliding window", ""
    if groups > 1:
        has, instead = f"{groups} KV cache groups", ", or start with --disable-hybrid-kv-cache-manager"
    raise ConfigError(
        f"the model has {has}, and vLLM {vllm.__version__} cannot be told of a load that failed whole; take vLLM 0.30 "
        f"or later{instead}"
    )


HANDS_OVER_STATES = hasattr(sched_output, "KVConnectorBlockState")
"""Whether the engine tells which blocks hold the states of state-space layers (0.32)."""


def states_handed_over(scheduler_output: Any) -> dict[str, list[tuple[int, int, int]]]:
    """By request: KV cache group, block and token count of states that the blocks hold once this step is computed."""
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    return state.boundary_state_offloads if state is not None else {}


def failed_receives(connector_output: Any) -> set[str]:
    return getattr(connector_output, "failed_recving", None) or set()


def counts_references(model: Any) -> bool:
    """Whether the engine takes a block with as many references as it has requests for one that all of them share.

    Cascade attention did before 0.32, where it was asked for: it computes wrong tokens when somebody else holds blocks.
    """
    manager = single_type_kv_cache_manager.FullAttentionManager
    return hasattr(manager, "get_num_common_prefix_blocks") and not getattr(model, "disable_cascade_attn", True)


def hosts_of_ranks() -> int:
    """How many hosts the tensor- and pipeline-parallel ranks run on.  All ranks must call this together.

    The configuration does not say where Ray puts the ranks.
    """
    if (getattr(parallel_state, "_NODE_COUNT", None) or 1) == 1:
        return 1
    groups = (parallel_state.get_tp_group(), parallel_state.get_pp_group())
    together = all(all(parallel_state.in_the_same_node_as(group.cpu_group)) for group in groups)
    return 1 if together else int(parallel_state.get_node_count())


def around_reset(block_pool: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` when the engine is about to empty its prefix cache, and ``after`` if it has.

    vLLM keeps its cache while a block is in use, and tells the connector only after it was emptied.
    """
    reset = block_pool.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        before()
        done = bool(reset())
        if done:
            after()
        return done

    block_pool.reset_prefix_cache = reset_prefix_cache


def around_free_blocks(block_pool: Any, none_free: Callable[[], bool]) -> None:
    """While ``none_free`` the engine finds no free block, and so it schedules no further request."""
    free = block_pool.get_num_free_blocks
    block_pool.get_num_free_blocks = lambda: 0 if none_free() else free()


def computed_tokens(request: Any) -> int:
    """Leading tokens of ``request`` whose state no step under way writes any more."""
    return max(min(int(request.num_computed_tokens - request.num_in_flight_tokens), int(request.num_tokens)), 0)


def count_tokens_in_flight(request: Any, scheduler: Any) -> None:
    """Let these classes of the engine count the tokens that steps under way compute; before 0.26 they do not.

    Other projects may have done so already.  A scheduler that ends its steps otherwise only ever counts more of them.
    """
    if hasattr(request, "num_in_flight_tokens") or "num_in_flight_tokens" in request.__init__.__code__.co_names:
        return
    request.num_in_flight_tokens = 0
    kind = _of_vllm(scheduler)
    begun, ended = kind._update_after_schedule, kind.update_from_output  # noqa: SLF001 - no public place

    @functools.wraps(begun)
    def update_after_schedule(self: Any, output: Any) -> None:
        begun(self, output)
        for request_id, tokens in output.num_scheduled_tokens.items():
            self.requests[request_id].num_in_flight_tokens += tokens

    @functools.wraps(ended)
    def update_from_output(self: Any, output: Any, *results: Any) -> Any:
        for request_id, tokens in output.num_scheduled_tokens.items():
            if request_id in self.requests:
                self.requests[request_id].num_in_flight_tokens -= tokens
        return ended(self, output, *results)

    kind._update_after_schedule, kind.update_from_output = update_after_schedule, update_from_output  # noqa: SLF001


def keep_stepping(scheduler: Any, saving: Callable[[Any], bool], *, base: Any = base.KVConnectorBase_V1) -> None:
    """Let the engine make steps while ``saving``, in which workers say that saves are over; vLLM 0.23 asks nobody."""
    if hasattr(base, "has_pending_push_work"):
        return
    kind = _of_vllm(scheduler)
    has_requests = kind.has_requests
    kind.has_requests = lambda self: bool(has_requests(self) or saving(self))


def _of_vllm(scheduler: Any) -> Any:
    """VLLM's own scheduler: other projects put one of theirs in its place."""
    return next(kind for kind in reversed(scheduler.__mro__) if "_update_after_schedule" in vars(kind))


# -------------------------------------------------------------------------------------------------------- KV events


def event_extra_keys(entries: list[Any]) -> list[Any] | None:
    """The extra keys of blocks as events carry them: without the tags of hashes since 0.32."""
    convert = getattr(kv_cache_utils, "to_event_extra_keys", None)
    if not any(entries):
        return None
    return entries if convert is None else convert(entries)


def hash_tokens(kv_cache_config: Any, block_size: int) -> int:
    """How many tokens one of a request's block hashes stands for; before 0.32 a whole block unless told otherwise."""
    return int(getattr(kv_cache_config, "hash_block_size", None) or block_size)


# -------------------------------------------------------------------------------------------------- a layer's state


def num_heads(spec: Any) -> int:
    return int(spec.num_heads if hasattr(spec, "num_heads") else spec.num_kv_heads)


def tokens_per_state(spec: Any) -> str:
    return str(getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1)))


def state_content_size_bytes(spec: Any) -> int:
    known = getattr(spec, "state_content_size_bytes", None)
    return int(spec.page_size_bytes // (spec.block_size * num_heads(spec)) if known is None else known)


def extra_retained_tokens(spec: Any) -> int:
    """Tokens behind a sliding window whose state is kept all the same."""
    return int(getattr(spec, "extra_retained_tokens", 0))


def kv_quant_mode(spec: Any) -> str:
    """How keys and values are quantised; a state that is none of attention is not."""
    return str(getattr(spec, "kv_quant_mode", "none"))
