"""The pool's memory in a worker process, mapped before anybody needs it."""

from __future__ import annotations

from ems.pool.client.pool_client import PoolClient
from ems.pool.segments.touch import warm


def map_segments(client: PoolClient) -> None:
    """Map all segments, tell who pins them, and fill this process's page tables.

    Raises:
        EmsError: the node cannot be reached.
        OSError: the kernel refuses.
    """
    client.connect()
    segments = client.segments(client.epoch)
    for number in range(client.segment_count):
        warm(segments.segment(number))
