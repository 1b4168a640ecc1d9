"""What differs between the releases of vLLM, in one place: the other modules of this package speak the newest one.

Each name here is that of vLLM 0.32 where that has one.  Always: a release is asked what it has, not which number it
carries, because forks keep numbers of their own; and what it lacks is either replaced without loss or refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from ems.errors import ConfigError

OLDEST, NEWEST = (0, 28), (0, 32)
"""The releases that EMS is tested with, both included."""


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
    return f"this is vLLM {version}, and EMS was tested with {first} to {last}"


def runs_on_v2(vllm_config: Any) -> bool:
    """Whether the engine computes with vLLM's Model Runner V2."""
    told = getattr(vllm_config, "use_v2_model_runner", None)
    return bool(getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", False) if told is None else told)


def check_groups(groups: int, *, reports: bool = REPORTS_FAILED_REQUESTS) -> None:
    """Refuse several KV cache groups where a load that failed could not be reported.

    Before 0.30 failed loads are reported by block, and the engine ends when it has several groups to look for it in.

    Raises:
        ConfigError: so it is.
    """
    if groups > 1 and not reports:
        raise ConfigError(
            f"the model has {groups} KV cache groups, and vLLM {vllm.__version__} cannot be told of a load that failed "
            "in one of several; take vLLM 0.30 or later, or start with --disable-hybrid-kv-cache-manager"
        )


def check_windows(windows: bool, *, reports: bool = REPORTS_FAILED_REQUESTS) -> None:
    """Refuse layers that drop old blocks where a load that failed could not be reported whole.

    Before 0.30 the engine computes from the first block that failed, with what it has dropped before that as it is.

    Raises:
        ConfigError: so it is.
    """
    if windows and not reports:
        raise ConfigError(
            f"the model's attention has a sliding window, and vLLM {vllm.__version__} cannot be told of a load that "
            "failed whole; take vLLM 0.30 or later"
        )


def failed_receives(connector_output: Any) -> set[str]:
    """Requests whose loads failed, in what the workers reported."""
    return getattr(connector_output, "failed_recving", None) or set()


def computing(request: Any) -> bool:
    """Whether a step that was launched may still write state of ``request``; not known before 0.27: it may."""
    return bool(getattr(request, "num_in_flight_tokens", 1))


# -------------------------------------------------------------------------------------------------------- KV events


def event_extra_keys(entries: list[Any]) -> list[Any] | None:
    """What else names blocks, as events tell it: without the tags that hashes have since 0.32."""
    convert = getattr(kv_cache_utils, "to_event_extra_keys", None)
    if not any(entries):
        return None
    return entries if convert is None else convert(entries)


def block_stored(kind: Any, **fields: Any) -> Any:
    """A ``BlockStored`` event of what this release has in one."""
    known = kind.__struct_fields__
    return kind(**{name: value for name, value in fields.items() if name in known})


def spec_kind(spec: Any) -> str | None:
    """The word for a layer's kind of state; None where the release has none."""
    name = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    return None if name is None else str(name(spec).value)


def hash_tokens(kv_cache_config: Any, block_size: int) -> int:
    """How many tokens one of a request's block hashes stands for; before 0.32 a whole block unless told otherwise."""
    return int(getattr(kv_cache_config, "hash_block_size", None) or block_size)


# -------------------------------------------------------------------------------------------------- a layer's state


def num_heads(spec: Any) -> int:
    """Heads on this rank, as the tensors have them."""
    return int(getattr(spec, "num_heads", spec.num_kv_heads))


def tokens_per_state(spec: Any) -> str:
    """How many tokens one stored state stands for, as a fraction."""
    return str(getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1)))


def state_content_size_bytes(spec: Any) -> int:
    """Bytes of one state of one head, keys and values."""
    known = getattr(spec, "state_content_size_bytes", None)
    return int(spec.page_size_bytes // (spec.block_size * num_heads(spec)) if known is None else known)


def extra_retained_tokens(spec: Any) -> int:
    """Tokens behind a sliding window whose state is kept all the same."""
    return int(getattr(spec, "extra_retained_tokens", 0))


def kv_quant_mode(spec: Any) -> str:
    """How keys and values are quantised; before 0.24 the cache's dtype says all that is known of it."""
    return str(getattr(spec, "kv_quant_mode", "none"))
