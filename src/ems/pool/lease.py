"""A reader's promise as it is carried around: plain data, so that brains may hold it."""

from __future__ import annotations

import msgspec

from ems.pool.layout import PageRef, unpack_refs


class Lease(msgspec.Struct, frozen=True):
    """The promise of the node ``node``, made on the connection ``epoch``, that pages stay where they are."""

    node: str
    epoch: int
    number: int
    packed_refs: bytes

    @property
    def refs(self) -> list[PageRef]:
        """Where the pages lie, in the order of their keys."""
        return unpack_refs(self.packed_refs)
