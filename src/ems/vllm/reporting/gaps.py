"""Why not more of a prompt was found, in detail; asked only for requests to be explained."""

from __future__ import annotations

from ems.errors import PoolRefused
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.pool.protocol.limits import MAX_KEYS
from ems.pool.reasons.words import Reason
from ems.vllm.planes import Plane, page_keys

PROBES = 4
"""Blocks behind the missing one that are looked at where the node does not tell, spread evenly."""


def why_not_more(
    client: PoolClient, plane: Plane, chain: KeyChain, found: int, timeout: float, reason: Reason | None
) -> tuple[Reason | None, str]:
    """Why block ``found`` of ``chain``, the first missing one, is missing, and details of it.

    The answer is :attr:`Reason.GAP` where blocks behind it are there.  ``reason`` is what the lookup said already.

    Raises:
        PoolError: the pool did not answer.
    """
    if found >= len(chain):
        return reason, ""
    end = min(len(chain), found + MAX_KEYS // plane.shards)
    keys = page_keys(chain.packed(found, end), plane.shards)
    try:
        explanation = client.explain(plane.namespace, keys, timeout)
    except PoolRefused:
        return (Reason.GAP if _has_gap(client, plane, chain, found, timeout) else reason), ""
    first = next((code for code in explanation.codes if code), 0)
    why, detail = Reason.of_code(first) or reason, explanation.detail
    # A block behind counts when all of its pages are there.
    behind = [
        explanation.codes[at : at + plane.shards] for at in range(plane.shards, len(explanation.codes), plane.shards)
    ]
    if any(all(code in (0, Reason.GAP.code) for code in codes) for codes in behind):
        return Reason.GAP, "; ".join(text for text in (why.value if why else "", detail) if text)
    return why, detail


def _has_gap(client: PoolClient, plane: Plane, chain: KeyChain, found: int, timeout: float) -> bool:
    rest = len(chain) - found - 1
    if rest <= 0:
        return False
    namespace = Namespace(plane.namespace, 0)
    for probe in range(min(PROBES, rest)):
        block = found + 1 + probe * rest // min(PROBES, rest)
        keys = page_keys(chain.packed(block, block + 1), plane.shards)
        if client.lookup(namespace, keys, timeout=timeout).count:
            return True
    return False
