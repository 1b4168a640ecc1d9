"""Which instances have computed which prefix, learned when requests are sent to them.

A prompt is cut into pieces of equal size, and each is named by a checksum over all up to its end, as engines name their
blocks.  What is remembered is only a hint, so 32 bits are enough: an engine that does not have a prefix computes it.

Memory is bounded by two generations.  What is learned or found goes into the younger; when that is full it becomes the
older, whose entries are forgotten unless they are met again.

What always holds: at most ``2 * capacity`` hashes are kept; an instance that was forgotten is never found again, its
number is given to another only after no entry can have it any more.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from awscrt.checksums import crc32c

PIECE_BYTES: Final = 256
"""Bytes of a prompt's JSON that are hashed together: about 64 tokens of text."""

PIECE_TOKENS: Final = 64
"""Token ids that are hashed together, at least: blocks of engines are often smaller."""

MOST_PIECES: Final = 1024
"""Pieces of a prompt that are looked at, from its beginning."""

CAPACITY: Final = 1 << 17
"""Hashes in a generation: about 25 MiB for both."""

MOST_FORGOTTEN: Final = 64
"""Instances that were forgotten, and whose numbers entries may have."""

_OF_TOKENS = crc32c(b"token ids")


def prefix_hashes(text: bytes, salt: bytes) -> list[int]:
    """Return a hash for each whole piece of ``text``, each over everything up to its end and over ``salt``."""
    value = crc32c(salt)
    hashes = []
    for end in range(PIECE_BYTES, min(len(text), MOST_PIECES * PIECE_BYTES) + 1, PIECE_BYTES):
        value = crc32c(text[end - PIECE_BYTES : end], value)
        hashes.append(value)
    return hashes


class Place(StrEnum):
    """Where blocks may be: in an engine's own cache, in the pool of its host, in the memory of a cluster."""

    ENGINE = "engine"
    HOST = "host"
    CLUSTER = "cluster"


def block_hashes(token_ids: Sequence[int], block_tokens: int, adapter: str, parent: int | None = None) -> list[int]:
    """Return a hash for each whole block of token ids, each over everything up to its end and over ``adapter``.

    ``parent`` is the hash of the block before the first one.  Blocks of any size that end with the same token have the
    same hash.

    :raises OverflowError: something that is no token id.
    """
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    text, size = ids.tobytes(), block_tokens * ids.itemsize
    value = crc32c(adapter.encode(), _OF_TOKENS) if parent is None else parent
    hashes = []
    for end in range(size, len(text) + 1, size):
        value = crc32c(text[end - size : end], value)
        hashes.append(value)
    return hashes


class PrefixIndex:
    """Sets of instances by hash, each a mask with one bit an instance."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._live = 0
        self._generation = 0
        self._free: list[tuple[int, int]] = []
        """Bits of forgotten instances, each with the generation from which on it may be given again."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self) -> int:
        """Return the bit of a new instance."""
        if len(self._free) >= MOST_FORGOTTEN and self._free[0][0] > self._generation:
            # Instances go more often than generations end, which take long where prompts are few or short.
            for names in (self._young, self._old):
                names.update({name: mask & self._live for name, mask in names.items()})
            self._free = [(self._generation, bit) for _, bit in self._free]
        if self._free and self._free[0][0] <= self._generation:
            bit = self._free.pop(0)[1]
        else:
            taken = self._live
            for _, free in self._free:
                taken |= free
            bit = 1 << taken.bit_length()
        self._live |= bit
        return bit

    def forget(self, bit: int) -> None:
        if self._live & bit:
            self._live &= ~bit
            self._free.append((self._generation + 2, bit))

    def learn(self, hashes: Iterable[int], bit: int) -> None:
        """Note that an instance has, or will soon have, all pieces of a prompt."""
        if not self._live & bit:
            return
        young, old, live = self._young, self._old, self._live
        for name in hashes:
            known = young.get(name)
            if known is None:
                known = old.get(name, 0)
            young[name] = (known & live) | bit
            if len(young) >= self._capacity:
                self._generation += 1
                self._old, self._young = young, {}
                young, old = self._young, self._old

    def unlearned(self, hashes: Sequence[int], bit: int) -> Sequence[int]:
        """Return the pieces of a prompt, from the first on, that an instance was not noted for in this generation."""
        young = self._young
        return hashes[bisect_left(hashes, 1, key=lambda name: not young.get(name, 0) & bit) :]

    def unlearn(self, hashes: Iterable[int], bit: int) -> None:
        """Note that an instance does not have these pieces any more."""
        for names in (self._young, self._old):
            for name in hashes:
                mask = names.get(name, 0)
                if mask == bit:
                    del names[name]
                elif mask & bit:
                    names[name] = mask & ~bit

    def matched(self, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Return how many pieces instances have from the beginning on: pairs of a count and a mask, the most last.

        Instances that have none are in no mask.
        """
        young, old = self._young, self._old
        have = self._live
        found = []
        count = 0
        for name in hashes:
            mask = young.get(name)
            if mask is None:
                mask = old.get(name, 0)
            here = have & mask
            if here != have:
                if count:
                    found.append((count, have & ~here))
                have = here
                if not have:
                    return found
            count += 1
        if count and have:
            found.append((count, have))
        return found
