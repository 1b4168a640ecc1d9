"""What greeted clients ask of a node: one method a message, and nothing of sockets.

What always holds: whatever a request says, it changes nothing of others; a refusal is an error of :mod:`ems.errors`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container
from typing import Any, Protocol

import numpy as np
import structlog

from ems.errors import ProtocolError, StaleReference
from ems.pool.administration.acts import Acts
from ems.pool.core.answers import Committed, Reserved, packed_refs
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import Tail, split_keys
from ems.pool.node.memory import Memory
from ems.pool.protocol import greeting, messages
from ems.pool.segments.arena import Arena
from ems.pool.segments.layout import PageFlag, unpack_refs
from ems.pool.tenants.names import refuse_marked
from ems.pool.tiers.carrier import Carrier
from ems.pool.tiers.whereabouts import revised, why

_log = structlog.get_logger("ems.node")


class Host(Protocol):
    """What requests need of their node."""

    core: PoolCore
    arena: Arena
    carrier: Carrier
    memory: Memory

    @property
    def open(self) -> bool:
        """Whether the node has no tenants."""

    def features(self, owner: int) -> Container[str]:
        """What the client understands of what nodes tell."""

    def figures(self) -> dict[str, object]:
        """What ``ems status`` shows."""

    def administer(self, owner: int, act: Acts, *, dry_run: bool) -> dict[str, Any]:
        """Do what an administrator asks for."""

    def promise(
        self, owner: int, namespace: int, parent: bytes, keys: list[bytes], tail: Tail | None = None
    ) -> Reserved:
        """Reserve, and write the headers."""

    def published(self, done: Committed, checksums: list[int] | None, flags: PageFlag) -> None:
        """Say in the headers of committed pages that they are whole."""


class Requests:
    """Every verb of a greeted client."""

    def __init__(self, host: Host, clock: Callable[[], float]) -> None:
        self._host = host
        self._clock = clock
        self._verbs: dict[type, Callable[[int, Any], messages.Answer | None]] = {
            messages.Lookup: self._lookup,
            messages.Release: self._release,
            messages.Reserve: self._reserve,
            messages.Commit: self._commit,
            messages.Abort: self._abort,
            messages.Open: self._open,
            messages.Attach: self._attach,
            messages.Stats: self._stats,
            messages.Changes: self._changes,
            messages.Prefetch: self._prefetch,
            messages.Describe: self._describe,
            messages.Miss: self._miss,
            messages.Explain: self._explain,
            messages.Corrupt: self._corrupt,
            messages.Announce: self._announce,
            messages.Withdraw: self._withdraw,
            messages.Administer: self._administer,
        }

    def answer(self, owner: int, request: messages.Request) -> messages.Answer | None:
        """Do what the client ``owner`` asks; None for requests that have no answer.

        Raises:
            EmsError: it is refused, with the reason.
        """
        return self._verbs[type(request)](owner, request)

    def _lookup(self, owner: int, request: messages.Lookup) -> messages.Hits:
        if request.tail is not None:
            return self._lookup_tail(owner, request.namespace, request.tail, lease=request.lease)
        keys = split_keys(request.keys)
        found = self._host.core.lookup(owner, request.namespace, keys, lease=request.lease, request=request.request)
        count, below, code = len(found.pages), 0, found.code
        if count < len(keys):
            rising = self._host.carrier.looked_up(request.namespace, keys, count, request.compute / 1e6)
            below = rising if self._tells(owner, greeting.TELLS_TIERS) else 0
            if self._host.carrier.levels:
                name = self._host.core.named(request.namespace)[0]
                better = why(self._host.carrier.levels, name, keys[count], rising=rising > 0)
                code = code if better is None else self._host.core.reasons.revise(code, better.code, request.request)
        code = code if code and self._tells(owner, greeting.TELLS_REASONS) else 0
        refs = found.refs() if request.lease else b""
        return messages.Hits(count, found.pending, found.lease, refs, b"", code, below)

    def _lookup_tail(self, owner: int, namespace: int, tail: Tail, *, lease: bool) -> messages.Hits:
        shared, held = self._host.core.lookup_tail(owner, namespace, tail, lease=lease)
        comes = self._host.carrier.looked_up_tail(namespace, tail, shared) and self._tells(owner, greeting.TELLS_TIERS)
        key = held.pages[0].key if held.pages else b""
        return messages.Hits(shared, held.pending, held.lease, held.refs() if lease else b"", key, 0, int(comes))

    def _tells(self, owner: int, feature: str) -> bool:
        return feature in self._host.features(owner)

    def _prefetch(self, _owner: int, request: messages.Prefetch) -> messages.Done:
        return messages.Done(self._host.carrier.prefetch(request.namespace, split_keys(request.keys)))

    def _release(self, owner: int, request: messages.Release) -> None:
        # Nobody waits for an answer, and one would be taken for that of the next request.
        with contextlib.suppress(StaleReference):
            self._host.core.release(owner, request.lease)

    def _abort(self, owner: int, request: messages.Abort) -> messages.Done:
        self._host.core.abort(owner, request.reservation)
        return messages.Done()

    def _open(self, _: int, request: messages.Open) -> messages.Opened:
        if self._host.open:
            refuse_marked(request.name)
        # A tier below memory may have pages of a namespace that nobody has stored anything in since the start.
        size = request.page_size
        number = self._host.core.find_namespace(request.name) if not size else -1
        if number < 0:
            size = size or self._host.carrier.page_size(request.name)
            number = self._host.core.open_namespace(request.name, size) if size else -1
        return messages.Opened(number)

    def _attach(self, _: int, request: messages.Attach) -> messages.SegmentAttached:
        count = len(self._host.arena.sizes)
        if not 0 <= request.segment < count:
            raise ProtocolError(f"segment {request.segment} does not exist, expected 0 to {count - 1}")
        if request.segment in self._host.memory.lost:
            raise StaleReference(f"segment {request.segment} has no memory, look again")
        return messages.SegmentAttached(request.segment, self._host.arena.sizes[request.segment])

    def _stats(self, _owner: int, _request: messages.Stats) -> messages.Figures:
        return messages.Figures(self._host.figures())

    def _changes(self, _owner: int, request: messages.Changes) -> messages.Changed:
        return messages.Changed(*self._host.core.changes.since(request.sequence, request.namespaces, self._clock()))

    def _describe(self, _owner: int, request: messages.Describe) -> messages.Done:
        self._host.core.reasons.layouts.describe(request.name, request.facts)
        return messages.Done()

    def _miss(self, _owner: int, request: messages.Miss) -> messages.Hits:
        code = self._host.core.missed_namespace(request.name, request.keys, request.request)
        return messages.Hits(0, 0, 0, b"", b"", code)

    def _explain(self, _owner: int, request: messages.Explain) -> messages.Explained:
        keys = split_keys(request.keys)
        told = self._host.core.explain(request.name, keys)
        codes = revised(self._host.carrier.levels, request.name, keys, told.codes)
        if next((code for code in codes if code), 0) != next((code for code in told.codes if code), 0):
            return messages.Explained(codes)
        return messages.Explained(codes, told.seconds, told.winner, told.layouts)

    def _announce(self, owner: int, request: messages.Announce) -> messages.Announced:
        keys = split_keys(request.keys)
        self._host.carrier.prefetch(request.namespace, keys)
        return messages.Announced(self._host.core.announce(owner, request.namespace, keys, self._clock()))

    def _withdraw(self, owner: int, request: messages.Withdraw) -> None:
        self._host.core.withdraw(owner, request.announcement)

    def _administer(self, owner: int, request: messages.Administer) -> messages.Reported:
        return messages.Reported(self._host.administer(owner, request.act, dry_run=request.dry_run))

    def _reserve(self, owner: int, request: messages.Reserve) -> messages.Granted:
        keys = split_keys(request.keys)
        reserved = self._host.promise(owner, request.namespace, request.parent, keys, request.tail)
        return messages.Granted(reserved.reservation, reserved.outcomes, packed_refs(reserved.granted))

    def _corrupt(self, _: int, request: messages.Corrupt) -> messages.Done:
        """A reader found wrong bytes: look at them, and take the page out of the pool if it is so."""
        count = 0
        length = self._host.core.named(request.namespace)[1]
        for key, ref in zip(split_keys(request.keys), unpack_refs(request.refs), strict=True):
            page = self._host.core.find(request.namespace, key, ref.pack())
            if page is None:
                continue  # its slot has another page by now
            if self._host.arena.headers.is_sound(ref, key, length):
                self._host.core.counters.corrupt_unconfirmed += 1
                continue
            self._host.core.quarantine(request.namespace, page)
            self._host.arena.headers.quarantine(ref, key)
            count += 1
            _log.error("bytes of a page are wrong, its slot is not used any more", key=key.hex(), slot=str(ref[:3]))
        return messages.Done(count)

    def _commit(self, owner: int, request: messages.Commit) -> messages.Done:
        done = self._host.core.commit(owner, request.reservation, request.positions)
        self._host.published(done, _checksums(request, done.positions), PageFlag(0))
        self._host.carrier.committed(self._host.core.find_namespace(done.namespace), done.pages)
        return messages.Done(len(done.pages))


def _checksums(request: messages.Commit, positions: list[int]) -> list[int] | None:
    """The checksums of the pages at ``positions``, in their order; None where the writer sent none."""
    if not request.checksums or request.positions is None:
        return None
    told = np.frombuffer(request.checksums, dtype="<u4").tolist()
    by_position = dict(zip(request.positions, told, strict=True))
    return [by_position[position] for position in positions]
