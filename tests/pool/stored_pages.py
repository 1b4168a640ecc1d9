"""Pages whose bytes follow from their keys, stored and loaded through a client as engines do."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ems.errors import PoolError
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import NO_PARENT, Tail
from ems.pool.layout import crc32c
from ems.pool.pages import Outcome
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.conftest import PAGE

NAMESPACE = Namespace("test/survival", PAGE)


def content(key: bytes) -> bytes:
    return hashlib.sha256(key).digest() * (PAGE // 32)


def store(client: PoolClient, keys: Sequence[bytes], parent: bytes = NO_PARENT, tail: Tail | None = None) -> int:
    """Store pages with their checksums; how many were granted."""
    reserved = client.reserve(NAMESPACE, parent, keys, tails=[*[None] * (len(keys) - 1), tail])
    segments = client.segments(reserved.epoch)
    checksums = []
    for position, ref in sorted(reserved.granted.items()):
        page = segments.page(ref, PAGE)
        page[:] = content(keys[position])
        checksums.append(crc32c(page))
    client.commit(reserved, sorted(reserved.granted), checksums=checksums)
    return len(reserved.granted)


def load(client: PoolClient, keys: Sequence[bytes], namespace: Namespace = NAMESPACE) -> tuple[int, int]:
    """How many leading pages are present, and how many of these have their bytes; wrong ones are an error."""
    hits = client.lookup(namespace, b"".join(keys), lease=True)
    if hits.lease is None:
        return 0, 0
    reader = client.reader(namespace, hits.lease.epoch)
    pages = reader.look(hits.lease.packed_refs, b"".join(keys[: hits.count]))
    copies = [bytes(reader.page(pages.ref(at))) for at in range(pages.present)]
    good = reader.same(pages, 0, reader.sound(pages, 0, pages.present))
    for key, data in zip(keys[:good], copies, strict=False):
        assert data == content(key), "a wrong byte was served"
    client.report(namespace, reader)
    client.release(hits.lease)
    return hits.count, good


def back(node: NodeProcess, client: PoolClient) -> None:
    """Wait until the client reached the node that was started again."""

    def reached() -> bool:
        try:
            return bool(client.stats())
        except PoolError:
            return False

    until(reached, "the client is back")


def store_unwritten(client: PoolClient, namespace: Namespace, keys: Sequence[bytes]) -> int:
    """Store pages whose bytes do not matter; how many were granted."""
    reserved = client.reserve(namespace, NO_PARENT, keys)
    client.commit(reserved)
    return len(reserved.granted)


def store_filled(client: PoolClient, namespace: Namespace, keys: Sequence[bytes], payload: bytes) -> int:
    """Store pages full of ``payload``, a byte; how many were granted.

    A mapping of memory that another process cut is not looked at: that would end this one.
    """
    stored, before = 0, bytes(NO_PARENT)
    while True:
        reserved = client.reserve(namespace, before, keys)
        segments = client.segments(reserved.epoch)
        for ref in reserved.granted.values():
            segments.page(ref, namespace.page_size)[:] = payload * namespace.page_size
        client.commit(reserved)
        stored += len(reserved.granted)
        refused = reserved.outcomes.find(Outcome.OVER_SHARE)
        if refused <= 0:
            return stored
        before, keys = keys[refused - 1], keys[refused:]  # a writer may not hold all at a time


def first_bytes(client: PoolClient, namespace: Namespace, keys: Sequence[bytes]) -> list[bytes]:
    """The first byte of each page that is there and believed by its reader; all bytes of it are equal."""
    hits = client.lookup(namespace, b"".join(keys), lease=True)
    if hits.lease is None:
        return []
    reader = client.reader(namespace, hits.lease.epoch)
    found = []
    for key, ref in zip(keys, hits.lease.refs, strict=False):
        pages = reader.look(ref.pack(), key)
        if reader.sound(pages, 0, pages.present):
            data = bytes(reader.page(ref))
            assert data == data[:1] * namespace.page_size
            found.append(data[:1])
    client.release(hits.lease)
    return found
