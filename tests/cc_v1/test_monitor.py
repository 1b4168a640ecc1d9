"""The watch beside the engine: what it tells whom, and that nothing ends it but its close."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import pytest

from ems.cc_v1.errors import EmsErrorCode, EmsException
from ems.cc_v1.monitor import GateClosed, Monitor
from ems.errors import EmsError, PoolTimeout, PoolUnavailable
from ems.pool.client.health import HealthRules
from ems.transfers.summary import Kind, Sample
from tests.cc_v1.conftest import NEVER, QUICK
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def make() -> Iterator[Callable[..., Monitor]]:
    made: list[Monitor] = []

    def monitor(
        rules: HealthRules = NEVER,
        check: Callable[[], None] = lambda: None,
        revive: Callable[[], None] = lambda: None,
        summary_seconds: float = 1000.0,
        logger: str = "ems.cc_v1",
    ) -> Monitor:
        made.append(Monitor(rules, summary_seconds, check, revive, logging.getLogger(logger)))
        made[-1].start()
        return made[-1]

    yield monitor
    for each in made:
        each.close()


def test_a_failed_check_degrades_before_anything_is_revived(make: Callable[..., Monitor]) -> None:
    seen: list[bool] = []

    def check() -> None:
        raise PoolUnavailable("gone")

    monitor: Monitor = make(QUICK, check, lambda: seen.append(monitor.healthy))
    until(lambda: len(seen) >= 2)
    assert set(seen) == {False}


def test_a_revival_that_breaks_does_not_end_the_watch(make: Callable[..., Monitor]) -> None:
    tried: list[bool] = []

    def check() -> None:
        raise PoolUnavailable("gone")

    def revive() -> None:
        tried.append(True)
        raise RuntimeError("broken")

    make(QUICK, check, revive)
    until(lambda: len(tried) >= 2)


def test_it_recovers_by_itself(make: Callable[..., Monitor], caplog: pytest.LogCaptureFixture) -> None:
    # A logger of its own: a check of an earlier test may end, and say so, only now.
    caplog.set_level(logging.INFO, "recovery")
    monitor = make(QUICK, logger="recovery")
    monitor.failed(PoolTimeout("too late"))
    assert not monitor.healthy
    until(lambda: monitor.healthy)

    def said() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name == "recovery"]

    until(lambda: len(said()) >= 2)
    assert said() == ["EMS pool is not used for now: too late", "EMS pool is used again"]


def test_a_check_that_breaks_is_one_that_fails(make: Callable[..., Monitor]) -> None:
    rounds: list[int] = []

    def check() -> None:
        rounds.append(1)
        raise ZeroDivisionError

    monitor = make(QUICK, check)
    until(lambda: len(rounds) >= 3)
    assert not monitor.healthy


@pytest.mark.parametrize(
    "error",
    [
        GateClosed("gone"),
        EmsException("wrong", EmsErrorCode.EMS_INVALID_ARGUMENT),
        EmsException("too early", EmsErrorCode.EMS_NOT_REGISTERED),
        EmsException("too late", EmsErrorCode.EMS_NOT_INITIALISED),
    ],
    ids=["not tried", "argument", "not registered", "not initialised"],
)
def test_what_is_not_the_nodes_fault_does_not_degrade(make: Callable[..., Monitor], error: EmsError) -> None:
    monitor = make()
    monitor.failed(error)
    assert monitor.healthy


@pytest.mark.parametrize("code", [code for code in EmsErrorCode if code.value in (2, 3, 6, 7, 8, 9, 10)])
def test_everything_else_does(make: Callable[..., Monitor], code: EmsErrorCode) -> None:
    monitor = make()
    monitor.failed(EmsException("it broke", code))
    assert not monitor.healthy


def test_the_summary_is_logged(make: Callable[..., Monitor], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ems.cc_v1")
    monitor = make(summary_seconds=0.05)
    monitor.add(Sample(Kind.LOOKUP, 1, 2, 0.001))
    until(lambda: "EMS: loads 0, saves 0, lookups 1, hit rate 50.0% (1 of 2 blocks)" in caplog.messages)
    assert len(caplog.messages) == 1


def test_after_its_close_it_says_nothing(make: Callable[..., Monitor], caplog: pytest.LogCaptureFixture) -> None:
    monitor = make()
    monitor.close()
    monitor.failed(PoolUnavailable("gone"))
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "ems-monitor"])
    assert caplog.messages == []


def test_after_its_close_nothing_is_revived(make: Callable[..., Monitor]) -> None:
    monitors: list[Monitor] = []
    revived: list[bool] = []

    def check() -> None:
        until(lambda: monitors)
        monitors[0].close()
        raise PoolUnavailable("the connection is closed")

    monitors.append(make(QUICK, check, lambda: revived.append(True)))
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "ems-monitor"])
    assert not revived
