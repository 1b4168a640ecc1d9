"""Which hits are left alone."""

from __future__ import annotations

import pytest

from ems.pool.movement.speed import SAMPLES
from ems.pool.reasons.words import Reason
from ems.vllm.gate.cost import CostModel, Offer, why_not

SLOW_LOADS = CostModel()
for _ in range(SAMPLES):
    SLOW_LOADS.computed(1000, 0.1, 0.0)
    SLOW_LOADS.loaded(1000, 1.0, 0.0)


@pytest.mark.parametrize(
    ("offer", "reuse", "blocks", "reason"),
    [
        (Offer(0, 2048), 2048, 0, None),
        (Offer(0, 2047), 2048, 0, Reason.BELOW_MINIMUM),
        (Offer(2000, 48), 2048, 0, None),  # the whole prefix counts, whoever has it
        (Offer(0, 32), 0, 1, None),  # two blocks
        (Offer(0, 16), 0, 1, Reason.BELOW_MINIMUM),
        (Offer(0, 17), 0, 1, None),  # a part of a block is loaded as a block
        (Offer(8, 8), 0, 1, Reason.BELOW_MINIMUM),
        (Offer(8, 9), 0, 1, None),
        (Offer(0, 1), 0, 0, None),
        (Offer(0, 16, handoff=True), 2048, 9, None),
        (Offer(64, 0), 2048, 9, None),  # nothing to decide
    ],
)
def test_thresholds(offer: Offer, reuse: int, blocks: int, reason: Reason | None) -> None:
    assert why_not(offer, 16, CostModel(), 0.0, min_reuse_tokens=reuse, min_load_blocks=blocks) is reason


def test_what_is_dear_is_computed_unless_a_prefill_was_run_for_it() -> None:
    assert why_not(Offer(0, 1000), 16, SLOW_LOADS, 0.0) is Reason.DEAR
    assert why_not(Offer(0, 1000, handoff=True), 16, SLOW_LOADS, 0.0) is None


def test_what_is_below_a_threshold_does_not_count_as_refused_for_its_cost() -> None:
    cost = CostModel()
    why_not(Offer(0, 10), 16, cost, 0.0, min_reuse_tokens=20)

    assert cost.refused == 0
