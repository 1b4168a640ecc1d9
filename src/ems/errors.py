"""Every error that EMS raises on purpose, as one small tree.

Each message is one sentence for a person: what is wrong, what was expected, what to do.  Errors that
may pass by themselves answer ``True`` to :attr:`EmsError.transient`, so callers need no list of types.
"""

from __future__ import annotations

from typing import ClassVar


class EmsError(Exception):
    """Root of the tree; never raised itself."""

    transient: ClassVar[bool] = False
    """Whether the same call may succeed later without anybody changing anything."""


class ConfigError(EmsError, ValueError):
    """A setting is wrong: a flag, a file, an environment variable, an argument."""


class ProtocolError(EmsError, ValueError):
    """Bytes on a socket that are not a message of the protocol, or a message at the wrong time."""


class PoolError(EmsError):
    """The pool did not do what it was asked."""


class PoolUnavailable(PoolError, ConnectionError):
    """No node answers on the socket."""

    transient = True


class PoolRestarting(PoolUnavailable):
    """The node restarts for an upgrade, and takes in nothing new until it is back."""


class PoolNotTried(PoolUnavailable):
    """The client is still backing off from an earlier failure.  This says nothing new about the node."""


class PoolTimeout(PoolError, TimeoutError):
    """The node did not answer before the call's deadline."""

    transient = True


class PoolRefused(PoolError):
    """The node understood the request and refused it."""


class Unauthorised(PoolRefused, PermissionError):
    """The node does not accept these credentials."""


class VersionMismatch(PoolRefused):
    """Client and node have no protocol version in common."""


class QuotaExceeded(PoolRefused):
    """The tenant's quota does not allow what it asked for; an administrator can raise it."""


class NoSpace(PoolRefused):
    """The pool has no room for the page, for now (all is leased) or for ever (it is larger than a segment)."""


class TierFailed(PoolError):
    """A tier below memory as a whole did not do what it was asked; says nothing about a single page."""

    transient = True


class StaleReference(PoolError):
    """The lease, the reservation or the page was valid once and is no longer."""
