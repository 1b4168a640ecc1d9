"""The health gate in front of the pool: whether this engine's scheduler asks the pool at all.

A thin shell around :class:`~ems.cc_v1.monitor.Monitor`: checks run on a thread and a connection of their own, so
that neither the scheduler nor a lookup ever waits for one.  What always holds: after a fault of the pool nothing asks
it any more until it has recovered, and asking :attr:`PoolHealth.usable` costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import Logger

from ems.cc_v1.health import HealthRules
from ems.cc_v1.monitor import Monitor
from ems.errors import EmsError, PoolNotTried, PoolTimeout, PoolUnavailable, ProtocolError, Unauthorised
from ems.pool.client.pool_client import PoolClient

SUMMARY_SECONDS = 30.0
"""How often the summary line is written, if there is something to sum up."""

_SICK = (PoolUnavailable, PoolTimeout, ProtocolError, Unauthorised)
"""Errors that say something about the pool's health.  One that refuses a page, for want of room perhaps, is well."""

_BY_NAME = {kind.__name__: kind for kind in _SICK}


class PoolHealth:
    """Watches the node of ``client`` for one scheduler.

    ``start_node`` is called after a check that failed, to bring a missing node back.
    """

    def __init__(
        self,
        client: PoolClient,
        rules: HealthRules,
        logger: Logger,
        *,
        call_timeout: float,
        start_node: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client

        def check() -> None:
            client.stats(call_timeout)

        self._monitor = Monitor(rules, SUMMARY_SECONDS, check, start_node, logger)
        self.add = self._monitor.add
        """Takes a sample for the summary line."""
        self._monitor.start()

    @property
    def usable(self) -> bool:
        return self._monitor.healthy

    def failed(self, error: EmsError) -> bool:
        """An operation ended with ``error``.  True if the error means that the pool is ill: the gate closes at once."""
        if not isinstance(error, _SICK) or isinstance(error, PoolNotTried):
            return False
        self._monitor.failed(error)
        return True

    def failed_in_worker(self, kind: str) -> None:
        if kind in _BY_NAME:
            self._monitor.failed(_BY_NAME[kind](f"a worker's load or save ended with {kind}"))

    def close(self) -> None:
        self._monitor.close()
        self._client.close()
