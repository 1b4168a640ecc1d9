"""What both sides settle when they greet: the version that is spoken, and the sizes of proofs."""

from __future__ import annotations

from ems.errors import VersionMismatch

OLDEST_VERSION = 1
NEWEST_VERSION = 1
GREETING_SECONDS = 5.0
"""How long a client may take to greet."""
FRAME_SECONDS = 10.0
"""How long a client may take to send a frame that it has begun."""

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
