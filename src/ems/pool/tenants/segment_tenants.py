"""Whose pages each segment has held, in a file that no tenant can reach.

Segments say so themselves, but their tenant can write into them.  What always holds: the file knows of a tenant before
the tenant can map the segment; it is in shared memory, as the segments are, so writing it blocks nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ems.pool.segments.side_file import read_side_file, write_side_file

_Owners = dict[int, str]


class SegmentTenants:
    """The file ``path``; one that cannot be read knows of nobody."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: _Owners = {}
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            self._known = msgspec.msgpack.decode(read_side_file(path) or b"\x80", type=_Owners)

    @property
    def by_segment(self) -> Mapping[int, str]:
        return self._known

    def put(self, segment: int, tenant: str) -> None:
        """The memory of ``segment`` is ``tenant``'s, or nobody's where that is empty.

        Raises:
            OSError: the file cannot be written.
        """
        if self._known.get(segment, "") == tenant:
            return
        known = {**self._known, segment: tenant}
        if not tenant:
            del known[segment]
        write_side_file(self._path, msgspec.msgpack.encode(known))
        self._known = known
