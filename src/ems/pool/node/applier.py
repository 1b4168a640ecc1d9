"""Does to memory and files what the brain decided, in the order in which it is asked.

What always holds: it is done before the brain goes on, so its answer goes out after all that it relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import structlog

from ems.pool.names import tenant_of

if TYPE_CHECKING:
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.core.writing import Committed
    from ems.pool.layout import PageFlag, PageRef, Writer
    from ems.pool.node.memory import Memory
    from ems.pool.pages import Assigned, Page
    from ems.pool.segments.arena import Arena
    from ems.pool.service.storing import Steps
    from ems.pool.tenants.tenancy import Tenancy

_log = structlog.get_logger("ems.node")


class Applier:
    """What each method does, :class:`ems.pool.service.storing.Applier` says; ``writer`` is who writes for a client."""

    def __init__(
        self, core: PoolCore, arena: Arena, memory: Memory, tenancy: Tenancy, writer: Callable[[int], Writer]
    ) -> None:
        self._core = core
        self._arena = arena
        self._memory = memory
        self._tenancy = tenancy
        self._writer = writer

    def clear_headers(self, slots: Collection[tuple[int, int]]) -> None:
        self._arena.headers.forget(slots)

    def replace_memory(self, segment: int) -> None:
        self._memory.renew(segment)

    def note_tenant(self, segment: int, namespace: str) -> bool:
        try:
            self._tenancy.put_owner(segment, tenant_of(namespace))
        except OSError as error:
            _log.error("cannot note whose a segment is", segment=segment, reason=error.strerror)
            return False
        return True

    def describe_segment(self, assigned: Assigned) -> None:
        if assigned.segment not in self._memory.lost:
            self._arena.headers.describe(assigned)

    def mark_writing(self, pages: list[Page], page_size: int, client_id: int) -> None:
        self._arena.headers.begin_writing(pages, page_size, self._writer(client_id))

    def publish(self, done: Committed, checksums: Sequence[int] | None, flags: PageFlag) -> None:
        self._arena.headers.publish(done.pages, done.page_size, checksums, flags)
        for page in done.pages:
            if page.tail is not None:
                self._arena.keep_tail(done.namespace, page, self._core.has_tail)

    def verify_page(self, ref: PageRef, key: bytes, length: int) -> Steps[bool]:
        return self._arena.headers.look_at(ref, key, length)

    def quarantine_header(self, ref: PageRef, key: bytes) -> None:
        self._arena.headers.quarantine(ref, key)
