"""What the node tells of its changes: all of them, once and in order, or that some were lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.core import changes
from ems.pool.core.changes import ASKED_SECONDS, TOLD_AT_ONCE, ChangeLog
from ems.pool.keys import NO_PARENT
from ems.pool.protocol.messages import FROM_NOW, ChangeRun
from tests.e2e.engines import running_node, wait_for
from tests.pool.brain import PAGE, chain, core_of, key, save

ONE, TWO = key("1"), key("2")


def test_nothing_is_recorded_before_somebody_asks() -> None:
    log = ChangeLog()
    assert not log.recording()
    log.stored("a", [ONE])
    place, lost, runs = log.since(FROM_NOW, ["a"], 0.0)

    assert (lost, runs) == (False, [])
    assert log.recording()
    log.stored("a", [TWO])
    assert log.since(place, ["a"], 0.0)[1:] == (False, [ChangeRun(0, True, TWO)])


def test_changes_of_one_kind_travel_together_and_only_those_asked_for() -> None:
    log = ChangeLog()
    place, _, _ = log.since(FROM_NOW, [], 0.0)
    log.stored("a", [ONE, TWO])
    log.stored("other", [ONE])
    log.removed("a", TWO)
    log.stored("b", [ONE])
    _, lost, runs = log.since(place, ["b", "a"], 0.0)

    assert not lost
    assert runs == [ChangeRun(1, True, ONE + TWO), ChangeRun(1, False, TWO), ChangeRun(0, True, ONE)]


def test_when_nobody_asks_any_more_recording_ends_and_who_comes_back_is_told_so() -> None:
    log = ChangeLog()
    place, _, _ = log.since(FROM_NOW, ["a"], 0.0)
    log.tick(ASKED_SECONDS - 0.1)
    assert log.recording()
    log.tick(ASKED_SECONDS)
    assert not log.recording()
    log.stored("a", [ONE])

    assert log.since(place, ["a"], 100.0)[1:] == (True, [])


def test_one_answer_tells_of_so_many_changes_and_the_next_goes_on() -> None:
    log = ChangeLog()
    place, _, _ = log.since(FROM_NOW, ["a"], 0.0)
    keys = [key(number) for number in range(2 * TOLD_AT_ONCE + 5)]
    log.stored("a", keys)
    told = []
    for _ in range(4):
        place, lost, runs = log.since(place, ["a"], 0.0)
        assert not lost
        told.append([run.keys[at : at + 16] for run in runs for at in range(0, len(run.keys), 16)])

    assert [len(some) for some in told] == [TOLD_AT_ONCE, TOLD_AT_ONCE, 5, 0]
    assert [one for some in told for one in some] == keys


@pytest.mark.parametrize("place", [7, -2, 2**62])
def test_a_place_that_was_never_told_is_lost(place: int) -> None:
    log = ChangeLog()
    log.since(FROM_NOW, [], 0.0)

    assert log.since(place, ["a"], 0.0)[1:] == (True, [])


@given(st.lists(st.lists(st.booleans(), max_size=30), max_size=10), st.integers(1, 40))
def test_readers_learn_everything_once_and_in_order_or_that_they_lost_some(
    rounds: list[list[bool]], capacity: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "CAPACITY", capacity)
        log = ChangeLog()
    place, _, _ = log.since(FROM_NOW, ["a"], 0.0)
    number = 0
    for happened in rounds:
        expected: list[tuple[bool, bytes]] = []
        for stored in happened:
            number += 1
            expected.append((stored, key(number)))
            log.stored("a", [key(number)]) if stored else log.removed("a", key(number))
        place, lost, runs = log.since(place, ["a"], 0.0)
        told = [(run.stored, run.keys[at : at + 16]) for run in runs for at in range(0, len(run.keys), 16)]

        assert lost is (len(happened) > capacity)
        assert told == ([] if lost else expected)


def test_the_core_tells_what_was_committed_and_evicted() -> None:
    core = core_of(3)
    namespace = core.open_namespace("a", PAGE)
    place, _, _ = core.changes.since(FROM_NOW, ["a"], 0.0)
    first, second = chain("x", 2), chain("y", 2)
    save(core, namespace, first)
    held = core.writing.reserve(1, namespace, bytes(16), second)
    _, _, runs = core.changes.since(place, ["a"], 0.0)

    # What is promised to a writer is not there yet; what had to leave for it is gone.
    assert runs == [ChangeRun(0, True, b"".join(first)), ChangeRun(0, False, first[1])]
    core.writing.abort(1, held.reservation)
    assert core.changes.since(place, ["a"], 0.0)[2] == runs


def test_a_segment_that_is_taken_away_tells_of_every_page() -> None:
    core = core_of(2, 2)
    rich, poor = core.open_namespace("rich", PAGE), core.open_namespace("poor", PAGE)
    keys = chain("x", 4)
    save(core, rich, keys)
    place, _, _ = core.changes.since(FROM_NOW, [], 0.0)
    save(core, poor, [ONE])
    _, _, runs = core.changes.since(place, ["rich", "poor"], 0.0)

    assert runs == [ChangeRun(0, False, keys[3] + keys[2]), ChangeRun(1, True, ONE)]


@pytest.mark.process
def test_a_client_reads_on_where_it_was_and_learns_of_a_restart() -> None:
    with running_node("--size", "8MB") as node:
        wait_for(lambda: node.stats()["bytes_touched"] == 8 << 20, "the memory is touched")
        namespace, client = Namespace("a", 256), PoolClient(node.socket, "reader")
        told = client.changes(None, ["a"])
        assert (told.lost, told.runs) == (False, ())
        client.commit(client.reserve(namespace, NO_PARENT, [ONE, TWO]))
        told = client.changes(told.place, ["a"])
        assert (told.lost, told.runs) == (False, (ChangeRun(0, True, ONE + TWO),))

        node.kill()
        node.start()
        wait_for(lambda: _answers(client), "the client is connected again")
        assert client.changes(told.place, ["a"]).lost
        client.close()


def _answers(client: PoolClient) -> bool:
    try:
        client.stats()
    except ConnectionError:
        return False
    return True
