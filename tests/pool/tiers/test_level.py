"""A tier whose threads hang is not tried out before they are back, and what nobody begins counts as hung."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ems.pool.tiers.crew import Job
from ems.pool.tiers.directory import FolderBlobs
from ems.pool.tiers.level import Level
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.settings import TierConfig

LONG = 1e6


@pytest.fixture
def level(tmp_path: Path) -> Iterator[Level]:
    place = str(tmp_path / "tier")
    one = Level(
        0, TierConfig(kind="dir", place=place, timeout=10.0), PackTier("dir", FolderBlobs(Path(place))), lambda _: None
    )
    yield one
    for crew in (one.readers, one.writers, one._keeper):
        crew.dismiss()


def job(*, started: float | None = None, given: float | None = None) -> Job:
    one = Job(lambda: None, lambda _: None)
    one.given_at, one.started_at = given, started
    return one


def hangs(level: Level, *, reading: bool) -> Job:
    """A job of ``level`` that was begun at 0 and is given up at 11."""
    late = job(given=0.0, started=0.0)
    if reading:
        level.fetches[late] = None
    else:
        level.writes[late] = []
    assert level.hung(11.0) == [late]
    late.abandoned = True
    level.cut(level.reading if reading else level.writing, "it hangs", 11.0)
    return late


@pytest.mark.parametrize("reading", [True, False])
def test_no_probe_while_a_thread_hangs(level: Level, reading: bool) -> None:
    late = hangs(level, reading=reading)
    level.keep(LONG)
    assert level._keeping is None, "good probes would open a gate whose threads still hang"
    (level.fetches if reading else level.writes).pop(late)
    level.keep(LONG)
    assert level._keeping is not None


def test_good_probes_open_only_the_direction_whose_threads_are_back(level: Level) -> None:
    hangs(level, reading=True)
    level.cut(level.writing, "it fails", 11.0)
    level._clock = lambda: LONG
    for turn in range(3):
        level.keep(LONG + turn * 1e3)
        probe = level._keeping
        assert probe is not None
        assert probe.done.wait(10)
        level._kept(probe)
    assert (level.reading.open, level.writing.open) == (False, True)


def test_a_job_that_no_thread_begins_hangs_from_when_it_was_given(level: Level) -> None:
    waits = job(given=100.0)
    level.fetches[waits] = None
    assert level.hung(109.0) == []
    assert level.hung(111.0) == [waits]


def test_jobs_that_wait_behind_others_that_end_do_not_hang(level: Level) -> None:
    waits = job(given=100.0)
    level.fetches[waits] = None
    level.moved(108.0)
    assert level.hung(111.0) == []
    assert level.hung(119.0) == [waits]
