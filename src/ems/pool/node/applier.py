"""Does what the brain says is to be done: one effect after the other, in the order in which they come.

What always holds: an effect is done before the brain goes on, so its answer goes out after all that it relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from ems.pool.pages import packed_refs
from ems.pool.service import effects
from ems.pool.service.effects import Effect, Work

if TYPE_CHECKING:
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.node.memory import Memory
    from ems.pool.segments.arena import Arena
    from ems.pool.tenants.tenancy import Tenancy
    from ems.pool.writer import Writer

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Work of which the rest is to be done a step at a time; its result at the end."""

_log = structlog.get_logger("ems.node")


class Applier:
    """``writer`` is who writes for a client."""

    def __init__(
        self, core: PoolCore, arena: Arena, memory: Memory, tenancy: Tenancy, writer: Callable[[int], Writer]
    ) -> None:
        self._core = core
        self._arena = arena
        self._memory = memory
        self._tenancy = tenancy
        self._writer = writer
        self._does: dict[type[Effect], Callable[[Any], Any]] = {
            effects.ClearHeaders: lambda effect: arena.headers.forget(effect.slots),
            effects.ReplaceMemory: lambda effect: memory.renew(effect.segment),
            effects.NoteTenant: self._note_tenant,
            effects.DescribeSegment: self._describe,
            effects.MarkWriting: self._mark_writing,
            effects.Publish: self._publish,
            effects.QuarantineHeader: lambda effect: arena.headers.quarantine(effect.ref, effect.key),
        }

    def begin(self, work: Work[Result]) -> Result | Steps[Result]:
        """Do ``work`` up to its first pause; its result, or the rest of it."""
        try:
            effect = next(work)  # most requests have no effect at all
            steps = self._steps(work, effect)
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        return steps

    def finish(self, work: Work[Result]) -> Result:
        """Do all of ``work`` without a pause."""
        try:
            steps = self._steps(work, next(work))
            while True:
                next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result

    def _steps(self, work: Work[Result], effect: Effect) -> Steps[Result]:
        """Do ``effect`` and the rest of ``work``, a step at a time."""
        result: Any
        while True:
            if isinstance(effect, effects.Pause):
                yield
                result = None
            elif isinstance(effect, effects.VerifyPage):
                result = yield from self._arena.headers.look_at(effect.ref, effect.key, effect.length)
            else:
                result = self._does[type(effect)](effect)
            try:
                effect = work.send(result)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def _note_tenant(self, effect: effects.NoteTenant) -> bool:
        try:
            self._tenancy.assigned(effect.segment, effect.namespace)
        except OSError as error:
            _log.error("cannot note whose a segment is", segment=effect.segment, reason=error.strerror)
            return False
        return True

    def _describe(self, effect: effects.DescribeSegment) -> None:
        if effect.assigned.segment not in self._memory.lost:
            self._arena.headers.describe(effect.assigned)

    def _mark_writing(self, effect: effects.MarkWriting) -> None:
        writer = self._writer(effect.client_id)
        self._arena.headers.begin_writing(effect.pages, packed_refs(effect.pages), effect.page_size, writer)

    def _publish(self, effect: effects.Publish) -> None:
        done = effect.done
        self._arena.headers.publish(done.pages, done.page_size, effect.checksums, effect.flags)
        for page in done.pages:
            if page.tail is not None:
                self._arena.keep_tail(done.namespace, page, self._core.has_tail)
