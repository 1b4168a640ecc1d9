"""The pool's node as a connector reaches it; without a node the engine serves on."""

from __future__ import annotations

from collections.abc import Sequence
from logging import Logger
from typing import Any

from ems.errors import EmsError
from ems.pool.client.line import RESTART_SECONDS, Pins
from ems.pool.client.pool_client import PoolClient
from ems.pool.node.launcher import ensure_node
from ems.vllm.configuration.settings import MOONCAKE, ConnectorSettings
from ems.vllm.pages import PlaneRows


def make_client(settings: ConnectorSettings, name: str, pins: Pins | None = None) -> PoolClient:
    reach: Any = {"local_only": settings.read_local_only, "cluster_write": settings.write_rcache}
    who = settings.credentials
    return PoolClient(settings.socket, name, pins, credentials=who, restart_seconds=RESTART_SECONDS, **reach)


def start_node(settings: ConnectorSettings, logger: Logger) -> None:
    """Start a node if none runs, where that is allowed.

    Raises EmsError: it cannot be started.
    """
    if settings.autostart and ensure_node(settings.node_config()):
        logger.info("EMS started a pool node on this host, its socket is %s", settings.socket)


def serve(
    settings: ConnectorSettings, client: PoolClient, planes: Sequence[PlaneRows], chunk_tokens: int, logger: Logger
) -> None:
    """Start a node if need be, and make the namespaces of a rank's ``planes`` known to it."""
    told = "EMS serves namespace %s: %d tokens a chunk, %d pages of %d bytes a chunk, of which %d to %d are here"
    try:
        start_node(settings, logger)
        for rows in planes:
            client.open(rows.namespace)
            name, size, mine = rows.namespace.name, rows.namespace.page_size, rows.local.portion
            shards, last = rows.local.plane.shards, mine.first + mine.count - 1
            logger.info(told, name, chunk_tokens, shards, size, mine.first, last)
        first = any(rows.local.leading and not rows.local.portion.replica for rows in planes)
        if first and settings.backend == MOONCAKE:
            _miss_cluster(settings, client, logger)
    except EmsError as error:
        logger.warning("EMS pool cannot be used, serving on without it: %s", error)


def _miss_cluster(settings: ConnectorSettings, client: PoolClient, logger: Logger) -> None:
    """Say so where the node has no cluster below it, though the user expects one; a tenant is not told of tiers."""
    tiers: Any = client.stats(settings.call_timeout).get("tiers")
    if tiers is not None and not any(tier["name"].startswith("mooncake:") for tier in tiers):
        logger.warning(
            "EMS: backend is 'mooncake', but the node on %s has no cluster below it, so pages stay on this host; start "
            "it with 'ems node --tier mooncake:FILE', or name FILE by MOONCAKE_CONFIG_PATH where an engine starts it",
            settings.socket,
        )
