"""Heads of packs whose pages have no bytes, for tests of what is known of packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ems.pool.keys import Tail
from ems.pool.tiers.pack_format import RECORD, Head, build_head, pack_name
from ems.pool.tiers.pack_seal import SealKeys
from tests.kit.tiers import KEYS


def packed(
    pages: Sequence[tuple[bytes, bytes]],
    *,
    namespace: str = "t/m/l",
    size: int = 10,
    tails: Mapping[int, Tail] | None = None,
    keys: SealKeys = KEYS,
) -> Head:
    """The head of a pack of ``pages``, of which key and parent are given."""
    seal = keys.pack(namespace)
    assert seal is not None
    rows = [(key, parent, 0, size, 0, at, at, bytes(12), bytes(16)) for at, (key, parent) in enumerate(pages)]
    return build_head(namespace, size, 12.5, np.array(rows, dtype=RECORD), tails or {}, seal)


def named(namespace: str = "t/m/l") -> str:
    """What a pack of ``namespace`` may be called."""
    return pack_name(namespace, 12.5, "0" * 16)
