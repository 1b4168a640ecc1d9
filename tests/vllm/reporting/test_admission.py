"""Which hits are left alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ems.pool.movement.speed import SAMPLES
from ems.pool.reasons.words import Reason
from ems.vllm.configuration.settings import read_settings
from ems.vllm.reporting.observer import Observer

Make = Callable[..., Observer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Observer] = []

    def observer(**settings: int) -> Observer:
        read, _ = read_settings("kv_both", {"directory": str(tmp_path), **settings}, {})
        made.append(Observer(read, 16, logging.getLogger("test")))
        return made[-1]

    yield observer
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("local", "external", "reuse", "blocks", "reason"),
    [
        (0, 2048, 2048, 0, None),
        (0, 2047, 2048, 0, Reason.BELOW_MINIMUM),
        (2000, 48, 2048, 0, None),  # the whole prefix counts, whoever has it
        (0, 32, 0, 1, None),  # two blocks
        (0, 16, 0, 1, Reason.BELOW_MINIMUM),
        (0, 17, 0, 1, None),  # a part of a block is loaded as a block
        (8, 8, 0, 1, Reason.BELOW_MINIMUM),
        (8, 9, 0, 1, None),
        (0, 1, 0, 0, None),
    ],
)
def test_thresholds(make: Make, local: int, external: int, reuse: int, blocks: int, reason: Reason | None) -> None:
    observer = make(num_min_reuse_tokens=reuse, num_min_load_blocks=blocks)
    assert observer.why_not("r", local, external, 0.0) is reason
    assert observer.why_not("r", local, external, 0.0, handoff=True) is None
    # What is below a threshold does not count as refused for its cost.
    assert observer.cost.reluctance.refused == 0


def test_what_is_dear_is_computed_unless_a_prefill_was_run_for_it(make: Make) -> None:
    observer = make()
    for _ in range(SAMPLES):
        observer.cost.computed.add(1000, 0.1, 0.0)
        observer.cost.loaded.add(1000, 1.0, 0.0)
    assert observer.why_not("r", 0, 1000, 0.0) is Reason.DEAR
    assert observer.why_not("r", 0, 1000, 0.0, handoff=True) is None
