"""Every verb that an engine or an administrator has: blocking, with a deadline, safe for several threads at once.

A client that lost its node says so at once on each call (:class:`~ems.errors.PoolUnavailable`) and tries to reach it
again by itself; a restart of the node is waited out within the call.  Namespaces are opened again on the new
connection.  Nothing else of an old connection is used on a new one: reservations and leases carry the epoch of the
connection that they were made on.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ems.errors import EmsError, PoolRefused, PoolRestarting, PoolUnavailable, ProtocolError, StaleReference
from ems.pool.client.answers import (
    NO_HINTS,
    NO_TAIL,
    Announcement,
    Hits,
    Lease,
    LookupHints,
    Namespace,
    PageLocation,
    PoolChanges,
    Reservation,
    TailHit,
)
from ems.pool.client.introduction import Introduction
from ems.pool.client.line import Connection, Line, Pins, SegmentMap, Sent, Turn
from ems.pool.client.promised import PromisedSlots
from ems.pool.client.retry import ConnectionEnded
from ems.pool.keys import KEY_BYTES, Tail, shard_masks
from ems.pool.layout import REF_BYTES
from ems.pool.names import check_facts, qualified
from ems.pool.pages import ClusterWrite, Outcome
from ems.pool.processes import peer_of
from ems.pool.protocol import limits, messages
from ems.pool.protocol.acts import Acts
from ems.pool.protocol.limits import MAX_TAIL_BYTES, TAIL_FRAME_BYTES
from ems.pool.protocol.messages import FROM_NOW
from ems.pool.reasons.words import Reason
from ems.pool.segments.reader import SAMPLE, PageReader, Trust, Verify, policy_named
from ems.pool.tenants.scram import Credentials

_MOST_MICROS = 10**12


class ReservedAhead(NamedTuple):
    """A reservation whose answer is waited for later; ``sent`` says why where it could not be sent."""

    namespace: Namespace
    parent: bytes
    keys: Sequence[bytes]
    sent: Sent[messages.Granted] | EmsError


class CommittedAhead(NamedTuple):
    """A commit whose answer is waited for later."""

    reservation: Reservation
    positions: list[int] | None
    sent: Sent[messages.Done]


class PoolClient(Line):
    """A connection to the node of this host that mends itself.

    ``name`` is what the node's log and ``ems status`` call this client.  ``pins`` is told of
    the memory that is mapped.  ``credentials`` prove who this client is to a
    node with tenants; one that ``administers`` looks after a node of its own user instead and stores nothing.  A call
    may take ``restart_seconds`` where it waits out a restart of the node and its own time is shorter.

    What a client that is ``local_only`` asks for has the node fetch nothing from other hosts; ``cluster_write`` says
    when these get what it stores.  Both may be said of a single call, too; nodes of older releases do not hear of them.
    """

    def __init__(
        self,
        path: Path,
        name: str = "engine",
        pins: Pins | None = None,
        *,
        credentials: Credentials | None = None,
        administers: bool = False,
        restart_seconds: float = 0.0,
        local_only: bool = False,
        cluster_write: ClusterWrite = "",
    ) -> None:
        introduction = Introduction(
            path, name[: limits.MAX_TEXT], credentials or Credentials(), administers=administers
        )
        super().__init__(introduction, pins, restart_seconds)
        self._path = path
        self._local_only = local_only
        self._cluster_write = cluster_write
        self._facts: dict[str, Mapping[str, str]] = {}
        self._promised = PromisedSlots()

    # Connection

    @property
    def epoch(self) -> int:
        """The number of the connection that the last call left behind, 0 without one; no promise for the next call."""
        connection = self.connection
        return connection.epoch if connection else 0

    @property
    def autostarted(self) -> bool | None:
        connection = self.connection
        return connection.welcome.autostarted if connection else None

    @property
    def node(self) -> str:
        connection = self.connection
        return connection.welcome.node if connection else ""

    @property
    def node_pid(self) -> int:
        """The process that listens on the node's socket, as the kernel says; 0 if it cannot be seen from here.

        Raises PoolUnavailable: there is no connection.
        """
        connection = self.connection
        if connection is None:
            raise PoolUnavailable(f"there is no connection to a pool node on {self._path}")
        return peer_of(connection.sock)[0]

    @property
    def segment_count(self) -> int:
        connection = self.connection
        return connection.welcome.segments if connection else 0

    def connect(self, timeout: float | None = None) -> None:
        """Make sure that there is a connection; fails as :meth:`turn` does."""
        with self.turn(timeout):
            pass

    def tell_stopped(self, timeout: float | None = None) -> None:
        """Say that copies ended of which the node may not know; no call where there are none.

        Reservations say it too, so only a client that makes none for a while needs this: until it is said, nobody gets
        the slots.
        """
        if self._promised.untold(self.epoch):
            self.call(timeout, self._tell_what_is_written)

    # Calls

    def _opened(self, turn: Turn, namespace: Namespace) -> int | None:
        """The number of ``namespace`` on this connection; None: nobody stored anything in it."""
        self._describe(turn, namespace.name)
        number = turn.connection.namespaces.get(namespace)
        if number is None:
            request = messages.Open(namespace.name, namespace.page_size)
            number = turn.ask(request, messages.Opened).namespace
            if number < 0:
                return None
            turn.connection.namespaces[namespace] = number
        return number

    def open(self, namespace: Namespace, timeout: float | None = None) -> None:
        """Make sure that the node knows ``namespace``; the other verbs do this by themselves.

        Refused where a page of that size fits in no segment, or the namespace exists with another page size.
        """
        self.call(timeout, lambda turn: self._opened(turn, namespace))

    def describe(self, name: str, facts: Mapping[str, str]) -> None:
        """Let nodes know what the namespace ``name`` means, in plain words by field; makes no call now.

        So a node can tell which field differs where a model is in the pool in another layout.
        Raises PoolRefused: the facts cannot describe a namespace.
        """
        check_facts(facts)
        self._facts[name] = dict(facts)

    def _describe(self, turn: Turn, name: str) -> None:
        facts = self._facts.get(name)
        if facts is not None and turn.connection.described.get(name) is not facts:
            turn.ask(messages.Describe(name, dict(facts)), messages.Done)
            turn.connection.described[name] = facts

    def lookup(
        self,
        namespace: Namespace,
        keys: bytes,
        *,
        lease: bool = False,
        timeout: float | None = None,
        local_only: bool = False,
        hints: LookupHints = NO_HINTS,
    ) -> Hits:
        """How many leading ``keys`` (16 bytes each, joined) are present; with ``lease`` they stay until released.

        With ``local_only``, or where all calls of the client are, nothing that others have counts.
        """
        local_only = local_only or self._local_only

        def look(turn: Turn) -> Hits:
            number, request = self._opened(turn, namespace), hints.request[: limits.MAX_ID]
            asked: messages.Lookup | messages.Miss
            if number is None:  # the node has nothing there, and is to know that it was asked
                asked = messages.Miss(namespace.name, len(keys) // KEY_BYTES, request)
            else:
                compute, patience = min(round(hints.compute * 1e6), _MOST_MICROS), _micros(hints.patience)
                asked = messages.Lookup(
                    number, keys, lease, None, request, compute, local_only, patience, hints.directories
                )
            answer = turn.ask(asked, messages.Hits)
            held = _held(turn.connection, answer)
            return Hits(answer.count, answer.pending, held, Reason.of_code(answer.code), answer.below)

        return self.call(timeout, look)

    def prefetch(self, namespace: Namespace, keys: bytes, timeout: float | None = None) -> int:
        """Have ``keys``, which will be needed soon, brought up from tiers below memory.

        Returns how many leading ones are in memory or on their way there.
        """

        def ask(turn: Turn) -> int:
            number = self._opened(turn, namespace)
            if number is None:
                return 0
            return turn.ask(messages.Prefetch(number, keys, self._local_only), messages.Done).count

        return self.call(timeout, ask)

    def explain(self, name: str, keys: bytes, timeout: float | None = None) -> messages.Explained:
        """Why ``keys`` (16 bytes each, joined) of the namespace ``name`` are there or not; counts nothing."""

        def ask(turn: Turn) -> messages.Explained:
            self._describe(turn, name)
            return turn.ask(messages.Explain(name, keys, self._local_only), messages.Explained)

        return self.call(timeout, ask)

    def lookup_tail(
        self,
        namespace: Namespace,
        tail: Tail,
        *,
        lease: bool = False,
        timeout: float | None = None,
        shards: int = 1,
        patience: float = 0.0,
    ) -> TailHit:
        """The page that shares most leading tokens with ``tail``; with ``lease`` it stays until released.

        It is the first of ``shards`` pages of its chunk, which tiers bring up together.  ``patience`` is as in
        :class:`~ems.pool.client.answers.LookupHints`.
        """

        def look(turn: Turn) -> TailHit:
            number = self._opened(turn, namespace)
            if number is None:
                return NO_TAIL
            asked = messages.Lookup(
                number, shard_masks(shards), lease, tail, local_only=self._local_only, patience=_micros(patience)
            )
            answer = turn.ask(asked, messages.Hits)
            held = _held(turn.connection, answer)
            return TailHit(answer.count, answer.key, bool(answer.pending), held, bool(answer.below))

        return self.call(timeout, look)

    def release(self, lease: Lease) -> None:
        """End a lease; quietly does nothing when the connection that it was made on is gone."""
        self.tell(messages.Release(lease.number), lease.epoch)

    def announce(self, namespace: Namespace, keys: bytes, timeout: float | None = None) -> Announcement | None:
        """A request waits and will ask for ``keys`` (16 bytes each, joined): they stay while anything else can leave.

        None where this means nothing, because nobody stored anything in ``namespace``.  What was announced ends by
        :meth:`withdraw`, with the connection, or after some time.
        """

        def ask(turn: Turn) -> Announcement | None:
            number = self._opened(turn, namespace)
            if number is None:
                return None
            answer = turn.ask(messages.Announce(number, keys, self._local_only), messages.Announced)
            return Announcement(turn.connection.epoch, answer.announcement)

        return self.call(timeout, ask)

    def withdraw(self, announcement: Announcement) -> None:
        self.tell(messages.Withdraw(announcement.number), announcement.epoch)

    def reserve(
        self,
        namespace: Namespace,
        parent: bytes,
        keys: Sequence[bytes],
        timeout: float | None = None,
        tails: Sequence[Tail | None] = (),
    ) -> Reservation:
        """Ask for slots for the pages of ``keys``, consecutive blocks after the block of ``parent``.

        ``tails`` has one for each of them, or none at all: pages with one are found by their tokens too.  Where these
        are more than one request has room for, those of the first pages are not.
        """
        if tails and len(tails) != len(keys):
            raise ValueError(f"{len(tails)} tails for {len(keys)} keys, expected one for each or none")

        def ask(turn: Turn) -> Reservation:
            request = self._reserving(turn, namespace, parent, keys, tails)
            return self._reserved(turn.connection.epoch, len(keys), turn.ask(request, messages.Granted))

        return self.call(timeout, ask)

    def begin_reserve(
        self, namespace: Namespace, parent: bytes, keys: Sequence[bytes], timeout: float | None = None
    ) -> ReservedAhead:
        """Ask as :meth:`reserve` does, and go on while the node looks for slots; :meth:`end_reserve` has them.

        To be followed by that or by :meth:`call_off`, whatever happens.
        """
        sent: Sent[messages.Granted] | EmsError
        try:
            with self.turn(timeout) as turn:
                sent = turn.send(self._reserving(turn, namespace, parent, keys, ()), messages.Granted)
        except EmsError as error:  # told to who wants the answer
            sent = error
        return ReservedAhead(namespace, parent, keys, sent)

    def end_reserve(self, ahead: ReservedAhead, timeout: float | None = None) -> Reservation:
        """What was asked for ahead; asked for anew where the connection ended since, or the node restarts.

        Raises EmsError: as :meth:`reserve` does.
        """
        with contextlib.suppress(ConnectionEnded, PoolRestarting, StaleReference):
            if isinstance(ahead.sent, EmsError):
                raise ahead.sent
            return self._reserved(ahead.sent.epoch, len(ahead.keys), self.answer(ahead.sent, timeout))
        return self.reserve(ahead.namespace, ahead.parent, ahead.keys, timeout)

    def call_off(self, ahead: ReservedAhead, timeout: float | None = None) -> None:
        """Give back what was asked for ahead and is not used.  Raises EmsError: as :meth:`abort` does."""
        if not isinstance(ahead.sent, EmsError):
            answer = self.answer(ahead.sent, timeout)
            self.abort(self._reserved(ahead.sent.epoch, len(ahead.keys), answer), timeout)

    def _reserving(
        self, turn: Turn, namespace: Namespace, parent: bytes, keys: Sequence[bytes], tails: Sequence[Tail | None]
    ) -> messages.Reserve:
        """The request for a reservation, of which the node may hear from now on."""
        number = self._opened(turn, namespace)
        if number is None:
            raise PoolRefused(f"namespace {namespace.name} was opened without a page size, so nothing can be stored")
        self._tell_what_is_written(turn)
        self._promised.asked()
        return messages.Reserve(number, parent, b"".join(keys), _fitting(tails))

    def _reserved(self, epoch: int, keys: int, answer: messages.Granted) -> Reservation:
        granted = answer.outcomes.count(Outcome.GRANTED)
        if len(answer.refs) != granted * REF_BYTES or len(answer.outcomes) != keys:
            self.drop()
            raise ProtocolError("the node's answer to a reservation does not match the request")
        reservation = Reservation(epoch, answer.reservation, answer.outcomes, answer.refs)
        self._promised.promised(reservation)
        return reservation

    def _tell_what_is_written(self, turn: Turn) -> None:
        """On another connection, or after a commit or abort that failed: which slots this client still writes into."""
        news = self._promised.news(turn.connection.epoch)
        if news is not None:
            refs, mark = news
            turn.ask(messages.StillWriting(refs), messages.Done)
            self._promised.was_named(mark)

    def commit(
        self,
        reservation: Reservation,
        positions: list[int] | None = None,
        timeout: float | None = None,
        checksums: Sequence[int] = (),
        cluster_write: ClusterWrite = "",
    ) -> None:
        """Publish pages of a reservation whose bytes are in their slots; no call when none were granted.

        ``checksums`` are those of the pages (see :func:`ems.pool.layout.crc32c`), in the order of
        ``positions`` or of the keys; a page without one cannot be checked when it is loaded.
        Raises StaleReference: the reservation ended; nothing was published, or of many pages the first ones.
        """
        if reservation.packed_refs:
            self.end_commit(self.begin_commit(reservation, positions, timeout, checksums, cluster_write), timeout)

    def begin_commit(
        self,
        reservation: Reservation,
        positions: list[int] | None = None,
        timeout: float | None = None,
        checksums: Sequence[int] = (),
        cluster_write: ClusterWrite = "",
    ) -> CommittedAhead:
        """Ask as :meth:`commit` does, of a reservation of which something was granted, and go on meanwhile.

        To be followed by :meth:`end_commit`, whatever happens.
        """
        raw = struct.pack(f"<{len(checksums)}I", *checksums)
        if raw and positions is None:
            positions = reservation.positions
        request = messages.Commit(reservation.number, positions, raw, cluster_write or self._cluster_write)
        sent: Sent[messages.Done] | None = None
        try:
            with self.turn(timeout, reservation.epoch) as turn:
                sent = turn.send(request, messages.Done)
        finally:
            if sent is None:
                self._promised.ended(reservation, positions, node_knows=False)
        return CommittedAhead(reservation, positions, sent)

    def end_commit(self, ahead: CommittedAhead, timeout: float | None = None) -> None:
        """Wait until what :meth:`begin_commit` named is published.  Raises EmsError: as :meth:`commit` does."""
        node_knows = False
        try:
            self.answer(ahead.sent, timeout)
            node_knows = True
        finally:
            self._promised.ended(ahead.reservation, ahead.positions, node_knows=node_knows)

    def report(self, namespace: Namespace, reader: PageReader, timeout: float | None = None) -> int:
        """Tell the node of pages that ``reader`` found corrupt; how many the node took out of the pool for that."""
        corrupt, reader.corrupt = reader.corrupt[: limits.MAX_CORRUPT], []
        if not corrupt:
            return 0

        def ask(turn: Turn) -> int:
            number = self._opened(turn, namespace)
            if number is None:
                return 0
            keys, refs = b"".join(key for key, _ in corrupt), b"".join(ref.pack() for _, ref in corrupt)
            return turn.ask(messages.Corrupt(number, keys, refs), messages.Done).count

        return self.call(timeout, ask)

    def abort(self, reservation: Reservation, timeout: float | None = None) -> None:
        """Give back what of a reservation was not committed; no call when none were granted.

        No copy into its slots may run any more, and none may run into those of a :meth:`commit`: both are to be called
        when the connection was lost, too.  Until then, or until this process ends, nobody else gets the slots.
        Raises StaleReference: the reservation ended with its connection already.
        """
        if reservation.packed_refs:
            node_knows = False
            try:
                self.at(reservation.epoch)  # a node that is gone need not be reached for that
                with self.turn(timeout, reservation.epoch) as turn:
                    turn.ask(messages.Abort(reservation.number), messages.Done)
                node_knows = True
            finally:
                self._promised.ended(reservation, None, node_knows=node_knows)

    def stats(self, timeout: float | None = None) -> dict[str, object]:
        return self.call(timeout, lambda turn: turn.ask(messages.Stats(), messages.Figures).figures)

    def administer(self, act: Acts, *, dry_run: bool = False, timeout: float | None = None) -> dict[str, Any]:
        """Let the node do ``act``; what it did, or would do with ``dry_run``, as plain figures."""

        def ask(turn: Turn) -> dict[str, Any]:
            return turn.ask(messages.Administer(act, dry_run), messages.Reported).report

        return self.call(timeout, ask, again=False)

    def changes(
        self, since: PageLocation | None, namespaces: Sequence[str], timeout: float | None = None
    ) -> PoolChanges:
        """What was stored and removed in ``namespaces`` since an earlier answer; None begins now and tells nothing."""

        def ask(turn: Turn) -> PoolChanges:
            node = turn.connection.welcome.node
            known = since is not None and since.node == node
            sequence = since.sequence if since is not None and known else FROM_NOW
            answer = turn.ask(messages.Changes(sequence, list(namespaces)), messages.Changed)
            lost = answer.lost or (since is not None and not known)
            return PoolChanges(PageLocation(node, answer.sequence), lost, tuple(answer.runs))

        return self.call(timeout, ask)

    # Memory

    def segments(self, epoch: int) -> SegmentMap:
        """The mapped segments of the connection ``epoch``.  Raises StaleReference: that connection is gone."""
        return self.at(epoch).segments

    def reader(self, namespace: Namespace, epoch: int, policy: Verify | None = None) -> PageReader:
        """Looks at pages of ``namespace`` that were promised on the connection ``epoch``; not safe for several threads.

        With ``policy`` it checks by that instead of by the node's.  Raises StaleReference: that connection is gone.
        """
        connection = self.at(epoch)
        trust = Trust(policy or policy_named(connection.welcome.verify), connection.welcome.trusted_from)
        first = random.randrange(SAMPLE)
        name = qualified(connection.tenant, namespace.name) if connection.tenant else namespace.name
        return PageReader(connection.segments.segment, name, namespace.page_size, trust, first)


def _micros(patience: float) -> int:
    return min(round(patience * 1e6), limits.MAX_PATIENCE)


def _fitting(tails: Sequence[Tail | None]) -> dict[int, Tail] | None:
    """The last of ``tails``, by position, as many as a request has room for; None when there is none."""
    found: dict[int, Tail] = {}
    room = MAX_TAIL_BYTES
    for position in reversed(range(len(tails))):
        if (tail := tails[position]) is not None:
            room -= TAIL_FRAME_BYTES + len(tail.tokens)
            if room < 0:
                break
            found[position] = tail
    return found or None


def _held(connection: Connection, answer: messages.Hits) -> Lease | None:
    return Lease(connection.welcome.node, connection.epoch, answer.lease, answer.refs) if answer.lease else None
