"""Pages through a real client: saved, looked up, read."""

from __future__ import annotations

from ems.pool.client.answers import Hits, Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import NO_PARENT
from tests.kit.tiers import page
from tests.kit.waiting import until


def save(client: PoolClient, namespace: Namespace, keys: list[bytes]) -> int:
    """Save the page of each key; how many were granted."""
    reservation = client.reserve(namespace, NO_PARENT, keys)
    segments = client.segments(reservation.epoch)
    for position, ref in reservation.granted.items():
        segments.page(ref, namespace.page_size)[:] = page(keys[position], namespace.page_size)
    client.commit(reservation)
    return len(reservation.granted)


def read(client: PoolClient, namespace: Namespace, keys: list[bytes]) -> list[bytes]:
    """The bytes of the leading ``keys`` that are present."""
    hits = client.lookup(namespace, b"".join(keys), lease=True)
    if hits.lease is None:
        return []
    segments = client.segments(hits.lease.epoch)
    found = [bytes(segments.page(ref, namespace.page_size)) for ref in hits.lease.refs]
    client.release(hits.lease)
    return found


def look(client: PoolClient, namespace: Namespace, keys: list[bytes]) -> Hits:
    """A lookup without a lease."""
    return client.lookup(namespace, b"".join(keys))


def wait_for(client: PoolClient, namespace: Namespace, keys: list[bytes], seconds: float = 45.0) -> None:
    """Wait until all ``keys`` are present, asking again and again."""
    until(lambda: look(client, namespace, keys).count == len(keys), "all pages came up", seconds)
