"""Which chunks of a request are in the pool, found with few calls and held by leases.

A brain over ``look``.  What always holds: every page that is reported is leased on the one node and connection that all
others of the answer are on.  Groups that need all chunks are asked for as one run from the beginning.  Groups with a
window, or with a state, need the last chunks before a boundary only, so these are looked for from there backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from ems.pool.client.answers import Lease
from ems.pool.keys import KeyChain
from ems.pool.layout import REF_BYTES
from ems.vllm.planes import Plane, page_keys

MOST_BACKWARDS = 64
"""Chunks that are looked at for a window before it counts as missing."""


class Group(msgspec.Struct, frozen=True):
    """A KV cache group that vLLM offloads.

    ``number`` is the engine's, ``tokens`` those of a chunk, ``window`` how many last chunks it needs (0: all of them),
    ``planes`` the numbers of its planes.
    """

    number: int
    tokens: int
    window: int
    planes: tuple[int, ...]


class Found(msgspec.Struct):
    """Where pages lie, packed, all shards together, by plane and chunk; and the leases that keep them there."""

    node: str = ""
    refs: dict[tuple[int, int], bytes] = {}
    leases: list[Lease] = []
    mixed: bool = False
    """Whether the node was another one in the middle of the search."""

    def has(self, group: Group, chunk: int) -> bool:
        return all((plane, chunk) in self.refs for plane in group.planes)


Look = Callable[[int, bytes], tuple[int, Lease | None]]
"""How many leading ones of some keys of pages are present in a plane, and their lease."""


class _Search:
    def __init__(self, found: Found, planes: Sequence[Plane], chains: Mapping[int, KeyChain], look: Look) -> None:
        self.found = found
        self.planes = planes
        self.chains = chains
        self.look = look

    def leading(self, group: Group, begin: int, end: int) -> int:
        """How many leading ones of the chunks ``[begin, end)`` are present in all planes of a group."""
        common = end - begin
        for plane in group.planes:
            shards = self.planes[plane].shards
            keys = page_keys(self.chains[group.tokens].packed(begin, begin + common), shards)
            count, lease = self.look(plane, keys) if keys else (0, None)
            common = min(common, count // shards)
            if lease is not None:
                self._keep(plane, begin, common, lease, shards * REF_BYTES)
        return common

    def _keep(self, plane: int, begin: int, count: int, lease: Lease, size: int) -> None:
        self.found.leases.append(lease)
        self.found.mixed = self.found.mixed or self.found.node not in ("", lease.node)
        self.found.node = lease.node
        for at in range(count):
            self.found.refs[plane, begin + at] = lease.packed_refs[at * size : (at + 1) * size]

    def backwards(self, group: Group, end: int) -> None:
        """Look for as many consecutive chunks before chunk ``end`` as a group needs, and one more."""
        run = 0
        for chunk in range(end - 1, max(end - MOST_BACKWARDS, 0) - 1, -1):
            run = run + 1 if self.leading(group, chunk, chunk + 1) else 0
            if run > group.window:
                return


def search(
    found: Found, groups: Sequence[Group], planes: Sequence[Plane], chains: Mapping[int, KeyChain], look: Look
) -> None:
    """Look for the chunks of ``chains`` (by the tokens of a chunk); what ``look`` raises is for the caller."""
    one, boundary = _Search(found, planes, chains, look), None
    for group in groups:
        if not group.window:
            tokens = one.leading(group, 0, len(chains[group.tokens])) * group.tokens
            boundary = tokens if boundary is None else min(boundary, tokens)
    for group in groups:
        if group.window:
            chunks = len(chains[group.tokens])
            one.backwards(group, chunks if boundary is None else min(chunks, -(-boundary // group.tokens)))
