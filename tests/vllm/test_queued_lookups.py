"""Lookups of requests that stand in the engine's queue, in virtual time above a tier that is slow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ems.errors import EmsError
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.pool.reasons.words import Reason
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.lookups import PARTS, LookupAnswer, LookupJob, Lookups
from ems.vllm.planes import Plane
from ems.vllm.reporting.observer import Observer
from ems.vllm.requests import NOTHING, Found
from ems.vllm.waiting import Waiting
from tests.vllm.stepped_node import ENGINE, SteppedNode

BLOCK = 4
LONG = 40
"""Blocks of the prompt that most tests ask for; coming up takes four seconds."""


def tokens_of(name: int, blocks: int = LONG) -> list[int]:
    return [name * 100_000 + at for at in range(blocks * BLOCK + 1)]


def keys_of(name: int, blocks: int = LONG) -> list[bytes]:
    chain = KeyChain("n", BLOCK)
    chain.extend(tokens_of(name, blocks))
    return list(chain)


class Engine(Lookups):
    """The side of an engine that looks, without its thread, and a clock."""

    def __init__(self, node: SteppedNode, token_seconds: float = 0.0) -> None:
        client = cast("PoolClient", cast("Any", node))
        said = ConnectorSettings(saves=True, socket=Path("socket"), directory=Path("pool"))
        self.watch = SimpleNamespace(usable=True, seconds_a_token=token_seconds)
        super().__init__(said, client, [Plane("n")], BLOCK, "n", cast("Observer", self.watch))
        self.node = node
        self.now = 0.0
        self.given: list[LookupAnswer] = []
        self.errors: list[EmsError] = []

    def _missed(self, error: EmsError) -> None:
        self.errors.append(error)

    def _answer(self, job: LookupJob, answer: LookupAnswer) -> None:
        """The scheduler gives back what it had before."""
        if job.over:
            super()._answer(job, answer)
            return
        for before in [one for one in self.given if one.request_id == answer.request_id][-1:]:
            self.give_back(before.found)
        self.given.append(answer)

    def look_up(self, name: int, blocks: int = LONG, expected: int = 0) -> LookupJob:
        job = LookupJob(str(name), tokens_of(name, blocks), lambda _size: (), Waiting(self.now, expected))
        self.handle(job, self.now)
        return job

    def due(self, job: LookupJob) -> None:
        job.due = True
        self.handle(job, self.now)

    def over(self, job: LookupJob) -> None:
        job.over = True
        self.handle(job, self.now)

    def until(self, now: float) -> None:
        """Let time go by."""
        while self.next_at is not None and self.next_at <= now:
            self.now = max(self.next_at, self.now)
            self.node.advance(self.now)
            job = self.next_job(self.now)
            if job is not None:
                self.handle(job, self.now)
        self.now = now
        self.node.advance(now)

    def found(self) -> list[int]:
        return [answer.found.chunks for answer in self.given]

    def give_back(self, found: Found) -> None:
        for lease in found.leases:
            self.handle(lease, self.now)

    def keeps(self) -> tuple[int, int]:
        """Leases and announcements that the node knows of."""
        return len(self.node.core.leases), len(self.node.core.announcements)


@pytest.fixture
def node() -> SteppedNode:
    made = SteppedNode(100)
    made.below.update(keys_of(1))
    return made


def test_in_the_queue_a_lookup_goes_on_until_all_has_come_up(node: SteppedNode) -> None:
    """Four seconds, far beyond the time-out of a tier; the answer is there when the scheduler asks."""
    engine = Engine(node)
    job = engine.look_up(1)
    engine.until(3.0)
    assert engine.found() == []
    engine.until(6.0)
    assert engine.found() == [LONG]
    assert engine.keeps() == (1, 0)
    engine.due(job)
    engine.until(20.0)
    assert engine.found() == [LONG]
    assert engine.next_at is None


def test_who_is_due_waits_the_time_of_a_tier_from_then_on(node: SteppedNode) -> None:
    engine = Engine(node)
    job = engine.look_up(1)
    engine.until(2.0)
    engine.due(job)
    engine.until(2.7)
    assert engine.found() == []
    engine.until(2.9)
    assert 27 <= engine.found()[0] <= 29
    assert engine.keeps() == (1, 0)


@pytest.mark.parametrize(("token_seconds", "waits"), [(0.05, True), (0.01, False)])
def test_once_the_scheduler_asks_a_tier_is_waited_for_that_is_faster_than_computing(
    node: SteppedNode, token_seconds: float, waits: bool
) -> None:
    """A block takes 0.1 s to come up, which the node does not know yet, and 0.2 s or 0.04 s to be computed."""
    node.knows_its_speed = False
    engine = Engine(node, token_seconds)
    job = engine.look_up(1)
    engine.until(3.55)
    assert engine.found() == []
    engine.due(job)
    assert engine.found() == ([] if waits else [35])
    engine.until(4.2)
    assert engine.found() == ([LONG] if waits else [35])
    engine.over(job)
    engine.give_back(engine.given[-1].found)
    assert engine.keeps() == (0, 0)


def test_in_the_queue_a_tier_is_used_that_is_slower_than_computing(node: SteppedNode) -> None:
    """It is not asked for a request that comes to an idle engine; when the request has to wait it is."""
    engine = Engine(node, 0.001)
    engine.look_up(1)
    assert engine.found() == [0]
    engine.until(0.2)
    assert node.coming == []
    engine.until(7.0)
    assert engine.found()[-1] == LONG
    assert len(engine.found()) <= PARTS + 2
    assert engine.keeps() == (1, 0)


def test_what_came_up_early_stays_while_the_rest_comes_up(node: SteppedNode) -> None:
    """Others fill the pool three times meanwhile."""
    engine = Engine(node)
    engine.look_up(1)
    for number in range(30):
        engine.until(0.1 * number)
        node.store(keys_of(10 + number, 10))
    engine.until(5.0)
    assert engine.found() == [LONG]
    assert node.core.reclaimer.evicted > 200
    assert node.brought == LONG


def test_more_that_came_while_a_request_waited_is_answered_again(node: SteppedNode) -> None:
    engine = Engine(node)
    job = engine.look_up(5)
    assert engine.found() == [0]
    node.store(keys_of(5, 10))
    engine.until(1.0)
    assert engine.found() == [0, 10]
    node.store(keys_of(5))
    engine.until(3.0)
    assert engine.found() == [0, 10, LONG]
    engine.over(job)
    engine.give_back(engine.given[2].found)
    assert engine.keeps() == (0, 0)
    assert engine.next_at is None or engine.next_job(100.0) is None


def test_looking_again_costs_little(node: SteppedNode) -> None:
    engine = Engine(node)
    engine.look_up(5)
    node.calls = 0
    engine.until(60.0)
    assert node.calls < 70
    assert node.core.counters.lookups == 1


@pytest.mark.parametrize("when", [0.0, 1.0, 6.0])
def test_a_request_that_ends_in_the_queue_keeps_nothing(node: SteppedNode, when: float) -> None:
    node.store(keys_of(1, 5))
    engine = Engine(node)
    job = engine.look_up(1)
    engine.until(when)
    assert engine.keeps() != (0, 0)
    engine.over(job)
    for answer in engine.given[-1:]:
        engine.give_back(answer.found)
    assert engine.keeps() == (0, 0)
    calls = node.calls
    engine.until(100.0)
    assert node.calls == calls


def test_a_node_that_ends_while_more_comes_up_is_a_miss_until_it_is_back(node: SteppedNode) -> None:
    engine = Engine(node)
    engine.look_up(1)
    engine.until(1.0)
    node.end()
    engine.until(2.0)
    assert [(answer.found, answer.reason) for answer in engine.given] == [(NOTHING, Reason.LOOKUP_FAILED)]
    assert engine.errors
    node.begin()
    engine.until(10.0)
    assert engine.found()[-1] == LONG
    assert engine.keeps() == (1, 0)


def test_what_a_node_promised_that_is_gone_is_promised_anew(node: SteppedNode) -> None:
    """Without that, the load of a request that waited long would fail."""
    node.store(keys_of(1, 30))
    engine = Engine(node)
    engine.look_up(1, 30)
    assert engine.found() == [30]
    node.end()
    node.begin()
    engine.until(3.0)
    assert engine.found() == [30, 30]
    assert [lease.node for lease in engine.given[-1].found.leases] == ["b"]
    assert engine.keeps() == (1, 0)


def test_an_ill_pool_is_not_asked_for_more(node: SteppedNode) -> None:
    engine = Engine(node)
    engine.look_up(5)
    engine.watch.usable = False
    calls = node.calls
    engine.until(30.0)
    assert node.calls == calls
    engine.watch.usable = True
    node.store(keys_of(5))
    engine.until(33.0)
    assert engine.found() == [0, LONG]


def test_announcements_last_as_long_as_the_queue() -> None:
    """A tier that takes longer than an announcement lasts."""
    node = SteppedNode(100, rate=0.2)
    node.below.update(keys_of(1))
    engine = Engine(node)
    engine.look_up(1)
    for number in range(40):
        engine.until(5.0 * number)
        assert engine.keeps()[1] == 1
        node.store(keys_of(10 + number, 20))
    engine.until(205.0)
    assert engine.found() == [LONG]
    assert engine.keeps() == (1, 0)


def test_a_decode_in_the_queue_waits_for_its_prefill(node: SteppedNode) -> None:
    engine = Engine(node)
    keys = keys_of(7)
    reserved = node.core.writing.reserve(ENGINE + 10, node.namespace, bytes(16), keys)
    job = engine.look_up(7, expected=LONG * BLOCK)
    engine.until(5.0)
    assert engine.found() == []
    engine.due(job)
    engine.until(6.0)
    assert engine.found() == []
    node.core.writing.commit(ENGINE + 10, reserved.reservation)
    engine.until(6.2)
    assert engine.found() == [LONG]
