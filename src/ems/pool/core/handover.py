"""What a node tells the one that takes its place while its clients stay connected.

Plain data.  Headers in the segments say which pages there are; this says all the rest: who holds what, in which order
pages were used, which bytes of a request came already.  A room of the pool that has state of its own adds a field at
the end of the structure that it belongs to, with a default that means "unknown", or an entry of ``extras``: a successor
of another release may lack it or send it unasked.
"""

from __future__ import annotations

from typing import Any

import msgspec

VERSION = 1
"""Changes when a node of an earlier release cannot make sense of a hand-over; see :class:`TakeOver`."""


class IndexState(msgspec.Struct, frozen=True):
    """The pages of a namespace: 16 bytes of ``keys`` and ``parents`` and 20 of ``refs`` each, one after the other.

    The first ``present`` of them can be read, in the order in which they would leave; the others are being written.
    ``missing`` pages (with their own parents) are the prefix of others and not here.
    """

    keys: bytes
    refs: bytes
    parents: bytes
    present: int
    missing: bytes
    missing_parents: bytes
    tails: list[tuple[bytes, bytes, bytes]]
    """Key of the page, directory and tokens."""
    uses: bytes = b""
    """How often each of the present pages was used, as far as the policy counts."""
    learned: bytes = b""
    """What the policy knows beside, in its own words; see :class:`~ems.pool.policy.seam.Learning`."""
    places: bytes = b""
    """Where each of the present pages stands in it."""


class NamespaceState(msgspec.Struct, frozen=True):
    """One namespace; its number is its place in the list of all."""

    name: str
    page_size: int
    last_used: float
    debt: int
    denied: bool
    index: IndexState
    pinned: dict[bytes, float] = {}


class SegmentState(msgspec.Struct, frozen=True):
    """One segment; ``owner`` is the number of a namespace or None, ``generations`` are 4 bytes a slot."""

    touched: int
    owner: int | None
    page_size: int
    offered: int
    used: int
    generations: bytes
    in_use: bool = True
    """Whether it has memory; otherwise it was given up."""


class ReservationState(msgspec.Struct, frozen=True):
    """Slots promised to a writer: keys of the pages that wait for their commit, by position."""

    number: int
    owner: int
    namespace: int
    waiting: dict[int, bytes]


class LeaseState(msgspec.Struct, frozen=True):
    """Pages promised to a reader, 16 bytes of ``keys`` each."""

    number: int
    owner: int
    namespace: int
    keys: bytes


class AnnouncementState(msgspec.Struct, frozen=True):
    """Pages that a request waits for until then, 16 bytes of ``keys`` each."""

    number: int
    owner: int
    namespace: int
    keys: bytes
    until: float


class ChangesState(msgspec.Struct, frozen=True):
    """What lately became readable or left."""

    changes: list[tuple[str, bool, bytes]]
    sequence: int
    asked_at: float | None


class ReasonsState(msgspec.Struct, frozen=True):
    """What is known about misses: the last departures as columns, descriptions by name, misses by code.

    ``cursor`` is where the next departure goes.
    """

    names: bytes
    codes: bytes
    times: bytes
    winners: bytes
    cursor: int
    layouts: dict[str, dict[str, str]]
    misses: list[int]


class CoreState(msgspec.Struct, frozen=True):
    """All that the brain of a node knows; times are those of the clock that the host's processes share."""

    now: float
    touching: bool
    segments: list[SegmentState]
    free: dict[int, bytes]
    namespaces: list[NamespaceState]
    reservations: list[ReservationState]
    leases: list[LeaseState]
    next_id: int
    limbo: dict[int, tuple[float, list[bytes]]]
    quarantined: list[bytes]
    counters: dict[str, int]
    evicted: int
    changes: ChangesState
    reasons: ReasonsState | None = None
    announcements: list[AnnouncementState] = []
    """The oldest first."""


class ArenaState(msgspec.Struct, frozen=True):
    """The segment files; their descriptors travel beside this."""

    sizes: list[int]
    header_ends: list[int]
    stamp: int
    carving: int


class QuestionState(msgspec.Struct, frozen=True):
    """A client that was asked for a proof: as whom it greeted and by which version, what it signs."""

    access_id: str
    version: int
    nonce: bytes
    salt: bytes
    iterations: int
    transcript: bytes


class ConnectionState(msgspec.Struct, frozen=True):
    """One client: ``received`` is the beginning of a request, ``unsent`` the rest of answers."""

    owner: int
    greeted: bool
    client: str
    received: bytes
    unsent: bytes
    features: list[str] = []
    question: QuestionState | None = None


class HandOver(msgspec.Struct, frozen=True):
    """All of a node.  Descriptors travel beside it: lock, listener, output, errors, HTTP if any, segments, clients."""

    release: str
    format: int
    node_id: bytes
    config: dict[str, Any]
    started: float
    trusted_from: int
    next_owner: int
    refused_connections: int
    resting: dict[int, int]
    """Processes whose slots rest, by owner."""
    http: bool
    arena: ArenaState
    core: CoreState
    connections: list[ConnectionState]
    extras: dict[str, Any] = {}
    """State of rooms that not every release has, by their names."""
