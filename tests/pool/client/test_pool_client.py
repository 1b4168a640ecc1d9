"""The client's own promises: threads, interrupts, forks, and a node that answers nonsense."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ems.errors import (
    PoolNotTried,
    PoolRefused,
    PoolTimeout,
    PoolUnavailable,
    ProtocolError,
    StaleReference,
    Unauthorised,
)
from ems.pool.client import pool_client
from ems.pool.client.answers import NO_TAIL, LookupHints, Namespace, Reservation
from ems.pool.client.introduction import Introduction
from ems.pool.client.line import Line, Sent
from ems.pool.client.mapping import map_segments
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import Tail
from ems.pool.layout import REF_BYTES, PageRef
from ems.pool.protocol import coding, messages
from ems.pool.protocol.acts import Resize
from ems.pool.tenants.scram import Credentials
from tests.kit.waiting import until
from tests.pool.brain import chain
from tests.pool.client.scripted import WELCOME, node_that_says
from tests.pool.conftest import PAGE, MakeClient, MakeNode

KEYS = b"".join(chain("x", 3))

NONSENSE = {
    "garbage": struct.pack(">I", 3) + b"abc",
    "another message": coding.encode(messages.Done()),
    "a request": coding.encode(messages.Stats()),
    "too much": struct.pack(">I", coding.MAX_FRAME + 1),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
def test_a_node_that_answers_nonsense_is_left(tmp_path: Path, nonsense: bytes) -> None:
    with node_that_says(tmp_path / "s", WELCOME, nonsense):
        client = PoolClient(tmp_path / "s")
        with pytest.raises(ProtocolError):
            client.open(Namespace("a", PAGE))
        assert not client.epoch
    with node_that_says(tmp_path / "t", nonsense):
        client = PoolClient(tmp_path / "t")
        with pytest.raises(ProtocolError):
            client.connect()
        assert not client.epoch


@pytest.mark.parametrize(
    "granted",
    [
        messages.Granted(1, b"\0\0", bytes(2 * REF_BYTES)),
        messages.Granted(1, b"\0\0\0", bytes(2 * REF_BYTES)),
        messages.Granted(1, b"\3\3\3", bytes(REF_BYTES)),
    ],
    ids=["fewer outcomes", "fewer slots", "a slot too many"],
)
def test_a_reservation_that_does_not_add_up_is_refused(tmp_path: Path, granted: messages.Granted) -> None:
    answers = WELCOME, coding.encode(messages.Opened(0)), coding.encode(granted)
    with node_that_says(tmp_path / "s", *answers):
        client = PoolClient(tmp_path / "s")
        with pytest.raises(ProtocolError, match="does not match the request"):
            client.reserve(Namespace("a", PAGE), bytes(16), chain("x", 3))
        assert not client.epoch


def test_who_finds_many_others_before_the_door_waits(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other:
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        other.connect(str(tmp_path / "s"))
        introduction = Introduction(tmp_path / "s", "late", Credentials(), administers=False)
        with pytest.raises(PoolTimeout, match="did not greet in time"):
            introduction.reach(0.0, 0.0)


def test_a_node_that_hangs_up_is_unavailable(tmp_path: Path) -> None:
    with node_that_says(tmp_path / "s", WELCOME):
        client = PoolClient(tmp_path / "s")
        client.connect()
        with pytest.raises(PoolUnavailable, match="went away"):
            client.stats()
        assert client.epoch == 0


def test_a_refused_greeting_is_the_callers_error(tmp_path: Path) -> None:
    refused = coding.encode(messages.Refused("unauthorised", "who are you"))
    with node_that_says(tmp_path / "s", refused), pytest.raises(PoolRefused, match="who are you"):
        PoolClient(tmp_path / "s").connect()


def test_a_missing_node_is_asked_for_twice_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("ems.pool.client.line.time.monotonic", lambda: now)
    client, tried = PoolClient(tmp_path / "nobody"), []
    introduction = client._introduction
    reach: Callable[..., object] = introduction.reach

    def count(*arguments: object) -> object:
        tried.append(now - 1000.0)
        return reach(*arguments)

    monkeypatch.setattr(introduction, "reach", count)
    for tenth in range(400):
        now = 1000.0 + tenth / 10
        before = len(tried)
        with pytest.raises(PoolUnavailable) as raised:
            client.connect()
        assert isinstance(raised.value, PoolNotTried) == (len(tried) == before)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert len(gaps) > 60
    assert gaps == pytest.approx([0.5] * len(gaps), abs=0.11)


def test_an_interrupted_call_does_not_leave_its_answer_to_the_next(
    client: PoolClient, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.commit(client.reserve(namespace, bytes(16), chain("x", 3)))
    epoch = client.epoch

    receive = Line._receive

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(Line, "_receive", receive)
        raise KeyboardInterrupt

    monkeypatch.setattr(Line, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.lookup(namespace, KEYS[:16])
    assert client.lookup(namespace, KEYS).count == 3
    assert client.epoch != epoch


def test_answers_that_are_waited_for_later_are_told_apart(client: PoolClient, namespace: Namespace) -> None:
    one = client.begin_reserve(namespace, bytes(16), chain("x", 3))
    two = client.begin_reserve(namespace, bytes(16), chain("y", 2))
    assert client.lookup(namespace, KEYS).count == 0, "who asks meanwhile gets its own answer"
    second, first = client.end_reserve(two), client.end_reserve(one)
    assert (len(first.granted), len(second.granted)) == (3, 2)

    commits = [client.begin_commit(reserved) for reserved in (first, second)]
    client.notice()  # what can be read is an answer, and no end
    for segment in range(client.segment_count):
        client.segments(first.epoch).segment(segment)  # comes with a descriptor, behind these answers
    for commit in reversed(commits):
        client.end_commit(commit)
    assert client.lookup(namespace, KEYS).count == 3
    assert client.stats()["reservations"] == 0


def test_what_was_asked_for_ahead_is_given_back(client: PoolClient, namespace: Namespace) -> None:
    client.call_off(client.begin_reserve(namespace, bytes(16), chain("x", 3)))
    assert client.stats()["reservations"] == 0
    assert len(client.reserve(namespace, bytes(16), chain("x", 3)).granted) == 3


def test_a_refusal_is_told_to_whom_it_concerns(client: PoolClient, namespace: Namespace) -> None:
    reserved = client.reserve(namespace, bytes(16), chain("x", 3))
    client.commit(reserved)
    late = client.begin_commit(reserved)
    ahead = client.begin_reserve(namespace, bytes(16), chain("y", 2))
    assert len(client.end_reserve(ahead).granted) == 2
    with pytest.raises(StaleReference):
        client.end_commit(late)


def test_a_connection_that_ends_takes_with_it_what_was_not_answered(client: PoolClient, namespace: Namespace) -> None:
    reserved = client.reserve(namespace, bytes(16), chain("x", 3))
    commit = client.begin_commit(reserved)
    ahead = client.begin_reserve(namespace, bytes(16), chain("y", 2))
    unused = client.begin_reserve(namespace, bytes(16), chain("z", 2))
    client.drop()
    again = client.end_reserve(ahead)
    assert again.epoch > reserved.epoch
    assert len(again.granted) == 2
    with pytest.raises(PoolUnavailable):
        client.end_commit(commit)
    with pytest.raises(PoolUnavailable):
        client.call_off(unused)
    until(lambda: client.lookup(namespace, chain("z", 1)[0]).pending == 0, "the node noticed the end")
    client.tell_stopped()
    client.abort(again)
    until(lambda: client.stats()["reservations"] == 0, "nothing is left")


def test_a_node_that_does_not_answer_costs_what_was_sent(tmp_path: Path) -> None:
    opened = coding.encode(messages.Opened(0))
    with node_that_says(tmp_path / "socket", WELCOME, opened, b""):
        client = PoolClient(tmp_path / "socket")
        ahead = client.begin_reserve(Namespace("n", PAGE), bytes(16), chain("x", 1))
        assert isinstance(ahead.sent, Sent)
        with pytest.raises(PoolUnavailable):
            client.end_reserve(ahead, 0.2)
        assert ahead.sent.over
        client.close()


def test_a_node_that_says_more_than_it_was_asked_is_not_believed(tmp_path: Path) -> None:
    opened, more = coding.encode(messages.Opened(0)), coding.encode(messages.Done(7))
    with node_that_says(tmp_path / "socket", WELCOME, opened + more, more):
        client = PoolClient(tmp_path / "socket")
        client.open(Namespace("n", PAGE))
        with pytest.raises(ProtocolError, match="nobody asked"):
            client.prefetch(Namespace("n", PAGE), KEYS)
        client.close()


def test_a_tail_is_looked_up_behind_its_keys(client: PoolClient, namespace: Namespace) -> None:
    keys = chain("tail", 2)
    tail = Tail(keys[1], struct.pack("<3I", 5, 6, 7))
    client.commit(client.reserve(namespace, bytes(16), [*keys, tail.key], tails=[*[None] * len(keys), tail]))
    wanted = Tail(keys[1], struct.pack("<3I", 5, 6, 8))

    shared = client.lookup_tail(namespace, wanted, lease=True)

    assert (shared.tokens, shared.key) == (2, tail.key)
    assert shared.lease is not None
    client.release(shared.lease)
    none = client.lookup_tail(namespace, Tail(keys[0], wanted.tokens))
    assert (none.tokens, none.lease) == (0, None)
    assert client.stats()["leases"] == 0
    assert client.lookup_tail(Namespace("nobody/stored/here", 0), tail, lease=True) == NO_TAIL


def test_a_node_that_says_why_and_goes_is_quoted(tmp_path: Path) -> None:
    """What it said comes before the end of the connection."""
    refused = coding.encode(messages.Refused("unauthorised", "the key was revoked"))
    with node_that_says(tmp_path / "s", WELCOME, coding.encode(messages.Opened(0)), refused):
        client = PoolClient(tmp_path / "s")
        with pytest.raises(Unauthorised, match="the key was revoked"):
            client.lookup(Namespace("a", PAGE), KEYS, lease=True)
        assert not client.epoch


def test_a_node_that_goes_right_behind_an_answer_is_quoted_by_the_next_call(tmp_path: Path) -> None:
    opened, refused = coding.encode(messages.Opened(0)), coding.encode(messages.Refused("unauthorised", "it is over"))
    with node_that_says(tmp_path / "s", WELCOME, opened + refused):
        client = PoolClient(tmp_path / "s")
        client.open(Namespace("a", PAGE))
        with pytest.raises(Unauthorised, match="it is over"):
            client.lookup(Namespace("a", PAGE), KEYS)
        assert not client.epoch


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_node_hears_what_its_version_has_words_for(tmp_path: Path, version: int) -> None:
    welcome = coding.encode(messages.Welcome(version, "0" * 32, "1.0", autostarted=False, segments=1))
    none = coding.encode(messages.Hits(0, 0, 0, b""))
    answers = [welcome, coding.encode(messages.Opened(0)), none, none, coding.encode(messages.Done())]
    heard: list[bytes] = []
    with node_that_says(tmp_path / "s", *answers, heard=heard):
        client = PoolClient(tmp_path / "s", local_only=True, cluster_write="never")
        client.lookup(Namespace("a", PAGE), KEYS, hints=LookupHints(patience=0.5, directories=2 * bytes(16)))
        client.lookup_tail(Namespace("a", PAGE), Tail(bytes(16), bytes(4)), patience=2.0)
        client.commit(Reservation(client.epoch, 1, b"\0", PageRef(0, 0, 1).pack()), cluster_write="on_save")
        client.close()
    said = [coding.decode_request(one[4:]) for one in heard[2:]]
    assert [getattr(one, "local_only", None) for one in said] == [version > 1, version > 1, None]
    patience = [500_000, 1_000_000] if version > 2 else [0, 0]
    assert [one.patience for one in said if isinstance(one, messages.Lookup)] == patience, "a second at most"
    assert isinstance(said[2], messages.Commit)
    assert said[2].cluster_write == ("on_save" if version > 1 else "")


def test_many_threads_share_a_client(client: PoolClient, namespace: Namespace) -> None:
    def work(number: int) -> int:
        keys = chain(f"thread {number}", 1)
        reserved = client.reserve(namespace, bytes(16), keys)
        page = client.segments(reserved.epoch).page(reserved.granted[0], PAGE)
        page[:] = bytes([number]) * PAGE
        client.commit(reserved)
        hits = client.lookup(namespace, keys[0], lease=True)
        assert hits.lease is not None
        segments = client.segments(hits.lease.epoch)
        (ref,) = hits.lease.refs
        assert client.reader(namespace, hits.lease.epoch).look(ref.pack(), keys[0]).present == 1
        found = set(segments.page(ref, PAGE))
        client.release(hits.lease)
        return found.pop() if len(found) == 1 else -1

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(12))) == list(range(12))


def test_a_segment_is_mapped_once_however_many_ask(
    client: PoolClient, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = client.reserve(namespace, bytes(16), chain("x", 1)).granted[0].segment
    segments, attach = client.segments(client.epoch), client.attach
    attached: list[int] = []

    def count(number: int, epoch: int) -> memoryview:
        attached.append(number)
        return attach(number, epoch)

    monkeypatch.setattr(client, "attach", count)
    with ThreadPoolExecutor(8) as pool:
        maps = list(pool.map(lambda _: segments.segment(asked), range(32)))
    assert attached == [asked]
    assert all(mapped is maps[0] for mapped in maps)


def test_a_segment_that_does_not_exist_is_an_error_of_the_protocol(client: PoolClient) -> None:
    client.connect()
    with pytest.raises(ProtocolError, match="does not exist"):
        client.segments(client.epoch).segment(10_000)


def test_nothing_of_an_old_connection_is_used_on_a_new_one(client: PoolClient, namespace: Namespace) -> None:
    half = client.reserve(namespace, bytes(16), chain("x", 1))
    client.commit(client.reserve(namespace, bytes(16), chain("y", 1)))
    lease = client.lookup(namespace, chain("y", 1)[0], lease=True).lease
    assert lease is not None
    reader = client.reader(namespace, half.epoch)
    reader.page(lease.refs[0])
    client.drop()
    client.connect()
    for stale in (
        lambda: client.commit(half),
        lambda: client.abort(half),
        lambda: client.segments(half.epoch),
        lambda: client.attach(5, half.epoch),
    ):
        with pytest.raises(StaleReference):
            stale()
    client.release(lease)
    assert reader.look(lease.refs[0].pack(), chain("y", 1)[0]).present == 1, "memory that is mapped stays mapped"


def test_slots_are_found_in_the_order_of_their_pages_and_only_for_who_was_promised_them(
    client: PoolClient, namespace: Namespace
) -> None:
    reserved = client.reserve(namespace, bytes(16), chain("x", 5))
    segments, size = client.segments(reserved.epoch), namespace.page_size
    refs = list(reserved.granted.values())
    for order in (refs, refs[::-1]):
        starts, memory = segments.places(b"".join(ref.pack() for ref in order), size)
        pages = [np.frombuffer(segments.page(ref, size), np.uint8).ctypes.data for ref in order]
        assert starts.tolist() == pages
        assert len(memory) == len({ref.segment for ref in refs})
    last = refs[-1]
    for other in (last._replace(generation=last.generation + 1), last._replace(slot=1 << 31)):
        with pytest.raises(StaleReference):
            segments.places(b"".join(ref.pack() for ref in [*refs[:-1], other]), size)


def test_memory_that_was_mapped_before_anything_lay_in_it_and_was_replaced_is_mapped_anew(
    make_node: MakeNode, make_client: MakeClient, namespace: Namespace
) -> None:
    """As engines do at their start, all segments of an empty pool."""
    node = make_node("--size", "256KB", "--segment-size", "64KB")
    node.wait_touched()
    client, other, keys = make_client(node), make_client(node, administers=True), chain("x", 50)
    client.connect()
    map_segments(client, logging.getLogger())
    for size in (64 << 10, 256 << 10):
        other.administer(Resize(size))
        until(lambda size=size: node.figures()["bytes_touched"] == size, "the pool has its new size")  # type: ignore[misc]
    reserved = client.reserve(namespace, bytes(16), keys)
    segments = client.segments(reserved.epoch)
    places, _ = segments.places(reserved.packed_refs, namespace.page_size)
    assert len(places) == len(reserved.granted) > 14, "in several segments"
    client.commit(reserved)
    lease = client.lookup(namespace, b"".join(keys), lease=True).lease
    assert lease is not None
    looked = client.reader(namespace, lease.epoch).look(lease.packed_refs, b"".join(keys[: len(places)]))
    assert looked.present == len(places)


def test_a_forked_child_leaves_its_parents_connection_alone(client: PoolClient, namespace: Namespace) -> None:
    client.commit(client.reserve(namespace, bytes(16), chain("x", 3)))
    epoch = client.epoch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which engines do
        pid = os.fork()
    if pid == 0:
        client.abandon()
        os._exit(0)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert client.lookup(namespace, KEYS).count == 3
    assert client.epoch == epoch


def test_a_closed_client_stays_closed(client: PoolClient, namespace: Namespace) -> None:
    client.open(namespace)
    client.close()
    client.close()
    with pytest.raises(PoolUnavailable):
        client.lookup(namespace, KEYS)
    assert not client.epoch


def test_an_idle_client_notices_the_end_of_its_node(tmp_path: Path) -> None:
    with node_that_says(tmp_path / "s", WELCOME):
        client = PoolClient(tmp_path / "s")
        client.connect()
        client.notice()

        def noticed() -> bool:
            client.notice()
            return not client.epoch

        until(noticed, "the client lets go")


def test_where_tails_are_more_than_a_request_holds_the_last_ones_are_sent() -> None:
    tails: list[Tail | None] = [Tail(bytes(16), number.to_bytes(4, "little") * 256) for number in range(3000)]
    tails[-2] = None
    sent = pool_client._fitting(tails)
    assert sent is not None
    assert sent == {position: tails[position] for position in (*range(3000 - len(sent) - 1, 2998), 2999)}
    assert 1900 < len(sent) < 2100
    assert pool_client._fitting([None]) is None
