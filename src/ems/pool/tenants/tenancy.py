"""Everything of a node that has to do with tenants, in one place; on an open node it does nothing.

What always holds: who may come in is what the newest registry says that makes sense, whatever its quotas.  Segments say
themselves whose pages they hold, but their tenant can write into them: so a file that no tenant can reach says it too,
and knows of a tenant before the tenant can map the segment.  It is in shared memory, so writing it blocks nobody.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from ems.errors import ConfigError, PoolRefused
from ems.pool.core.changes import ChangeLog
from ems.pool.layout import HEADERS_OFFSET, Description, unpack_description
from ems.pool.names import tenant_of
from ems.pool.protocol import messages
from ems.pool.segments.folder import OWNERS_NAME
from ems.pool.segments.recovery import Recovered, SegmentImage, Unreadable
from ems.pool.segments.side_file import SideFile
from ems.pool.tenants import store
from ems.pool.tenants.gate import Gate, Principal
from ems.pool.tenants.registry import Registry
from ems.pool.tenants.request_filter import TenantChanges, TenantRequestFilter
from ems.pool.tenants.store import TenantsWatch

if TYPE_CHECKING:
    from ems.pool.core.pool_core import PoolCore

_ID_BITS = 62

_log = structlog.get_logger("ems.node")


class Tenancy:
    """Gate, desks and file of a node's tenants; ``path`` is None for an open node.

    Raises ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path | None, directory: Path, changed: Callable[[Registry], None]) -> None:
        self._file = str(path.absolute()) if path else ""
        known = store.stamp(path) if path else None
        registry = store.read(path) if path else None
        self.gate = Gate(registry, os.geteuid(), secrets.token_bytes)
        self.changes: ChangeLog = ChangeLog() if registry is None else TenantChanges()
        self.ids: Iterator[int] | None = None if registry is None else _unforeseeable()
        """Numbers of leases and reservations: a tenant shall not learn from its own how busy others are."""
        self._request_filters: dict[str, TenantRequestFilter] = {}
        self._owners_path = directory / OWNERS_NAME
        self.read_owners()
        self._disbelieved: list[int] = []
        self.unkept = ""
        """Why the quotas of the registry are not those that count; empty when they are."""
        self._watch = TenantsWatch(path, known, changed) if path else None

    # Memory

    def read_owners(self) -> None:
        """Know of whose pages segments have held what the folder says now: nothing where that cannot be read."""
        self._owners = SideFile(self._owners_path, dict[int, str])

    @property
    def segment_tenants(self) -> Mapping[int, str]:
        return self._owners.value

    def put_owner(self, segment: int, tenant: str) -> None:
        """The memory of ``segment`` is ``tenant``'s, or nobody's where that is empty.

        Raises OSError: the file cannot be written.
        """
        others = {number: name for number, name in self.segment_tenants.items() if number != segment}
        self._owners.replace({**others, segment: tenant} if tenant else others)

    def believes(self, image: SegmentImage) -> bool:
        """Whether a segment that an earlier node left says what that node wrote: its tenant could write into it."""
        description = unpack_description(bytes(image.raw[:HEADERS_OFFSET]), image.size)
        if not isinstance(description, Description):
            return True  # it will not be read for that reason
        tenant = self.segment_tenants.get(image.number, "")
        if tenant_of(description.namespace) == tenant and (not tenant or not self.gate.open):
            return True
        self._disbelieved.append(image.number)
        return False

    def believed(self, recovered: Recovered) -> Recovered:
        """What was recovered, and the segments that were not believed as ones that cannot be read."""
        reason = "they belong to a tenant of another set-up, or say that they belong to somebody else"
        refused = [Unreadable(number, reason) for number in self._disbelieved]
        for number in self._disbelieved:
            self.put_owner(number, "")
        return msgspec.structs.replace(recovered, unreadable=[*recovered.unreadable, *refused])

    def start(self) -> None:
        if self._watch is not None:
            self._watch.start()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def apply_quotas(self, core: PoolCore) -> None:
        """Have ``core`` keep the tenants' quotas; those that do not fit in the pool together leave those before."""
        if self.gate.open:
            return
        self.unkept = ""
        try:
            core.set_quotas(self.gate.quotas())
        except ConfigError as error:
            self.unkept = str(error)
            _log.error("the tenants' quotas cannot be kept, those before still count", reason=self.unkept)

    def first_quotas(self, core: PoolCore) -> None:
        """The same at the start, where there are none before: minima that do not fit are left out.

        A node that does not start serves nobody, and one that shuts nobody out is not to start.
        """
        self.apply_quotas(core)
        if self.unkept:
            quotas = self.gate.quotas().items()
            core.set_quotas({name: msgspec.structs.replace(quota, minimum="0") for name, quota in quotas})

    def obey(self, registry: Registry, core: PoolCore) -> None:
        """``registry`` counts from now on: nobody is let in or stays whose key it does not have."""
        self.gate.replace(registry)
        self.apply_quotas(core)

    def request_filter(self, principal: Principal, request: messages.Request) -> TenantRequestFilter | None:
        """Where ``principal`` is served; None for an administrator.

        Raises PoolRefused: an administrator asked for what is the tenants' business.
        """
        if principal.stores:
            return self._request_filters.setdefault(principal.tenant, TenantRequestFilter(principal.tenant))
        if isinstance(request, messages.Storing):
            raise PoolRefused(f"{type(request).__name__} is for tenants, this connection administers the node")
        return None

    def figures(self) -> dict[str, object]:
        return {
            "open": self.gate.open,
            "file": self._file,
            "revision": self.gate.revision,
            "quotas_unkept": self.unkept,
            "refused": self.gate.refused,
        }


def _unforeseeable() -> Iterator[int]:
    while True:
        yield secrets.randbits(_ID_BITS) | 1
