"""Changes as they travel: which pages became readable or left, in runs of one kind."""

from __future__ import annotations

import msgspec

FROM_NOW = -1
"""Where a client begins that wants to know of nothing before."""


class ChangeRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Changes of one kind in a row: pages of ``keys`` were stored, or removed.

    ``namespace`` is a position in the list of those that were asked for: a name a run would be too much.
    """

    namespace: int
    stored: bool
    keys: bytes
