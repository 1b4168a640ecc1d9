"""Which segments a running pool gave up when it was made smaller, in a file beside them, so that it stays smaller.

Their files stay, because a gap in their numbers would cost the segments behind it.  What always holds: a segment is in
the file only when its memory was given back, and out of it before anything is put into it again; a file that cannot be
read knows of none, and the pool is then as large as its files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

from ems.pool.segments.side_file import read_side_file, write_side_file


def lay_out(found: int, gone: AbstractSet[int], wanted: int) -> tuple[int, set[int]]:
    """How many of ``found`` segments a pool of ``wanted`` ones goes on with, and which of these stay given up.

    ``gone`` were given up, and come back, the first ones first, where more are wanted than the others.
    """
    before = sorted(number for number in gone if number < found)
    stay = set(before[max(wanted - (found - len(before)), 0) :])
    if wanted >= found - len(stay):
        return max(found, wanted) if not stay else found, stay
    live = [number for number in range(found) if number not in stay]
    count = live[wanted - 1] + 1
    return count, {number for number in stay if number < count}


class GivenUp:
    """The file ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.segments: frozenset[int] = frozenset()
        with contextlib.suppress(msgspec.MsgspecError):
            self.segments = frozenset(msgspec.json.decode(read_side_file(path) or b"[]", type=list[int]))

    def put(self, segment: int, *, gone: bool) -> None:
        """The memory of ``segment`` was given back, or it is about to be used again.

        Raises:
            OSError: the file cannot be written.
        """
        self.replace(self.segments | {segment} if gone else self.segments - {segment})

    def replace(self, segments: AbstractSet[int]) -> None:
        """Exactly ``segments`` are given up.

        Raises:
            OSError: the file cannot be written.
        """
        if segments == self.segments:
            return
        write_side_file(self._path, msgspec.json.encode(sorted(segments)))
        self.segments = frozenset(segments)
