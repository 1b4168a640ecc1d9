"""Whose pages each segment has held, in a file that no tenant can reach.

Segments say so themselves, but their tenant can write into them.  What always holds: the file knows of a tenant before
the tenant can map the segment; it is in shared memory, as the segments are, so writing it blocks nobody.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

_Owners = dict[int, str]


class Owners:
    """The file ``path``; one that cannot be read knows of nobody."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: _Owners = {}
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._known = msgspec.msgpack.decode(path.read_bytes(), type=_Owners)

    @property
    def by_segment(self) -> Mapping[int, str]:
        """The tenants by segment; a segment that is not there has held no tenant's pages."""
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
        new = self._path.with_name(f"{self._path.name}.new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.msgpack.encode(known))
        new.replace(self._path)
        self._known = known
