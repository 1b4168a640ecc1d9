"""Which loaded pages have their bytes checked against the checksum in their header.

A brain.  What always holds: a page from before the node's last start, or from a slower tier, is always checked; with
``always`` every page is; with ``sampled`` one in :data:`SAMPLE` of the others, which finds memory that goes bad after
a few loads and costs a twentieth.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ems.pool.layout import Header, PageFlag

LOOKED_AT_ONCE = 1 << 20
"""Bytes of a page that the node looks at in one step."""
SAMPLE = 16
"""Of so many pages that were stored in this life of the node one is checked when pages are sampled."""


_CHECKSUMMED, _FROM_BELOW = int(PageFlag.CHECKSUMMED), int(PageFlag.FROM_BELOW)
"""As plain numbers: flags of an enumeration cost a microsecond a page."""


class Verify(StrEnum):
    """When the bytes of a page are checked that was stored since the node started."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    NEVER = "never"


class Trust(msgspec.Struct, frozen=True):
    """What a node says about its pages: its policy, and the first stamp since it started."""

    policy: Verify = Verify.SAMPLED
    since: int = 0

    def due(self, header: Header, loaded: int) -> bool:
        """Whether the page of ``header`` is to be checked, the ``loaded``-th that is looked at."""
        flags = header.flags
        if not flags & _CHECKSUMMED:
            return False
        if header.stamp < self.since or flags & _FROM_BELOW:
            return True
        return self.policy is Verify.ALWAYS or (self.policy is Verify.SAMPLED and loaded % SAMPLE == 0)


def policy_named(name: str) -> Verify:
    """The policy that a node names; sampling where this release does not know it."""
    return Verify(name) if name in set(Verify) else Verify.SAMPLED
