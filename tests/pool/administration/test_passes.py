"""Work in steps: what one act does is its own, whatever else is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from ems.errors import PoolRefused
from ems.pool.administration.service import MAX_RUNNING, AdminService
from ems.pool.protocol.acts import Clear, Resize
from ems.pool.tiers.manager import TierManager
from tests.pool.brain import PAGE, chain, core_of, save, segment_for
from tests.pool.wrong_core import wrong_core


@pytest.mark.parametrize("dry_run", [True, False])
def test_an_act_does_not_do_a_step_of_what_is_under_way(dry_run: bool) -> None:
    """It would count what left meanwhile, and an act that only says what it would do would change something."""
    core = core_of(2, 2, 2)
    service, ns = AdminService(core), core.open_namespace("a", PAGE)
    other = core.open_namespace("b", PAGE)
    save(core, ns, chain("x", 3))
    save(core, other, chain("y", 2))
    assert not service.do(Resize(segment_for(2)), 0.0)["done"]
    before = core.pages()
    report = service.do(Clear(everything=True), 0.0, dry_run=dry_run)
    assert (report["matched"], report["removed"]) == (before, 0 if dry_run else before)
    assert core.pages() == (before if dry_run else 0)
    assert wrong_core(core) == []


class Doors:
    """Tiers that hold nothing, and what is held back from them."""

    def __init__(self) -> None:
        self.shut = 0

    def holdings(self) -> list[Any]:
        return []

    def take_back(self, *_: object) -> list[bytes]:
        return []

    def hold_back(self, _: object) -> Callable[[], None]:
        self.shut += 1
        return self._open

    def _open(self) -> None:
        self.shut -= 1


def test_what_is_refused_for_want_of_passes_has_begun_nothing() -> None:
    core, doors = core_of(2, 2), Doors()
    service = AdminService(core, tiers=cast("TierManager", doors))
    ns = core.open_namespace("a", PAGE)
    save(core, ns, chain("x", 1))
    core.reading.lookup(1, ns, chain("x", 1), lease=True)
    for _ in range(MAX_RUNNING):
        assert not service.do(Clear(everything=True, memory_only=True), 0.0)["done"]
    for act in (Clear(everything=True), Resize(segment_for(2))):
        with pytest.raises(PoolRefused, match="passes are running"):
            service.do(act, 0.0)
    assert doors.shut == 0, "nothing would move between memory and tiers any more"
    assert not any(segment.closing for segment in core.slots.segments)
