"""Maps a node's memory before anybody needs it, so that no load and no save pays for that."""

from __future__ import annotations

from logging import Logger

from ems.errors import EmsError
from ems.pool.client.pool_client import PoolClient
from ems.pool.segments.touch import warm


def map_segments(client: PoolClient, logger: Logger) -> None:
    """Map the segments that are there, tell who pins them, and fill this process's page tables."""
    try:
        client.connect()
        segments = client.segments(client.epoch)
        for number in range(client.segment_count):
            warm(segments.segment(number))
    except (EmsError, OSError) as error:
        logger.debug("EMS segments are mapped later: %s", error)
