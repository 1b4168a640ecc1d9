"""Futures in virtual time: they end once, and nobody copies after their end."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

from ems.cc_v1.errors import EmsErrorCode, EmsException
from ems.cc_v1.future import LEAST_CALL_SECONDS, CcFuture, CcResult
from ems.errors import PoolUnavailable
from ems.transfers.summary import Kind
from tests.kit.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A future of ten blocks and one second, its clock, and what was reported of its end."""

    def __init__(self, total: int = 10, timeout: float = 1.0) -> None:
        self.clock = Clock()
        self.ended: list[CcFuture] = []
        self.future = CcFuture(Kind.LOAD, total, timeout, self.clock, self.ended.append)


def code_of(future: CcFuture) -> EmsErrorCode:
    with pytest.raises(EmsException) as caught:
        future.result()
    return caught.value.status_code()


def test_it_is_true_and_not_ready_at_first() -> None:
    future = Watched().future
    assert bool(future) is True
    assert not future.ready()


def test_what_was_done_is_the_result() -> None:
    watched = Watched()
    watched.future.advance(7)
    watched.future.finish()
    assert watched.future.ready()
    assert watched.future.result() == CcResult(7, 10)
    assert watched.ended == [watched.future]


def test_nothing_found_is_a_result_too() -> None:
    future = Watched().future
    future.finish()
    assert future.result() == CcResult(0, 10)


def test_a_failure_after_some_blocks_is_a_partial_success() -> None:
    future = Watched().future
    future.advance(3)
    future.finish(PoolUnavailable("gone"))
    assert future.result() == CcResult(3, 10)


def test_a_failure_before_the_first_is_raised_every_time() -> None:
    future = Watched().future
    cause = PoolUnavailable("gone")
    future.finish(cause)
    assert code_of(future) is EmsErrorCode.EMS_RECOVERD_ERROR
    with pytest.raises(EmsException, match="gone") as caught:
        future.result()
    assert caught.value.__cause__ is cause


def test_whoever_looks_after_the_deadline_ends_it() -> None:
    for look in (CcFuture.ready, CcFuture.result):
        watched = Watched()
        watched.clock.now += 1.0
        if look is CcFuture.ready:
            assert watched.future.ready()
        assert code_of(watched.future) is EmsErrorCode.EMS_TIMEOUT
        assert watched.ended == [watched.future]


def test_what_was_done_before_the_deadline_counts() -> None:
    watched = Watched()
    watched.future.advance(4)
    watched.clock.now += 1.0
    assert watched.future.ready()
    watched.future.advance(9)
    assert watched.future.result() == CcResult(4, 10)


def test_it_ends_once() -> None:
    watched = Watched()
    watched.clock.now += 1.0
    assert watched.future.ready()
    watched.future.finish(PoolUnavailable("gone"))
    watched.future.finish()
    assert code_of(watched.future) is EmsErrorCode.EMS_TIMEOUT
    assert len(watched.ended) == 1


def test_a_miss_that_is_only_known_after_the_deadline_is_a_time_out() -> None:
    watched = Watched()
    watched.clock.now += 1.5
    watched.future.finish()
    assert code_of(watched.future) is EmsErrorCode.EMS_TIMEOUT


def test_nobody_copies_after_the_end() -> None:
    watched = Watched()
    with watched.future.copying() as allowed:
        assert allowed
    watched.future.finish()
    with watched.future.copying() as allowed:
        assert not allowed


def test_nobody_begins_to_copy_after_the_deadline() -> None:
    watched = Watched()
    watched.clock.now += 1.0
    with watched.future.copying() as allowed:
        assert not allowed


def test_polling_does_not_wait_for_a_copy_and_the_end_does() -> None:
    watched = Watched()
    results = []
    with watched.future.copying():
        watched.clock.now += 1.0
        assert not watched.future.ready()
        waiter = threading.Thread(target=lambda: results.append(code_of(watched.future)))
        waiter.start()
        assert not watched.future.ready()
        assert results == []
    waiter.join(5.0)
    assert results == [EmsErrorCode.EMS_TIMEOUT]
    assert watched.future.ready()


def test_calls_to_the_pool_get_the_rest_of_the_time_but_never_too_little() -> None:
    watched = Watched()
    assert watched.future.remaining() == 1.0
    watched.clock.now += 0.5
    assert watched.future.remaining() == 0.5
    watched.clock.now += 5.0
    assert watched.future.remaining() == LEAST_CALL_SECONDS


def test_a_pause_ends_with_the_future() -> None:
    watched = Watched(timeout=60.0)
    pausing = threading.Thread(target=watched.future.pause, args=(60.0,))
    pausing.start()
    watched.future.finish()
    pausing.join(5.0)
    assert not pausing.is_alive()
    until(watched.future.ready)


def test_a_forked_child_does_not_wait_for_its_parents_work() -> None:
    future = Watched().future
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            fine = future.ready() and code_of(future) is EmsErrorCode.EMS_NOT_INITIALISED
            os._exit(0 if fine else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert not future.ready()
