"""Why a request did not get more from the pool: one word each, for metrics and logs, and one sentence."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """The first thing that kept the rest of a prompt from being loaded."""

    NOTHING_MISSED = "nothing_missed"
    ABSENT = "absent"
    GAP = "gap"
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
        """The reason in words."""
        return _SENTENCES[self]


_SENTENCES = {
    Reason.NOTHING_MISSED: "all that could be loaded was loaded",
    Reason.ABSENT: "the next block is not in the pool: it was never stored, is still being written, or was evicted",
    Reason.GAP: "the next block is not in the pool, though later ones are: only a prefix without gaps can be used",
    Reason.IN_ENGINE: "the engine's own cache had at least as much as the pool",
    Reason.TOO_SHORT: "the prompt is too short to be looked up",
    Reason.LOOKUP_TIMEOUT: "the pool was not done looking before lookup_timeout_ms were over",
    Reason.LOOKUP_FAILED: "the lookup failed, the log says why",
    Reason.POOL_DOWN: "the pool is not well and is not asked until it has recovered",
    Reason.BELOW_MINIMUM: "less was found than num_min_reuse_tokens and num_min_load_blocks ask for",
    Reason.DEAR: "computing is quicker than loading here (cost_model)",
    Reason.LOAD_FAILED: "blocks that were promised could not be loaded and were computed",
    Reason.ADAPTER: "requests with a LoRA adapter stay out of the pool",
    Reason.DOES_NOT_LOAD: "this engine only stores and loads nothing",
    Reason.NOT_LOADED: "the engine did not ask for the load before the request ended",
}
