"""A tier whose threads hang is not tried out before they are back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from structlog.testing import capture_logs

from ems.pool.movement.promotion import Portion
from ems.pool.pages import ClusterWrite, Page
from ems.pool.tiers.directory import FolderBlobs
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.settings import TierConfig
from ems.pool.tiers.threads import Job
from ems.pool.tiers.tier_state import TierState
from tests.kit.tiers import KEYS

LONG = 1e6


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., TierState]]:
    made: list[TierState] = []

    def make(**settings: Any) -> TierState:
        place = str(tmp_path / "tier")
        config = TierConfig(**{"kind": "dir", "place": place, "timeout": 10.0, **settings})
        made.append(TierState(0, config, PackTier("dir", FolderBlobs(Path(place)), KEYS), lambda _: None))
        return made[-1]

    yield make
    for one in made:
        for crew in (one.readers, one.writers, one._keeper):
            crew.dismiss()


@pytest.fixture
def state(make: Callable[..., TierState]) -> TierState:
    return make()


def hangs(state: TierState, *, reading: bool) -> Job:
    """A job of ``state`` that was begun at 0 and is given up at 11."""
    late = Job(lambda: None, lambda _: None)
    assert late.begin(0.0)
    if reading:
        state.fetches[late] = (-2, Portion(0, 0, bytes(16), (), 0))
    else:
        state.writes[late] = []
    assert state.hung(11.0) == [late]
    late.abandoned = True
    state.cut("it hangs", 11.0, state.reading if reading else state.writing)
    return late


def try_out(state: TierState) -> None:
    """Three good probes, or fewer where both directions are open by then."""
    state._clock = lambda: LONG
    for turn in range(3):
        state.keep(LONG + turn * 1e3)
        probe = state._keeping
        assert probe is not None
        probe.result(10)
        state._tried(probe)
        if state.reading.open and state.writing.open:
            return


def test_a_tier_that_fails_and_comes_back_is_told_of_once(state: TierState) -> None:
    """It fails in both directions where it is looked at; a newcomer took the second line for a second failure."""
    with capture_logs() as told:
        state.cut("it fails", 1.0, state.reading, state.writing)
        state.cut("it fails again", 2.0, state.writing)
        try_out(state)
    assert [(one["event"], one["direction"]) for one in told] == [
        ("a tier does not work and is left alone", "reading and writing"),
        ("a tier works again", "reading and writing"),
    ]


@pytest.mark.parametrize("reading", [True, False])
def test_no_probe_while_a_thread_hangs(state: TierState, reading: bool) -> None:
    late = hangs(state, reading=reading)
    state.keep(LONG)
    assert state._keeping is None, "good probes would open a gate whose threads still hang"
    (state.fetches if reading else state.writes).pop(late)
    state.keep(LONG)
    assert state._keeping is not None


def test_good_probes_open_only_the_direction_whose_threads_are_back(state: TierState) -> None:
    hangs(state, reading=True)
    state.cut("it fails", 11.0, state.writing)
    try_out(state)
    assert (state.reading.open, state.writing.open) == (False, True)


@pytest.mark.parametrize("kind", ["dir", "mooncake"])
@pytest.mark.parametrize("own", ["on_save", "on_second_use", "on_evict", "never"])
def test_a_cluster_gets_pages_when_their_writers_wish_and_other_tiers_when_they_are_set_to(
    make: Callable[..., TierState], kind: str, own: str
) -> None:
    state = make(kind=kind, write=own)
    wishes: tuple[ClusterWrite, ...] = get_args(ClusterWrite)
    pages = {wish: Page(str(number).encode(), b"") for number, wish in enumerate(wishes)}
    plain = [*pages.values()]
    for when in product(["on_save", "on_second_use", "on_evict"], repeat=2):
        assert list(state.due(plain, *when)) == (plain if own in when else []), "nobody wished anything"
    for wish, page in pages.items():
        state.wish([page], wish)
    for when in product(["on_save", "on_second_use", "on_evict"], repeat=2):
        meant = {wish: wish if wish and kind == "mooncake" else own for wish in wishes}
        due = [page for wish, page in pages.items() if own != "never" and meant[wish] in when]
        assert list(state.due([*pages.values()], *when)) == due
        assert state.writes_when(*when) or not due


def test_what_was_measured_before_a_tier_was_cut_out_is_forgotten(state: TierState) -> None:
    for size in range(1, 10):
        state.speed.fetched.add(size, size * 1.0, LONG)
    assert state.speed.expected(100, 0, 1, LONG) > 0
    state.cut("the link is slow, and then it is cut", 11.0, state.reading)
    try_out(state)
    assert state.reading.open
    assert state.speed.expected(100, 0, 1, LONG) == 0
