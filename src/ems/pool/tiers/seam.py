"""What every tier below memory must be able to do; the wall between the pool and its kinds.

What always holds: a page that a tier hands back has the bytes that were stored under its namespace and key, or its
outcome says why it has none; the first page stored under a key stays; whoever calls :meth:`Tier.holds`,
:meth:`Tier.find_tail`, :meth:`Tier.figures`, :meth:`Tier.namespaces` or :meth:`Tier.recent` never waits.
Everything else may block and is called on threads of its own, several at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import IntEnum
from typing import Any, Protocol

import msgspec

from ems.pool.keys import Tail


class Outcome(IntEnum):
    """What became of one page that was to be stored or loaded."""

    DONE = 0
    PRESENT = 1
    """To be stored, and there already."""
    MISSING = 2
    CORRUPT = 3
    """Its bytes or its header do not match their checksums."""
    WRONG_SIZE = 4
    WRONG_KEY = 5
    """It is encrypted, or would have to be, with a key that this node does not have."""
    NO_ROOM = 6
    """To be stored, and larger than all that the tier may take."""


class Stored(msgspec.Struct, frozen=True):
    """A page to be stored: its names and its bytes, which stay as they are until the call returns.

    With a ``checksum`` the bytes are held against it first: what is wrong in memory does not get into a tier.
    """

    key: bytes
    parent: bytes
    tail: Tail | None
    payload: memoryview
    checksum: int | None = None


class Wanted(msgspec.Struct, frozen=True):
    """A page to be loaded ``into`` memory of exactly its size; what is there after a failure is undefined."""

    key: bytes
    into: memoryview


class StoredTail(msgspec.Struct, frozen=True):
    """A page that is not full, as a tier knows it: its tokens, and the key of the block before."""

    tail: Tail
    parent: bytes


class Holding(msgspec.Struct, frozen=True):
    """What a tier has of one namespace: the bytes of a page, how many pages, and the bytes that these take there.

    ``idle_seconds`` is how long none of them was stored or loaded.
    """

    page_size: int
    pages: int
    bytes: int
    idle_seconds: float


class ForgetRequest(msgspec.Struct, frozen=True):
    """Pages that are to leave a tier: those of ``namespace`` that nobody stored or loaded for ``unused_for`` seconds.

    With 0 seconds that is all of them.  The keys ``spared`` stay, whatever their age.
    """

    namespace: str
    unused_for: float = 0.0
    spared: Collection[bytes] = frozenset()


class ForgetResult(msgspec.Struct, frozen=True):
    """What one call took out, or would take out; ``more`` says that there is more of it to be done.

    ``left`` packs of the namespace stay, because this node does not understand them.
    """

    pages: int = 0
    bytes: int = 0
    more: bool = False
    left: int = 0


class KeyRun(msgspec.Struct, frozen=True):
    """Keys of consecutive blocks; the first comes after the block ``parent``."""

    parent: bytes
    keys: list[bytes]


class Tier(Protocol):
    """One tier.  Calls that block raise :class:`~ems.errors.TierFailed` when the tier does not work as a whole."""

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` it has, as far as it knows at this moment."""

    def tails(self, namespace: str, keys: Sequence[bytes]) -> list[Tail | None]:
        """The tail of each page of ``keys`` that it has with one."""

    def find_tail(self, namespace: str, tail: Tail) -> StoredTail | None:
        """The stored tail of the same directory that shares most leading tokens with ``tail``."""

    def store(self, namespace: str, pages: Sequence[Stored]) -> list[Outcome]:
        """Keep ``pages``; blocks."""

    def load(self, namespace: str, wanted: Sequence[Wanted]) -> list[Outcome]:
        """Fetch ``wanted``; blocks."""

    def maintain(self, *, probe: bool = False) -> None:
        """Look what is there, make room, remove what is too old; with ``probe`` try only whether it works; blocks."""

    def figures(self) -> dict[str, Any]:
        """Plain figures for status and metrics."""

    def close(self) -> None:
        """Write down what the next start can use; blocks."""

    # For an administrator

    def namespaces(self) -> dict[str, Holding]:
        """What it has, by the name of each namespace that it has pages of."""

    def left_alone(self) -> set[str]:
        """The namespaces of which there are packs that this node does not understand, as far as these say so."""

    def recent(self, namespace: str) -> Iterator[KeyRun]:
        """All that it has of ``namespace``: what was used last comes first, a prefix before its suffix."""

    def forget(self, request: ForgetRequest, *, dry_run: bool = False) -> ForgetResult:
        """Take a portion of ``request`` out, bounded in time, or only count all of it; blocks.

        What is meant is not handed out any more from the first call on, but for what is stored in one piece with a
        spared page: that goes call by call, the last of it with the one that leaves no ``more``.  After a restart none
        of it is handed out either, unless the tier ended or failed before there was such a call.  A spared page can be
        loaded at any time.
        """
