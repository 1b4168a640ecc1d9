"""What a client names and is given, as plain data: brains may hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from ems.pool.layout import PageRef, unpack_refs
from ems.pool.protocol.messages import ChangeRun
from ems.pool.reasons.words import Reason


class Namespace(msgspec.Struct, frozen=True):
    """A namespace as a caller names it: its full name and the bytes of one page."""

    name: str
    page_size: int


class LookupHints(msgspec.Struct, frozen=True):
    """What a node takes into account when keys are looked up."""

    request: str = ""
    """The engine's id of what it is for, by which the node can be asked about it later."""
    compute: float = 0.0
    """How many seconds a page takes to be computed again, 0 when that is not known."""
    patience: float = 0.0
    """How many seconds the node may wait for tiers that have to be asked what they have."""
    directories: bytes = b""
    """Directories where a tail may be looked for next: those of the chunks of the keys, and of the one behind them."""


NO_HINTS = LookupHints()


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


@dataclass(frozen=True)
class Reservation:
    """Slots promised to a writer: ``outcomes`` has all keys, ``packed_refs`` the slots of those that were granted."""

    epoch: int
    number: int
    outcomes: bytes
    packed_refs: bytes

    @cached_property
    def positions(self) -> list[int]:
        """Of the keys that were granted, in their order."""
        return [position for position, outcome in enumerate(self.outcomes) if outcome == 0]

    @cached_property
    def granted(self) -> dict[int, PageRef]:
        """Their slots by their positions."""
        return dict(zip(self.positions, unpack_refs(self.packed_refs), strict=True))

    def refs(self, positions: Sequence[int]) -> bytes:
        """The slots at ``positions`` that were granted, in the form that travels."""
        if positions == self.positions:
            return self.packed_refs
        return b"".join([self.granted[position].pack() for position in positions])


class Announcement(msgspec.Struct, frozen=True):
    """What was announced on the connection ``epoch``; see :meth:`~ems.pool.client.pool_client.PoolClient.announce`."""

    epoch: int
    number: int
