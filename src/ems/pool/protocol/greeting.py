"""What both sides settle when they greet: the version that is spoken, the features of each, the sizes of proofs."""

from __future__ import annotations

from ems.errors import VersionMismatch

OLDEST_VERSION = 1
NEWEST_VERSION = 1
GREETING_SECONDS = 5.0
"""How long a client may take to greet."""
FRAME_SECONDS = 10.0
"""How long a client may take to send a frame that it has begun."""

TELLS_CHANGES = "changes"
"""Feature of a node that answers :class:`Changes`."""
RESTARTS = "restarts"
"""Feature of a node that restarts as another release when an administrator asks for it."""
KEEPS_CHECKSUMS = "checksums"
"""Feature of a node that takes checksums with :class:`Commit`, and answers :class:`Corrupt`."""
DOES_ACTS = "administration"
"""Feature of a node that answers :class:`Administer`."""
TELLS_REASONS = "reasons"
"""Feature of both sides: misses have a reason (:attr:`Hits.code`), lookups may name their request
(:attr:`Lookup.request`), and the node answers :class:`Describe`, :class:`Miss` and :class:`Explain`."""
TELLS_TIERS = "tiers"
"""Feature of both sides: lookups may say what computing takes (:attr:`Lookup.compute`) and are told what tiers below
memory bring (:attr:`Hits.below`), and the node answers :class:`Prefetch`."""
SERVES_TENANTS = "tenants"
"""Feature of a node that knows its clients' tenant."""
ADMINISTERS = "admin"
"""Feature that a client wishes for who is to look after a node, not to store and load; of the node's own user only."""
TAKES_ANNOUNCEMENTS = "announcements"
"""Feature of a node that takes :class:`Announce` and :class:`Withdraw`."""

AWAITS_WRITERS = "writers"
"""Feature of a node that gives slots of a writer that was cut off to nobody before it stopped: it takes
:class:`StillWriting`."""
LISTS_TAILS = "tails"
"""Feature of a node that takes tails of more than the last key with :class:`Reserve`."""
NAMES_USER = "user"
"""Feature of a client that knows :attr:`Challenge.user`."""

NONCE_BYTES = 16
"""Bytes of the random number with which each side makes a greeting its own."""
PROOF_BYTES = 32


def negotiate(oldest: int, newest: int) -> int:
    """The newest protocol version that a client speaking ``oldest`` to ``newest`` shares with this side."""
    version = min(newest, NEWEST_VERSION)
    if version < max(oldest, OLDEST_VERSION):
        raise VersionMismatch(
            f"the client speaks protocol versions {oldest} to {newest}, this node {OLDEST_VERSION} to "
            f"{NEWEST_VERSION}; install the same release of EMS on both sides"
        )
    return version
