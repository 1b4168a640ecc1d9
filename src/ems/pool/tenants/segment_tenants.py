"""Whose pages each segment has held, in a file that no tenant can reach.

Segments say so themselves, but their tenant can write into them.  What always holds: the file knows of a tenant before
the tenant can map the segment; it is in shared memory, as the segments are, so writing it blocks nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ems.pool.segments.side_file import SideFile


class SegmentTenants:
    """The file ``path``; one that cannot be read knows of nobody."""

    def __init__(self, path: Path) -> None:
        self._file = SideFile(path, dict[int, str])

    @property
    def by_segment(self) -> Mapping[int, str]:
        return self._file.value

    def put(self, segment: int, tenant: str) -> None:
        """The memory of ``segment`` is ``tenant``'s, or nobody's where that is empty.

        Raises:
            OSError: the file cannot be written.
        """
        others = {number: name for number, name in self.by_segment.items() if number != segment}
        self._file.replace({**others, segment: tenant} if tenant else others)
