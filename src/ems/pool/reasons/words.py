"""Every reason for a miss: one word each for metrics and logs, one sentence for people, a number for the wire.

The one vocabulary of node and engine.  What always holds: a reason that travels keeps its number for ever.
"""

from __future__ import annotations

from enum import Enum
from typing import Self

_EVICTED = "the next block was evicted: "
_REFUSED = "the next block was refused when it was to be stored: "


class Reason(Enum):
    """The first thing that kept the rest of a prompt from being loaded: its word, its sentence, its number."""

    sentence: str
    code: int
    """The number that travels; 0 for what only engines say."""

    def __new__(cls, word: str, sentence: str, code: int = 0) -> Self:
        reason = object.__new__(cls)
        reason._value_ = word
        reason.sentence = sentence
        reason.code = code
        return reason

    NOTHING_MISSED = "nothing_missed", "all that could be loaded was loaded"

    # Said by the node
    NEVER_STORED = "never_stored", "the next block was never stored, or left longer ago than the pool remembers", 1
    BEING_WRITTEN = "being_written", "the next block is still being written", 2
    EVICTED_FULL = "evicted_full", _EVICTED + "its namespace was full and newer blocks needed the room", 3
    EVICTED_WATERMARK = "evicted_watermark", _EVICTED + "the pool was fuller than its high watermark", 4
    EVICTED_FOR_OTHERS = "evicted_for_others", _EVICTED + "another namespace needed the memory", 5
    EVICTED_QUOTA = "evicted_quota", _EVICTED + "its tenant was above its quota", 6
    EVICTED_RESIZE = "evicted_resize", _EVICTED + "the pool was made smaller", 7
    CLEARED = "cleared", "the next block was cleared by an administrator", 9
    CHECKSUM = "checksum", "the next block was damaged and was taken out of the pool", 10
    UNFINISHED = "unfinished", "the next block was begun, but its writer gave up or left before it was whole", 11
    REFUSED_NO_SPACE = "refused_no_space", _REFUSED + "nothing could make room for it", 12
    REFUSED_NOT_TOUCHED = "refused_not_touched", _REFUSED + "memory was not touched yet", 13
    REFUSED_DRAINING = "refused_draining", _REFUSED + "the node was being drained", 14
    REFUSED_SHARE = "refused_share", _REFUSED + "too many were reserved by its writer and not committed", 21
    OTHER_LAYOUT = "other_layout", "the pool has this model only in another layout, which means other bytes", 15
    OTHER_TENANT = "other_tenant", "only another tenant has this", 16
    TIER_OFFLINE = "tier_offline", "the tier that has the next block, or may have it, does not answer", 17
    GAP = "gap", "the next block is not in the pool, though later ones are: only a prefix without gaps can be used", 18
    LOCAL_ONLY = "local_only", "this host lacks the next block, and read_local_only keeps from asking others for it", 22
    NOT_ASKED = "not_asked", "this host lacks the next block, and other hosts, which may have it, were not asked", 23
    LOWER_TIER = "lower_tier", "the next block is in a lower tier and not in memory yet", 19

    # Said by the engine
    ABSENT = "absent", "the next block is not in the pool: it was never stored, is still being written, or was evicted"
    IN_ENGINE = "in_engine", "the engine's own cache had at least as much as the pool"
    TOO_SHORT = "too_short", "the prompt is too short to be looked up"
    LOOKUP_TIMEOUT = "lookup_timeout", "the pool was not done looking before lookup_timeout_ms were over"
    LOOKUP_FAILED = "lookup_failed", "the lookup failed, the log says why"
    POOL_DOWN = "pool_down", "the pool is not well and is not asked until it has recovered"
    BELOW_MINIMUM = "below_minimum", "less was found than num_min_reuse_tokens and num_min_load_blocks ask for"
    DEAR = "cheaper_to_compute", "computing is quicker than loading here", 20
    LOAD_FAILED = "load_failed", "blocks that were promised could not be loaded and were computed"
    ADAPTER = "adapter", "which weights the request's LoRA adapter has cannot be told, the log says why"
    DOES_NOT_LOAD = "does_not_load", "this engine only stores and loads nothing"
    NO_STATE = (
        "no_state",
        "the pool has the next blocks, but no state of the model's state-space layers behind one of them",
    )
    NOT_LOADED = "not_loaded", "the engine did not ask for the load"

    @classmethod
    def of_code(cls, code: int) -> Reason | None:
        """The reason that travelled as ``code``; None for 0 and for numbers of later versions."""
        return _REASONS.get(code)


_REASONS = {reason.code: reason for reason in Reason if reason.code}
CODES = max(_REASONS) + 1
"""All numbers that travel are below."""
