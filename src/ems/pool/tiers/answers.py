"""What a tier below memory is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import msgspec

from ems.pool.keys import Tail
from ems.pool.reasons.words import Reason


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


Waking = Callable[[Callable[[], None]], None]
"""Has what it is given called once, later: when that has come which is waited for, or its time is over."""


class Asking(msgspec.Struct, frozen=True):
    """Who wants pages of tiers, and how."""

    party: str = ""
    """Whose turn it is to ask: a tenant's, or on an open node a user's."""
    computing: float = 0.0
    """How many seconds a page takes to be computed again (0: not known)."""
    local_only: bool = False
    """Whether nothing is to come over a network for it."""
    directories: bytes = b""
    """Where a tail will be looked up next, as :func:`~ems.pool.keys.directories_of` has it."""


class Below(NamedTuple):
    """How many keys come up from tiers without a gap; ``asked``: perhaps, for a tier has not said yet what it has."""

    keys: int
    asked: bool


class Unknown(NamedTuple):
    """What is to be asked for, from now on under way."""

    maybe: int
    """How many leading keys may turn out to be there."""
    keys: list[bytes]
    directories: list[bytes]
    """Those of ``keys``, and last the one behind all that may be there; empty where none are known."""


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

    ``left`` packs of the namespace stay, because this node does not understand them; ``note`` is what else is to be
    said.
    """

    pages: int = 0
    bytes: int = 0
    more: bool = False
    left: int = 0
    note: str = ""


class KeyRun(msgspec.Struct, frozen=True):
    """Keys of consecutive blocks; the first comes after the block ``parent``."""

    parent: bytes
    keys: list[bytes]


# What tiers add to the reasons for a miss: a page that one of them has is not simply gone


_GONE = frozenset({Reason.NEVER_STORED.code, *(one.code for one in Reason if one.name.startswith("EVICTED"))})
"""What is not here may be elsewhere."""


class Known(Protocol):
    """What is to be known of a tier."""

    @property
    def reads(self) -> bool: ...

    @property
    def remote(self) -> bool: ...

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` it has, as far as it knows at this moment; never waits."""


def why(
    tiers: Sequence[Known], namespace: str, key: bytes, code: int, *, promoting: bool, local_only: bool = False
) -> int:
    """Why ``key`` is missing, where memory says ``code``, with what tiers know of it.

    With ``promoting`` it is on its way up; ``local_only`` is the lookup's.
    """
    if promoting:
        return Reason.LOWER_TIER.code
    holders = [tier for tier in tiers if tier.holds(namespace, [key]) and not (local_only and tier.remote)]
    if not holders:
        return _elsewhere(tiers, code, local_only=local_only, asked=True)
    # A tier that works and has it was not asked, because computing is quicker.
    return (Reason.DEAR if any(tier.reads for tier in holders) else Reason.TIER_OFFLINE).code


def _elsewhere(tiers: Sequence[Known], code: int, *, local_only: bool, asked: bool) -> int:
    """``code`` of what no tier is known to have: where others were not ``asked`` they may have what is gone here."""
    remote = [tier for tier in tiers if tier.remote] if code in _GONE else []
    if any(tier.reads for tier in remote):
        return Reason.LOCAL_ONLY.code if local_only else code if asked else Reason.NOT_ASKED.code
    return Reason.TIER_OFFLINE.code if remote and not local_only else code


def revised(
    tiers: Sequence[Known], namespace: str, keys: Sequence[bytes], codes: bytes, *, local_only: bool = False
) -> bytes:
    """``codes`` of ``keys`` (0: in memory), with what tiers have in place of what only memory knows; asks nobody."""
    revised_codes, kept = bytearray(codes), {0, Reason.GAP.code, Reason.BEING_WRITTEN.code}
    asked = [tier for tier in tiers if not (local_only and tier.remote)]
    for at, key in enumerate(keys) if tiers else ():
        holder = None if codes[at] in kept else next((tier for tier in asked if tier.holds(namespace, [key])), None)
        if holder is not None:
            revised_codes[at] = (Reason.LOWER_TIER if holder.reads else Reason.TIER_OFFLINE).code
        else:
            revised_codes[at] = _elsewhere(tiers, codes[at], local_only=local_only, asked=False)
    return bytes(revised_codes)
