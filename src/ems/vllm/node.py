"""The pool's node as a connector reaches it; without a node the engine serves on."""

from __future__ import annotations

from collections.abc import Sequence
from logging import Logger

from ems.errors import EmsError
from ems.pool.client.line import RESTART_SECONDS, Pins
from ems.pool.client.pool_client import PoolClient
from ems.pool.node.launcher import ensure_node
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.pages import PlaneRows


def make_client(settings: ConnectorSettings, name: str, pins: Pins | None = None) -> PoolClient:
    return PoolClient(settings.socket, name, pins, credentials=settings.credentials, restart_seconds=RESTART_SECONDS)


def start_node(settings: ConnectorSettings, logger: Logger) -> None:
    """Start a node if none runs, where that is allowed.

    Raises:
        EmsError: it cannot be started.
    """
    if settings.autostart and ensure_node(settings.node_config()):
        logger.info("EMS started a pool node on this host, its socket is %s", settings.socket)


def serve(
    settings: ConnectorSettings, client: PoolClient, planes: Sequence[PlaneRows], chunk_tokens: int, logger: Logger
) -> None:
    """Start a node if need be, and make the namespaces of a rank's ``planes`` known to it."""
    try:
        start_node(settings, logger)
        for rows in planes:
            client.open(rows.namespace)
            mine = rows.local.portion
            logger.info(
                "EMS serves namespace %s: %d tokens a chunk, %d pages of %d bytes a chunk, of which %d to %d are here",
                rows.namespace.name,
                chunk_tokens,
                rows.local.plane.shards,
                rows.namespace.page_size,
                mine.first,
                mine.first + mine.count - 1,
            )
    except EmsError as error:
        logger.warning("EMS pool cannot be used, serving on without it: %s", error)
