"""A page as all rooms of the pool know it, and what becomes of keys and segments when slots are reserved.

Data types only: what happens to them is decided in :mod:`ems.pool.core`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import IntEnum
from typing import Any, Literal

import msgspec

from ems.pool.keys import Tail
from ems.pool.layout import Geometry, PageRef

ClusterWrite = Literal["", "never", "on_save", "on_second_use", "on_evict"]
"""When a page is written to a cluster, as its writer wishes; empty: as the node does with others."""


class Outcome(IntEnum):
    """What became of one key of a reservation."""

    GRANTED = 0
    PRESENT = 1
    WRITING = 2
    NO_SPACE = 3
    NOT_TOUCHED = 4
    OVER_SHARE = 5
    """Its writer, or all of its tenant's, hold as many pages that are not committed as they may."""


STORED = frozenset({Outcome.GRANTED, Outcome.PRESENT, Outcome.WRITING})
"""Outcomes of pages that are in the pool or on their way there."""


class Assigned(msgspec.Struct, frozen=True):
    """Effect: segment ``segment`` is now carved for ``namespace`` as ``geometry``; describe it.

    Its slots begin with the generation ``generation``.  With ``renewed`` its memory is to be replaced before: it is
    another tenant's, or somebody may still write into it.
    """

    segment: int
    namespace: str
    geometry: Geometry
    generation: int
    renewed: bool = False


class Page:
    """One page: where it lies, who holds it, and what the policy of its namespace notes on it.

    ``ref`` says where the page lies in the form that travels (a packed :class:`PageRef`).  ``leases`` counts readers
    that were promised the page, ``suffixes`` are the pages whose prefix it is: none, one, or a set of several; the page
    may not be evicted while there is any of either.  ``uses``, ``place``, ``older`` and ``newer`` are the policy's.
    """

    __slots__ = (
        "cluster_write", "key", "leases", "newer", "older", "parent", "place", "present", "ref", "suffixes", "tail",
        "untold", "used", "uses",
    )  # fmt: skip

    def __init__(self, key: bytes, ref: bytes) -> None:
        self.key = key
        self.ref = ref
        self.present = False
        self.leases = 0
        self.suffixes: Page | set[Page] | None = None
        self.parent: Page | None = None
        self.older: Page | None = None
        self.newer: Page | None = None
        self.place: Any = None
        self.uses = 0
        self.tail: Tail | None = None
        self.cluster_write: ClusterWrite = ""
        self.untold = False
        """Whether engines of this host saved it, and other hosts were not told so."""
        self.used = 0.0
        """When it was stored or last promised to a reader."""

    @property
    def segment(self) -> int:
        return PageRef.unpack(self.ref).segment

    def children(self) -> Collection[Page]:
        suffixes = self.suffixes
        if suffixes is None:
            return ()
        return (suffixes,) if isinstance(suffixes, Page) else suffixes

    def hang_on(self, parent: Page) -> None:
        self.parent = parent
        if parent.suffixes is None:
            parent.suffixes = self
        elif isinstance(parent.suffixes, Page):
            parent.suffixes = {parent.suffixes, self}
        else:
            parent.suffixes.add(self)

    def let_go(self, parent: Page) -> None:
        self.parent = None
        suffixes = parent.suffixes
        if not isinstance(suffixes, set):
            parent.suffixes = None
            return
        suffixes.remove(self)
        if len(suffixes) == 1:
            parent.suffixes = suffixes.pop()

    def ancestors(self) -> Iterator[Page]:
        page = self.parent
        while page is not None:
            yield page
            page = page.parent


def packed_refs(pages: Sequence[Page]) -> bytes:
    """Where ``pages`` lie, in the form that travels."""
    return b"".join([page.ref for page in pages])
