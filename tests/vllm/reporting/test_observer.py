"""The gate in front of the pool, with a real node: closed at once, open again after good checks, free when closed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from ems.errors import EmsError, NoSpace, PoolNotTried, PoolRefused, PoolTimeout, PoolUnavailable, StaleReference
from ems.pool.client.health import HealthRules
from ems.transfers.summary import Kind, Sample
from ems.vllm.configuration.settings import read_settings
from ems.vllm.reporting import observer
from ems.vllm.reporting.observer import Observer
from ems.vllm.reporting.stats import Transferred
from tests.e2e.engines import Node, running_node, wait_for

logger = logging.getLogger("test.health")
QUICK = HealthRules(check_seconds=0.02, flap_seconds=0.05)
NEVER = HealthRules(check_seconds=3600)

Make = Callable[..., Observer]


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "1MB") as running:
        yield running


@pytest.fixture
def make(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Observer] = []

    def watch(rules: HealthRules, start_node: Callable[[], None] = lambda: None) -> Observer:
        monkeypatch.setattr(observer, "HealthRules", lambda **_: rules)
        settings, _ = read_settings("kv_both", {"socket": str(node.socket), "call_timeout_ms": 1000}, {})
        monkeypatch.setattr(observer, "start_node", lambda *_given: start_node())
        made.append(Observer(settings, 16, logger))
        return made[-1]

    yield watch
    for each in made:
        each.close()


@pytest.mark.parametrize("error", [PoolTimeout("late"), PoolUnavailable("gone")], ids=repr)
def test_a_fault_of_the_pool_closes_the_gate_at_once(make: Make, error: EmsError) -> None:
    watched = make(NEVER)
    assert watched.usable
    watched.failed(error)

    assert not watched.usable


@pytest.mark.parametrize(
    "error", [NoSpace("full"), PoolRefused("no"), StaleReference("old"), PoolNotTried("a moment ago")], ids=repr
)
def test_a_pool_that_refuses_something_or_was_not_asked_is_well(make: Make, error: EmsError) -> None:
    watched = make(NEVER)
    watched.failed(error)
    watched.transferred([], {type(error).__name__: 1}, 0.0)

    assert watched.usable


@pytest.mark.parametrize(("kind", "usable"), [("PoolUnavailable", False), ("PoolTimeout", False), ("ValueError", True)])
def test_a_fault_that_a_worker_met_counts_by_its_name(make: Make, kind: str, usable: bool) -> None:
    watched = make(NEVER)
    watched.transferred([], {kind: 2}, 0.0)

    assert watched.usable is usable


def test_after_good_checks_the_pool_is_used_again(make: Make) -> None:
    watched = make(QUICK)
    watched.failed(PoolTimeout("late"))

    wait_for(lambda: watched.usable, "the gate opens")


def test_a_node_that_is_gone_closes_the_gate_and_is_started(make: Make, node: Node) -> None:
    started = threading.Event()

    def start() -> None:
        if not started.is_set():
            node.start()
            started.set()

    watched = make(QUICK, start)
    node.kill()
    assert started.wait(30)
    wait_for(lambda: watched.usable, "the gate opens")


def test_the_summary_line_is_in_the_connectors_log(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "SUMMARY_SECONDS", 0.05)
    caplog.set_level(logging.INFO, logger.name)
    watched = make(NEVER)
    watched.transferred([Transferred(load=True, leading=True, blocks=8, failed=0, bytes=1, seconds=0.002)], {}, 0.0)
    watched._monitor.add(Sample(Kind.LOOKUP, 8, 16, 0.0))

    line = "EMS: loads 1 (blocks 8.0/8/8, ms 2.0/2.0/2.0), saves 0, lookups 1, hit rate 50.0% (8 of 16 blocks)"
    wait_for(lambda: line in caplog.messages, "the line is written")
