"""A node in virtual time, above a tier that brings blocks up one by one: the brain is real, the wire is not there."""

from __future__ import annotations

from ems.bench.trace.replay import pool_of
from ems.errors import PoolUnavailable
from ems.pool.client.answers import Announcement, Hits, Lease, LookupHints, Namespace, TailHit
from ems.pool.keys import NO_PARENT, Tail, split_keys
from ems.pool.reasons.words import Reason

ENGINE, WRITER, TIER = 1, 2, 3


class SteppedNode:
    """What a client of a node sees; ``rate`` blocks a second come up, in the order in which they were asked for."""

    def __init__(self, capacity: int, rate: float = 10.0) -> None:
        self.core, self.namespace = pool_of(capacity, "lru")
        self.rate = rate
        self.knows_its_speed = True
        """Whether it leaves alone what is computed faster than it comes up."""
        self.below: set[bytes] = set()
        self.coming: list[tuple[float, bytes, bytes]] = []
        self.now = 0.0
        self.node, self.epoch, self.up = "a", 1, True
        self.calls = self.brought = 0

    # Time

    def advance(self, now: float) -> None:
        """It is ``now``: what has come up is in memory."""
        self.now = now
        self.core.tick(now)
        while self.coming and self.coming[0][0] <= now:
            _, parent, key = self.coming.pop(0)
            self._store(TIER, parent, [key])
            self.brought += 1

    def _store(self, client_id: int, parent: bytes, keys: list[bytes]) -> None:
        reserved = self.core.writing.reserve(client_id, self.namespace, parent, keys)
        if reserved.granted:
            self.core.writing.commit(client_id, reserved.reservation)

    def store(self, keys: list[bytes]) -> None:
        """Some engine stores ``keys``."""
        self._store(WRITER, bytes(NO_PARENT), keys)

    def end(self) -> None:
        """The node ends, and with it what was promised."""
        self.core.disconnect(ENGINE, self.now, alive=False)
        self.up, self.epoch = False, 0

    def begin(self) -> None:
        """Another process is the node, with the pages that there were."""
        self.up, self.node = True, "b"

    # What a client calls

    def _call(self) -> None:
        self.calls += 1
        if not self.up:
            raise PoolUnavailable("no pool node answers")
        self.epoch = self.epoch or 2

    def notice(self) -> None:
        pass

    def _bring(self, keys: list[bytes], compute: float = 0.0) -> int:
        on_the_way = {key for _, _, key in self.coming}
        count = 0
        for at, key in enumerate(keys):
            known = self.core.page(self.namespace, key) is not None or key in on_the_way
            if not known:
                if key not in self.below or (self.knows_its_speed and 0 < compute < 1 / self.rate):
                    break
                begin = max(self.now, self.coming[-1][0] if self.coming else 0.0)
                self.coming.append((begin + 1 / self.rate, keys[at - 1] if at else bytes(NO_PARENT), key))
            count += 1
        return count

    def lookup(self, _: Namespace, keys: bytes, *, lease: bool = False, timeout: float, hints: LookupHints) -> Hits:
        del timeout
        self._call()
        wanted = split_keys(keys)
        found = self.core.reading.lookup(ENGINE, self.namespace, wanted, lease=lease)
        count = len(found.pages)
        below = self._bring(wanted[count:], hints.compute)
        held = Lease(self.node, self.epoch, found.lease, found.refs) if found.lease else None
        return Hits(count, found.pending, held, Reason.of_code(found.code), below)

    def lookup_tail(
        self, _: Namespace, tail: Tail, *, lease: bool = False, timeout: float, shards: int, patience: float
    ) -> TailHit:
        del tail, lease, timeout, shards, patience
        return TailHit(0, b"", pending=False, lease=None)

    def prefetch(self, _: Namespace, keys: bytes, timeout: float) -> int:
        del timeout
        self._call()
        return self._bring(split_keys(keys))

    def announce(self, _: Namespace, keys: bytes, timeout: float) -> Announcement:
        del timeout
        self._call()
        self._bring(split_keys(keys))
        return Announcement(self.epoch, self.core.announce(ENGINE, self.namespace, split_keys(keys), self.now))

    def withdraw(self, announcement: Announcement) -> None:
        if announcement.epoch == self.epoch:
            self.core.announcements.withdraw(ENGINE, announcement.number)

    def release(self, lease: Lease) -> None:
        if lease.epoch == self.epoch:
            self.core.reading.release(ENGINE, lease.number)
