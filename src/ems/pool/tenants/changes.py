"""A log of changes for each tenant, so that nobody learns from its numbers, or from what it lost, what others do.

What always holds: a change is in the log of the tenant whose namespace it happened in, and in no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ems.pool.core.changes import ChangeLog
from ems.pool.names import tenant_of
from ems.pool.protocol.messages import ChangeRun


class TenantChanges(ChangeLog):
    """The logs of all tenants, to be used as one."""

    def __init__(self) -> None:
        super().__init__()
        self._logs: dict[str, ChangeLog] = {}

    def recording(self) -> bool:
        return any(log.recording() for log in self._logs.values())

    def stored(self, namespace: str, keys: Iterable[bytes]) -> None:
        self._log(namespace).stored(namespace, keys)

    def removed(self, namespace: str, key: bytes) -> None:
        self._log(namespace).removed(namespace, key)

    def since(self, sequence: int, namespaces: Sequence[str], now: float) -> tuple[int, bool, list[ChangeRun]]:
        return self._log(namespaces[0] if namespaces else "").since(sequence, namespaces, now)

    def tick(self, now: float) -> None:
        for log in self._logs.values():
            log.tick(now)

    def _log(self, namespace: str) -> ChangeLog:
        return self._logs.setdefault(tenant_of(namespace), ChangeLog())
