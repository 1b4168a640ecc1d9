"""Pages by name, for tests of tiers: the same bytes for the same name each time, stored and fetched in one line."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence

from ems.pool.keys import NO_PARENT
from ems.pool.tiers.pack_seal import SealKeys
from ems.pool.tiers.seam import ForgetRequest, ForgetResult, Outcome, Stored, Tier, Wanted

PAGE = 4096
NAMESPACE = "tenant/model/layout"
PATIENCE = 30.0
SECRET = b"a secret that all nodes of the tier have"
KEYS = SealKeys(SECRET, encrypts=False)


def key(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()[:16]


def page(name: object, size: int = PAGE) -> bytes:
    """The bytes of the page of ``name``: random, and the same each time."""
    return random.Random(str(name)).randbytes(size)


def chain(name: str, length: int, size: int = PAGE) -> list[Stored]:
    """Pages of consecutive blocks."""
    pages, parent = [], bytes(NO_PARENT)
    for block in range(length):
        name_of_block = f"{name}/{block}"
        pages.append(Stored(key(name_of_block), parent, None, memoryview(page(name_of_block, size))))
        parent = pages[-1].key
    return pages


def fetch(
    tier: Tier, keys: Sequence[bytes], namespace: str = NAMESPACE, size: int = PAGE
) -> list[tuple[Outcome, bytes]]:
    into = [memoryview(bytearray(size)) for _ in keys]
    outcomes = tier.load(namespace, [Wanted(one, where) for one, where in zip(keys, into, strict=True)])
    return [(outcome, bytes(where)) for outcome, where in zip(outcomes, into, strict=True)]


def forget(tier: Tier, meant: ForgetRequest) -> ForgetResult:
    """Take out all that is ``meant``; the sum of what the calls say."""
    pages = size = 0
    deadline = time.monotonic() + PATIENCE
    while True:
        gone = tier.forget(meant)
        pages, size = pages + gone.pages, size + gone.bytes
        if not gone.more:
            return ForgetResult(pages, size)
        assert time.monotonic() < deadline, "there is always more to be forgotten"
