"""Nobody waits for what another asked for: long work goes in steps, and tenants take turns.

Work is counted, not timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.config import NodeConfig
from ems.pool.keys import Tail
from ems.pool.layout import REF_BYTES
from ems.pool.node.connection import TAIL_WEIGHT, Connection
from ems.pool.node.pool_node import Node
from ems.pool.node.rounds import AT_ONCE, ROUND, Farewell, Turns
from ems.pool.pages import Outcome
from ems.pool.protocol import coding, messages
from ems.pool.protocol.coding import FrameReader
from tests.pool.brain import chain
from tests.pool.wrong_core import wrong_core

PAGE = 4096
LONG = 8000
"""Keys of a long request."""
MOST_LINES = 200_000
"""Lines of Python that may run between a short lookup and its answer; long requests have many times as many."""


async def rounds_until(done: Callable[[], object]) -> None:
    """Let the loop go round until it is ``done``."""
    for _ in range(100_000):
        if done():
            return
        await asyncio.sleep(0)
    pytest.fail("it does not come about")


class Client:
    """The other end of a connection to a node within this process."""

    def __init__(self, node: Node, party: str) -> None:
        self.sock, its = socket.socketpair()
        self.connection: Connection = node.clients.take_in(its)
        self.sock.setblocking(False)
        self._party = party
        self._reader = FrameReader()
        self._bodies: list[bytes] = []

    def send(self, *requests: messages.Message) -> None:
        """Send as much as the node takes; the rest follows while answers are waited for."""
        self._unsent = b"".join(map(coding.encode, requests))
        self._push()

    async def all_but_the_last_byte(self, *requests: messages.Message) -> Callable[[], None]:
        """Have the node read ``requests``; what is returned sends what is left."""
        data = b"".join(map(coding.encode, requests))
        self._unsent, last = data[:-1], data[-1:]
        for _ in range(20):
            self._push()
            await asyncio.sleep(0)
        assert not self._unsent
        return lambda: self.sock.sendall(last)

    def _push(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]

    def came(self) -> messages.Answer | None:
        """An answer, if there is one."""
        self._push()
        try:
            self._reader.feed(self.sock.recv(1 << 20))
        except BlockingIOError:
            return None
        self._bodies += self._reader.frames()
        return coding.decode_answer(self._bodies.pop(0)) if self._bodies else None

    async def ask(self, request: messages.Message) -> messages.Answer:
        self.send(request)
        answer = None

        def answered() -> bool:
            nonlocal answer
            answer = self.came()
            return answer is not None

        await rounds_until(answered)
        assert answer is not None
        return answer

    async def greet(self) -> None:
        answer = await self.ask(messages.Hello(1, 1, "test", os.getpid()))
        assert isinstance(answer, messages.Welcome)
        self.connection.party = self._party


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    config = NodeConfig(directory=tmp_path / "pool", size=160 << 20, segment_size=160 << 20, high_watermark=1.0)
    made = Node(config)
    for number, size in enumerate(made.arena.sizes):
        made.core.slots.touch(number, size)
    made.core.slots.touching_ended()
    made.core.open_namespace("a", PAGE)
    yield made
    made.close()


MakeClient = Callable[[str], Client]


@pytest.fixture
async def connect(node: Node) -> AsyncIterator[MakeClient]:
    """Make clients of the node, which leave at the end."""
    made: list[Client] = []

    def connect(party: str) -> Client:
        made.append(Client(node, party))
        return made[-1]

    yield connect
    for client in made:
        client.sock.close()


async def stored(client: Client, keys: list[bytes]) -> None:
    granted = await client.ask(messages.Reserve(0, bytes(16), b"".join(keys)))
    assert isinstance(granted, messages.Granted)
    assert granted.outcomes == bytes(len(keys))
    assert await client.ask(messages.Commit(granted.reservation)) == messages.Done(len(keys))


async def lines_until(answered: Callable[[], bool], begin: Callable[[], object]) -> int:
    """How many lines of Python run from ``begin`` until it is ``answered``."""
    count = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        begin()
        await rounds_until(answered)
    finally:
        sys.settrace(None)
    return count


async def reserving(clients: list[Client], keys: list[bytes]) -> Callable[[], object]:
    requests = [messages.Reserve(0, bytes(16), b"".join(chain(f"new {number}", LONG))) for number in range(2)]
    begins = [await client.all_but_the_last_byte(one) for client, one in zip(clients, requests, strict=True)]
    return lambda: [begin() for begin in begins]


async def committing(clients: list[Client], keys: list[bytes]) -> Callable[[], None]:
    granted = await clients[0].ask(messages.Reserve(0, bytes(16), b"".join(chain("new", LONG))))
    assert isinstance(granted, messages.Granted)
    return lambda: clients[0].send(messages.Commit(granted.reservation))


async def aborting(clients: list[Client], keys: list[bytes]) -> Callable[[], None]:
    granted = await clients[0].ask(messages.Reserve(0, bytes(16), b"".join(chain("new", LONG))))
    assert isinstance(granted, messages.Granted)
    return lambda: clients[0].send(messages.Abort(granted.reservation))


async def leaving(clients: list[Client], keys: list[bytes]) -> Callable[[], None]:
    await clients[0].ask(messages.Reserve(0, bytes(16), b"".join(chain("new", LONG))))
    for _ in range(20):
        await clients[0].ask(messages.Lookup(0, b"".join(keys), lease=True))
    return clients[0].sock.close


async def leasing(clients: list[Client], keys: list[bytes]) -> Callable[[], object]:
    request = messages.Lookup(0, b"".join(keys), lease=True)
    begins = [await client.all_but_the_last_byte(request) for client in clients]
    return lambda: [begin() for begin in begins]


async def asking_for_much_at_once(clients: list[Client], keys: list[bytes]) -> Callable[[], None]:
    def attack() -> None:
        for client in clients:
            client.send(*[messages.Lookup(0, keys[0], lease=True)] * 1000)

    return attack


async def reporting(clients: list[Client], keys: list[bytes]) -> Callable[[], None]:
    """Forty leases on all pages, and a report of sixty-four that are damaged."""
    for _ in range(40):
        hits = await clients[0].ask(messages.Lookup(0, b"".join(keys), lease=True))
    assert isinstance(hits, messages.Hits)
    return lambda: clients[0].send(messages.Corrupt(0, b"".join(keys[:64]), hits.refs[: 64 * REF_BYTES]))


ATTACKS = [reserving, committing, aborting, leaving, leasing, asking_for_much_at_once, reporting]


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.__name__ for attack in ATTACKS])
@pytest.mark.parametrize("own", [True, False], ids=["of the same tenant", "of another"])
async def test_a_short_lookup_is_answered_between_steps_of_long_work(
    node: Node, connect: MakeClient, attack: Callable[[list[Client], list[bytes]], object], own: bool
) -> None:
    clients = [connect("tenant ann") for _ in range(2)]
    victim = connect("tenant ann" if own else "tenant bob")
    for client in (*clients, victim):
        await client.greet()
    keys = chain("x", LONG)
    await stored(victim, keys)
    begin = await attack(clients, keys)  # type: ignore[misc]
    answers: list[messages.Answer] = []

    def start() -> None:
        begin()
        victim.send(messages.Lookup(0, keys[0]))

    def answered() -> bool:
        answer = victim.came()
        if answer is not None:
            answers.append(answer)
        return bool(answers)

    count = await lines_until(answered, start)
    assert answers == [messages.Hits(1, 0, 0, b"")]
    assert count < MOST_LINES, count
    await rounds_until(lambda: not node.rounds.turns and not node.core.unsettled)
    assert wrong_core(node.core) == []


async def test_a_hundred_connections_of_one_tenant_have_one_turn(node: Node, connect: MakeClient) -> None:
    many, one = [connect("tenant ann") for _ in range(100)], connect("tenant bob")
    for client in (*many, one):
        await client.greet()
    keys = chain("x", 100)
    await stored(one, keys)
    work: Counter[str] = Counter()
    for client in (*many, one):
        turn = client.connection.turn

        def counted(turn: Callable[[], int] = turn, party: str = client.connection.party) -> int:
            done = turn()
            work[party] += done
            return done

        client.connection.turn = counted  # type: ignore[method-assign]
    asked = 40
    for client in (*many, one):
        client.send(*[messages.Lookup(0, b"".join(keys))] * asked)
    await rounds_until(lambda: work["tenant bob"] >= asked * len(keys))
    assert work["tenant ann"] <= work["tenant bob"] + AT_ONCE + 2 * ROUND, work


async def test_long_requests_do_what_they_say(node: Node, connect: MakeClient) -> None:
    client = connect("tenant ann")
    await client.greet()
    keys = chain("x", LONG)
    await stored(client, keys)
    hits = await client.ask(messages.Lookup(0, b"".join(keys), lease=True))
    assert isinstance(hits, messages.Hits)
    assert hits.count == LONG
    more = await client.ask(messages.Reserve(0, bytes(16), b"".join([*keys, *chain("y", LONG)])))
    assert isinstance(more, messages.Granted)
    assert more.outcomes == b"\1" * LONG + bytes(LONG)
    assert len(more.refs) == REF_BYTES * LONG
    some = list(range(LONG, LONG + 3000))
    checksums = b"".join(position.to_bytes(4, "little") for position in some)
    assert await client.ask(messages.Commit(more.reservation, some, checksums)) == messages.Done(3000)
    page = node.core.page(0, chain("y", LONG)[2999])
    assert page is not None
    assert page.present
    assert page.parent is node.core.page(0, chain("y", LONG)[2998])
    stale = await client.ask(messages.Commit(more.reservation, list(range(LONG + 2000, LONG + 8000))))
    assert isinstance(stale, messages.Refused), "a commit takes all, or nothing"
    assert await client.ask(messages.Abort(more.reservation)) == messages.Done()
    assert isinstance(await client.ask(messages.Abort(more.reservation)), messages.Refused)
    too_many = await client.ask(messages.Reserve(0, bytes(16), b"".join(chain("z", 5 * LONG))))
    assert isinstance(too_many, messages.Granted)
    refused = too_many.outcomes.index(Outcome.OVER_SHARE)
    assert set(too_many.outcomes[refused:]) == {Outcome.OVER_SHARE}, "nothing behind what is too much is granted"
    assert len(too_many.refs) == REF_BYTES * refused
    client.sock.close()
    await rounds_until(lambda: not node.rounds.turns and not node.clients.connections)
    figures = node.core.stats()
    assert (figures["leases"], figures["reservations"]) == (0, 0)
    assert wrong_core(node.core) == []


async def test_what_was_sent_before_the_end_is_done(node: Node, connect: MakeClient) -> None:
    client = connect("tenant ann")
    await client.greet()
    keys = chain("x", LONG)
    granted = await client.ask(messages.Reserve(0, bytes(16), b"".join(keys)))
    assert isinstance(granted, messages.Granted)
    client.send(messages.Commit(granted.reservation))
    client.sock.shutdown(socket.SHUT_WR)
    await rounds_until(lambda: not node.clients.connections)
    assert node.core.pages() == LONG


async def test_nothing_is_read_while_something_is_to_be_done(node: Node, connect: MakeClient) -> None:
    client = connect("tenant ann")
    await client.greet()
    request = coding.encode(messages.Reserve(0, bytes(16), b"".join(chain("x", LONG))))
    client.send(messages.Abort(1))
    sent = client.sock.send(request * 100)
    for _ in range(30):
        await asyncio.sleep(0)
        with_buffer = node.clients.limits.kept
        assert with_buffer <= 2 * len(request), (with_buffer, sent)


# The order of turns


class Worker:
    def __init__(self, party: str, work: int) -> None:
        self.party = party
        self.left = work

    @property
    def busy(self) -> bool:
        return self.left > 0

    def turn(self) -> int:
        self.left -= 1
        return 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=12))
def test_between_two_turns_of_one_party_all_others_have_one(given_work: list[tuple[str, int]]) -> None:
    turns, workers = Turns(), [Worker(*one) for one in given_work]
    for worker in workers:
        turns.add(worker)
        turns.add(worker)
    order: list[str] = []
    while (one := turns.next()) is not None:
        order.append(one.party)
        one.turn()
        if one.busy:
            turns.add(one)
    assert len(order) == sum(work for _, work in given_work)
    left = Counter[str]()
    for party, work in given_work:
        left[party] += work
    for position, party in enumerate(order):
        left[party] -= 1
        others = {name for name, count in left.items() if count and name != party}
        again = order.index(party, position + 1) if left[party] else len(order)
        if left[party]:
            assert others <= set(order[position + 1 : again])


def test_who_is_dropped_has_no_turn() -> None:
    turns, workers = Turns(), [Worker("a", 1), Worker("b", 1)]
    turns.drop(workers[0])
    for worker in workers:
        turns.add(worker)
    turns.drop(workers[0])
    assert list(turns) == [workers[1]]
    assert turns.next() is workers[1]
    assert turns.next() is None


def test_a_farewell_ends_with_its_last_step() -> None:
    def steps() -> Iterator[int]:
        yield 3
        yield 4

    farewell = Farewell("a", steps())
    assert [farewell.turn(), farewell.turn(), farewell.busy, farewell.turn(), farewell.busy] == [3, 4, True, 0, False]


async def test_a_request_counts_among_the_bytes_that_are_kept_until_it_is_done(node: Node, connect: MakeClient) -> None:
    """Hundreds of clients with a long request each would else hold a node's memory together."""
    client = connect("one")
    await client.greet()
    joined = b"".join(chain("new", LONG))
    send_the_rest = await client.all_but_the_last_byte(messages.Reserve(0, bytes(16), joined))
    send_the_rest()
    await rounds_until(lambda: client.connection.busy and node.clients.limits.kept >= len(joined))
    await rounds_until(client.came)
    await rounds_until(lambda: node.clients.limits.kept == 0)


async def test_the_tails_of_a_request_count_for_what_they_take(node: Node, connect: MakeClient) -> None:
    client = connect("one")
    await client.greet()
    tails = {at: Tail(bytes(16), at.to_bytes(4, "little")) for at in range(LONG)}
    joined = b"".join(tail.key for tail in tails.values())
    send_the_rest = await client.all_but_the_last_byte(messages.Reserve(0, bytes(16), joined, tails))
    send_the_rest()
    await rounds_until(lambda: client.connection.busy and node.clients.limits.kept >= len(joined) + TAIL_WEIGHT * LONG)
    await rounds_until(client.came)
    await rounds_until(lambda: node.clients.limits.kept == 0)
