"""Pages made smaller for slow tiers: bytes of equal weight side by side, then zstd; kept only where that pays.

KV state is floating-point numbers whose exponents repeat and whose mantissas do not: sorted by byte, half of the data
compresses.  What always holds: :func:`expand` gives back exactly the bytes that were compressed or says no.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from importlib.util import find_spec
from typing import Any

from ems.errors import ConfigError

LEAST_SAVED = 0.1
"""Share that compression must save to be worth its time when the page is read."""
LEVEL = 1
_SIZES = struct.Struct("<4xI4xI")
"""Bytes before and after, in the header of a compressed buffer (format of Blosc 1)."""
SKIPS = 15
"""Pages that are not tried after one that did not pay."""


class Codec(IntEnum):
    """How the stored bytes of a page are made from its own."""

    RAW = 0
    SHUFFLED_ZSTD = 1


def _blosc() -> Any:
    from numcodecs import blosc

    # Several threads compress at once; the library's own pool would let them wait for each other.
    blosc.use_threads = False
    return blosc


class Compressor:
    """Compresses pages of values of ``element`` bytes; gives up for a while where it does not pay.

    Raises ConfigError: the library is not installed.
    """

    def __init__(self, element: int) -> None:
        if find_spec("numcodecs") is None:
            raise ConfigError("compress=zstd needs the package numcodecs: pip install 'ems-kv[tiers]'")
        self._blosc = _blosc()
        self._element = element
        self._skips: dict[str, int] = {}

    def compress(self, namespace: str, page: memoryview) -> bytes | None:
        """The stored form of ``page``; None where it should be kept as it is."""
        skips = self._skips.get(namespace, 0)
        if skips:
            self._skips[namespace] = skips - 1
            return None
        small: bytes = self._blosc.compress(page, b"zstd", LEVEL, self._blosc.SHUFFLE, typesize=self._element)
        if len(small) > (1 - LEAST_SAVED) * len(page):
            self._skips[namespace] = SKIPS
            return None
        return small


def expand(codec: int, stored: bytes | bytearray | memoryview, into: memoryview) -> bool:
    """Fill ``into`` from ``stored``, whose checksum was right; False when that cannot be."""
    if codec == Codec.RAW:
        if len(stored) != len(into):
            return False
        into[:] = stored
        return True
    if codec != Codec.SHUFFLED_ZSTD or find_spec("numcodecs") is None:
        return False
    blosc = _blosc()
    try:
        size, packed = _SIZES.unpack_from(stored)
        if size != len(into) or packed != len(stored):
            return False
        blosc.decompress(stored, into)
    except (RuntimeError, ValueError, struct.error):
        return False
    return True
