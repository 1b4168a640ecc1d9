"""Whether a prompt that was found in part goes on in the pool behind a gap; asked only for requests to be explained."""

from __future__ import annotations

from ems.pool.client import Namespace, PoolClient
from ems.pool.keys import KeyChain
from ems.vllm.planes import Plane, page_keys

PROBES = 4
"""Blocks behind the missing one that are looked at, spread evenly."""


def has_gap(client: PoolClient, plane: Plane, chain: KeyChain, found: int, timeout: float) -> bool:
    """Whether ``plane`` has some block of ``chain`` behind the first missing one, number ``found``.

    Raises:
        PoolError: the pool did not answer.
    """
    rest = len(chain) - found - 1
    if rest <= 0:
        return False
    namespace = Namespace(plane.namespace, 0)
    for probe in range(min(PROBES, rest)):
        block = found + 1 + probe * rest // min(PROBES, rest)
        keys = page_keys(chain.joined(block, block + 1), plane.shards)
        if client.lookup(namespace, keys, timeout=timeout).count:
            return True
    return False
