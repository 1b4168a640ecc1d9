"""Every reason for a miss: one word each for metrics and logs, one sentence for people, a number for the wire.

The one vocabulary of node and engine.  What always holds: a reason that travels keeps its number for ever.
"""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """The first thing that kept the rest of a prompt from being loaded."""

    NOTHING_MISSED = "nothing_missed"

    # Said by the node
    NEVER_STORED = "never_stored"
    BEING_WRITTEN = "being_written"
    EVICTED_FULL = "evicted_full"
    EVICTED_WATERMARK = "evicted_watermark"
    EVICTED_FOR_OTHERS = "evicted_for_others"
    EVICTED_QUOTA = "evicted_quota"
    EVICTED_RESIZE = "evicted_resize"
    EXPIRED = "expired"
    CLEARED = "cleared"
    CHECKSUM = "checksum"
    UNFINISHED = "unfinished"
    REFUSED_NO_SPACE = "refused_no_space"
    REFUSED_NOT_TOUCHED = "refused_not_touched"
    REFUSED_DRAINING = "refused_draining"
    REFUSED_SHARE = "refused_share"
    OTHER_LAYOUT = "other_layout"
    OTHER_TENANT = "other_tenant"
    TIER_OFFLINE = "tier_offline"
    GAP = "gap"
    LOWER_TIER = "lower_tier"

    # Said by the engine
    ABSENT = "absent"
    IN_ENGINE = "in_engine"
    TOO_SHORT = "too_short"
    LOOKUP_TIMEOUT = "lookup_timeout"
    LOOKUP_FAILED = "lookup_failed"
    POOL_DOWN = "pool_down"
    BELOW_MINIMUM = "below_minimum"
    DEAR = "cheaper_to_compute"
    LOAD_FAILED = "load_failed"
    ADAPTER = "adapter"
    DOES_NOT_LOAD = "does_not_load"
    NOT_LOADED = "not_loaded"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]

    @property
    def code(self) -> int:
        """The number that travels; 0 for what only engines say."""
        return _CODES.get(self, 0)

    @classmethod
    def of_code(cls, code: int) -> Reason | None:
        """The reason that travelled as ``code``; None for 0 and for numbers of later versions."""
        return _REASONS.get(code)


_SENTENCES = {
    Reason.NOTHING_MISSED: "all that could be loaded was loaded",
    Reason.NEVER_STORED: "the next block was never stored, or left longer ago than the pool remembers",
    Reason.BEING_WRITTEN: "the next block is still being written",
    Reason.EVICTED_FULL: "the next block was evicted: its namespace was full and newer blocks needed the room",
    Reason.EVICTED_WATERMARK: "the next block was evicted: the pool was fuller than its high watermark",
    Reason.EVICTED_FOR_OTHERS: "the next block was evicted: another namespace needed the memory",
    Reason.EVICTED_QUOTA: "the next block was evicted: its tenant was above its quota",
    Reason.EVICTED_RESIZE: "the next block was evicted: the pool was made smaller",
    Reason.EXPIRED: "the next block was older than it was to become",
    Reason.CLEARED: "the next block was cleared by an administrator",
    Reason.CHECKSUM: "the next block was damaged and was taken out of the pool",
    Reason.UNFINISHED: "the next block was begun, but its writer gave up or left before it was whole",
    Reason.REFUSED_NO_SPACE: "the next block was refused when it was to be stored: nothing could make room for it",
    Reason.REFUSED_NOT_TOUCHED: "the next block was refused when it was to be stored: memory was not touched yet",
    Reason.REFUSED_DRAINING: "the next block was refused when it was to be stored: the node was being drained",
    Reason.REFUSED_SHARE: (
        "the next block was refused when it was to be stored: too many were reserved by its writer and not committed"
    ),
    Reason.OTHER_LAYOUT: "the pool has this model only in another layout, which means other bytes",
    Reason.OTHER_TENANT: "only another tenant has this",
    Reason.TIER_OFFLINE: "the tier that has the next block does not answer",
    Reason.GAP: "the next block is not in the pool, though later ones are: only a prefix without gaps can be used",
    Reason.LOWER_TIER: "the next block is in a lower tier and not in memory yet",
    Reason.ABSENT: "the next block is not in the pool: it was never stored, is still being written, or was evicted",
    Reason.IN_ENGINE: "the engine's own cache had at least as much as the pool",
    Reason.TOO_SHORT: "the prompt is too short to be looked up",
    Reason.LOOKUP_TIMEOUT: "the pool was not done looking before lookup_timeout_ms were over",
    Reason.LOOKUP_FAILED: "the lookup failed, the log says why",
    Reason.POOL_DOWN: "the pool is not well and is not asked until it has recovered",
    Reason.BELOW_MINIMUM: "less was found than num_min_reuse_tokens and num_min_load_blocks ask for",
    Reason.DEAR: "computing is quicker than loading here",
    Reason.LOAD_FAILED: "blocks that were promised could not be loaded and were computed",
    Reason.ADAPTER: "which weights the request's LoRA adapter has cannot be told, the log says why",
    Reason.DOES_NOT_LOAD: "this engine only stores and loads nothing",
    Reason.NOT_LOADED: "the engine did not ask for the load",
}

_CODES = {
    Reason.NEVER_STORED: 1,
    Reason.BEING_WRITTEN: 2,
    Reason.EVICTED_FULL: 3,
    Reason.EVICTED_WATERMARK: 4,
    Reason.EVICTED_FOR_OTHERS: 5,
    Reason.EVICTED_QUOTA: 6,
    Reason.EVICTED_RESIZE: 7,
    Reason.EXPIRED: 8,
    Reason.CLEARED: 9,
    Reason.CHECKSUM: 10,
    Reason.UNFINISHED: 11,
    Reason.REFUSED_NO_SPACE: 12,
    Reason.REFUSED_NOT_TOUCHED: 13,
    Reason.REFUSED_DRAINING: 14,
    Reason.OTHER_LAYOUT: 15,
    Reason.OTHER_TENANT: 16,
    Reason.TIER_OFFLINE: 17,
    Reason.GAP: 18,
    Reason.LOWER_TIER: 19,
    Reason.DEAR: 20,
    Reason.REFUSED_SHARE: 21,
}
_REASONS = {code: reason for reason, code in _CODES.items()}
CODES = max(_REASONS) + 1
"""All numbers that travel are below."""
