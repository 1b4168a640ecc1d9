"""What a place must offer so that packs can be kept in it: named pieces of bytes, written once and whole.

The wall between :mod:`ems.pool.tiers.packs` and its places.  What always holds: a blob is visible only when it is
whole, under its name, with nothing of another; a name is used once; who reads a blob that is being removed gets its
bytes or :class:`Gone`, never others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec


class Gone(Exception):
    """There is no blob of that name, or no longer."""


class Blob(msgspec.Struct, frozen=True):
    """A blob as it is listed: ``modified`` is when it was written or touched, in seconds since 1970."""

    name: str
    size: int
    modified: float
    refused: str = ""
    """Why nobody should believe it: others than the nodes could write it, or it is no file.  It cannot be read."""


class Blobs(Protocol):
    """A place for blobs.  Every call may block; :class:`~ems.errors.TierFailed` says that the place does not work."""

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write ``parts``, one after the other, as the blob ``name``; one that exists is replaced as a whole."""

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        """Fill ``into``, one after the other, from ``offset`` on; how many bytes there were.

        Raises Gone: there is no such blob.
        """

    def blobs(self) -> Iterable[Blob]:
        """All blobs, in any order, without what is not yet whole."""

    def move(self, name: str, new: str) -> None:
        """Give a blob another name.  Raises Gone: there is no such blob."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove blobs; those that are gone are no error."""

    def touch(self, name: str) -> None:
        """The blob was used now; where a place cannot note that, nothing happens."""

    def sweep(self, older: float) -> int:
        """Remove what writers that died left before the time ``older``; how many pieces."""

    def room(self) -> int | None:
        """Bytes that are free in the place; None where it has no end."""


def read_part(blobs: Blobs, name: str, offset: int, count: int) -> bytes:
    """At most ``count`` bytes of a blob, from ``offset`` on.  Raises Gone: there is none of that name."""
    found = bytearray(count)
    return bytes(memoryview(found)[: blobs.read(name, offset, [memoryview(found)])])


def read_whole(blobs: Blobs, name: str, most: int = 1 << 30) -> bytes:
    """All bytes of a blob, at most ``most``.  Raises Gone: there is none of that name."""
    found = bytearray()
    step = 1 << 20
    while len(found) < most:
        piece = bytearray(step)
        count = blobs.read(name, len(found), [memoryview(piece)])
        found += piece[:count]
        if count < step:
            break
    return bytes(found)
