"""Which chunks of a request are in the pool, found with few calls and held by leases.

A brain over ``look``.  What always holds: every page that is reported is leased on the one node and connection that all
others of the answer are on.  Groups that need all chunks are asked for as one run from the beginning.  Groups with a
window, or with a state, need the last chunks before a boundary only, so these are looked for from there backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from ems.pool.client.answers import Lease
from ems.pool.layout import REF_BYTES

MOST_BACKWARDS = 64
"""Chunks that are looked at for a window before it counts as missing."""


class Group(msgspec.Struct, frozen=True):
    """A group of the engine: its number, tokens a chunk, and how many last chunks it needs (0: all of them)."""

    number: int
    tokens: int
    window: int = 0


class Found(msgspec.Struct):
    """Where pages of chunks lie, packed, for each rank, by vLLM's key; and the leases that keep them there."""

    node: str = ""
    refs: dict[bytes, list[bytes]] = {}
    leases: list[Lease] = []
    mixed: bool = False
    """Whether the node was another one in the middle of the search."""


Look = Callable[[int, int, list[bytes]], tuple[int, Lease | None]]
"""How many leading chunks of a list are present for a rank and the group at a place, and their lease."""


def search(found: Found, groups: Sequence[Group], chunks: dict[int, list[bytes]], ranks: int, look: Look) -> None:
    """Look for ``chunks`` (vLLM's keys in order, by group) of ``groups``; what ``look`` raises is for the caller."""
    boundary: int | None = None
    for place, group in enumerate(groups):
        if not group.window:
            count = _leading(found, place, chunks[group.number], ranks, look)
            boundary = count * group.tokens if boundary is None else min(boundary, count * group.tokens)
    for place, group in enumerate(groups):
        if group.window and boundary != 0:
            keys = chunks[group.number]
            end = len(keys) if boundary is None else min(len(keys), -(-boundary // group.tokens))
            _backwards(found, place, keys[:end], group.window, ranks, look)


def _leading(found: Found, place: int, keys: list[bytes], ranks: int, look: Look) -> int:
    if not keys:
        return 0
    counts, refs = [], []
    for rank in range(ranks):
        count, lease = look(place, rank, keys)
        counts.append(count)
        refs.append(list(_keep(found, lease, count)))
    common = min(counts)
    for at in range(common):
        found.refs[keys[at]] = [of_rank[at] for of_rank in refs]
    return common


def _backwards(found: Found, place: int, keys: list[bytes], window: int, ranks: int, look: Look) -> None:
    run = 0
    for key in list(reversed(keys))[:MOST_BACKWARDS]:
        run = run + 1 if _leading(found, place, [key], ranks, look) else 0
        if run > window:
            return


def _keep(found: Found, lease: Lease | None, count: int) -> Iterator[bytes]:
    if lease is None:
        return
    found.leases.append(lease)
    found.mixed = found.mixed or found.node not in ("", lease.node)
    found.node = lease.node
    for at in range(count):
        yield lease.packed_refs[at * REF_BYTES : (at + 1) * REF_BYTES]
