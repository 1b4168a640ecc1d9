"""Reads the file of tenants again whenever it changed, in a thread of its own: a disk may be slow, a node must not be.

What always holds: what was read last and made sense is what counts; a file that is gone or makes no sense changes
nothing and is said once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from ems.errors import ConfigError
from ems.pool.tenants import store
from ems.pool.tenants.registry import Registry

POLL_SECONDS = 0.5
"""How soon a change is noticed: a look at a file's size and times costs a few microseconds."""

_log = structlog.get_logger("ems.node")


class TenantsWatch:
    """Calls ``changed`` with each new registry in ``path``, from its own thread, until :meth:`close`."""

    def __init__(self, path: Path, known: store.Stamp | None, changed: Callable[[Registry], None]) -> None:
        self._path = path
        self._known = known
        self._changed = changed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ems-tenants", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more; does not wait for a disk that hangs."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        """Read the file if it is another than the last time."""
        seen = store.stamp(self._path)
        if seen == self._known:
            return
        self._known = seen
        try:
            registry = store.read(self._path)
        except ConfigError as error:
            _log.error("the tenants file cannot be used, what was in it before still counts", reason=str(error))
            return
        if not self._stop.is_set():
            self._changed(registry)
