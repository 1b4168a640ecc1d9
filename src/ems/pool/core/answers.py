"""What the core answers: what was promised, published and found, and what it has counted."""

from __future__ import annotations

import msgspec

from ems.pool.pages import Assigned, Outcome, Page


class Begun(msgspec.Struct, frozen=True):
    """A reservation of which more is to come: its number, how many keys it has so far, why no more can be granted."""

    reservation: int = 0
    count: int = 0
    refusal: Outcome | None = None


class Reserved(msgspec.Struct, frozen=True):
    """Answer to a reservation: one outcome a key, and the granted pages in the order of their keys."""

    reservation: int
    outcomes: bytes
    granted: list[Page]
    assigned: list[Assigned]
    page_size: int


class Committed(msgspec.Struct, frozen=True):
    """Answer to a commit: the pages in the order of their blocks, their positions, and where they belong."""

    pages: list[Page]
    positions: list[int]
    namespace: str
    page_size: int


class Found(msgspec.Struct, frozen=True):
    """Answer to a lookup: the leading present pages, how many keys follow being written or present, a lease.

    ``code`` says why the first missing key is missing, see :class:`ems.pool.reasons.words.Reason`.
    """

    pages: list[Page]
    pending: int
    lease: int
    code: int = 0
    refs: bytes = b""
    """Where the pages lie that are leased."""


class Counters(msgspec.Struct):
    """What happened since the node started."""

    lookups: int = 0
    keys_looked_up: int = 0
    keys_hit: int = 0
    tails_hit: int = 0
    pages_committed: int = 0
    pages_aborted: int = 0
    refused_no_space: int = 0
    refused_not_touched: int = 0
    refused_draining: int = 0
    already_present: int = 0
    already_writing: int = 0
    leases_lost: int = 0
    reservations_lost: int = 0
    reservations_expired: int = 0
    refused_share: int = 0
    pages_corrupt: int = 0
    corrupt_unconfirmed: int = 0


def packed_refs(pages: list[Page]) -> bytes:
    """Where ``pages`` lie, in the form that travels."""
    return b"".join([page.ref for page in pages])
