"""Whether what a lookup found is worth loading: the thresholds of the settings, then the cost model.

A hand-off is always loaded: its prefill was run only so that this engine need not compute.
"""

from __future__ import annotations

import msgspec

from ems.pool.reasons.words import Reason
from ems.vllm.gate.cost import CostModel


class Offer(msgspec.Struct, frozen=True):
    """What could be loaded: ``external`` tokens of a prompt behind the ``local`` ones that the engine has."""

    local: int
    external: int
    handoff: bool = False

    def blocks(self, block_size: int) -> int:
        return -(-(self.local + self.external) // block_size) - self.local // block_size


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """Below which hits are left alone."""

    min_reuse_tokens: int = 0
    """Least tokens of a prefix that can be reused."""
    min_load_blocks: int = 0
    """A load is made only if it has more blocks than this."""


def why_not(offer: Offer, thresholds: Thresholds, block_size: int, cost: CostModel, now: float) -> Reason | None:
    """The reason not to load ``offer``; None if it should be loaded."""
    if offer.handoff or offer.external <= 0:
        return None
    if offer.local + offer.external < thresholds.min_reuse_tokens:
        return Reason.BELOW_MINIMUM
    if offer.blocks(block_size) <= thresholds.min_load_blocks:
        return Reason.BELOW_MINIMUM
    return None if cost.worth_loading(offer.external, now) else Reason.DEAR
