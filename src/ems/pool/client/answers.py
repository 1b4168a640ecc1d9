"""What a client names and is given, as plain data: brains may hold it."""

from __future__ import annotations

import msgspec

from ems.pool.layout import PageRef, unpack_refs
from ems.pool.protocol.messages import ChangeRun
from ems.pool.reasons.words import Reason


class Namespace(msgspec.Struct, frozen=True):
    """A namespace as a caller names it: its full name and the bytes of one page."""

    name: str
    page_size: int


class Lease(msgspec.Struct, frozen=True):
    """The promise of the node ``node``, made on the connection ``epoch``, that pages stay where they are."""

    node: str
    epoch: int
    number: int
    packed_refs: bytes

    @property
    def refs(self) -> list[PageRef]:
        return unpack_refs(self.packed_refs)


class Hits(msgspec.Struct, frozen=True):
    """Answer to a lookup: leading pages present, pages after these present or being written, a lease if asked for.

    ``reason`` says why the first missing page is missing, as far as the node tells.  ``below`` of the pages
    that follow come up from tiers below memory: look again in a moment.
    """

    count: int
    pending: int
    lease: Lease | None
    reason: Reason | None = None
    below: int = 0


class TailHit(msgspec.Struct, frozen=True):
    """Answer to a lookup of a tail: ``tokens`` that a page shares, its key, whether more is being written, a lease.

    ``below`` says that a page that shares more comes up from a tier below memory.
    """

    tokens: int
    key: bytes
    pending: bool
    lease: Lease | None
    below: bool = False


NO_TAIL = TailHit(0, b"", pending=False, lease=None)


class PageLocation(msgspec.Struct, frozen=True):
    """How far a client has read of a node's changes."""

    node: str
    sequence: int


class PoolChanges(msgspec.Struct, frozen=True):
    """Changes up to ``place``; with ``lost`` there were others: the node forgot some, or was started again.

    A run's ``namespace`` is a position in the list that was asked for.
    """

    place: PageLocation
    lost: bool
    runs: tuple[ChangeRun, ...]


class Reservation(msgspec.Struct, frozen=True):
    """Slots promised to a writer: ``granted`` maps the position of a key to its slot, ``outcomes`` has all keys."""

    epoch: int
    number: int
    outcomes: bytes
    granted: dict[int, PageRef]


class Announcement(msgspec.Struct, frozen=True):
    """What was announced on the connection ``epoch``; see :meth:`~ems.pool.client.pool_client.PoolClient.announce`."""

    epoch: int
    number: int
