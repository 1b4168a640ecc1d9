"""Slots promised to writers, until their pages are committed or the writer is gone.

What always holds: a page that is being written waits in one reservation; a commit takes all pages that it names, or
none; a reservation ends with its last page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ems.errors import StaleReference
from ems.pool.core.handover import ReservationState

if TYPE_CHECKING:
    from ems.pool.core.index import Page
    from ems.pool.core.namespaces import NamespacePages


class Reservation:
    """Pages of one namespace that ``owner`` is writing, by their positions in what it asked for."""

    __slots__ = ("namespace", "owner", "waiting")

    def __init__(self, owner: int, namespace: NamespacePages, waiting: dict[int, Page]) -> None:
        self.owner = owner
        self.namespace = namespace
        self.waiting = waiting


class Reservations:
    """All reservations of a node, by their numbers."""

    def __init__(self) -> None:
        self._all: dict[int, Reservation] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def all(self) -> Mapping[int, Reservation]:
        """The reservations by their numbers."""
        return self._all

    def promise(self, number: int, owner: int, namespace: NamespacePages, waiting: dict[int, Page]) -> None:
        """``owner`` writes the pages ``waiting``, by position."""
        self._all[number] = Reservation(owner, namespace, waiting)

    def take(
        self, owner: int, number: int, positions: Sequence[int] | None
    ) -> tuple[NamespacePages, list[int], list[Page]]:
        """The pages at ``positions`` (all, when None) are written: their namespace, the positions in order, the pages.

        Raises:
            StaleReference: the reservation is not ``owner``'s or is gone, or has not all of these pages; nothing is
                taken then.
        """
        held = self._of(owner, number)
        wanted = sorted(held.waiting if positions is None else set(positions))
        unknown = [position for position in wanted if position not in held.waiting]
        if unknown:
            raise StaleReference(f"reservation {number} has no page {unknown[0]} to commit")
        written = [held.waiting.pop(position) for position in wanted]
        if not held.waiting:
            del self._all[number]
        return held.namespace, wanted, written

    def end(self, owner: int, number: int) -> Reservation:
        """Forget the reservation; what of it was not committed.

        Raises:
            StaleReference: it is not ``owner``'s or is gone.
        """
        held = self._of(owner, number)
        del self._all[number]
        return held

    def _of(self, owner: int, number: int) -> Reservation:
        held = self._all.get(number)
        if held is None or held.owner != owner:
            raise StaleReference(f"reservation {number} is gone, reserve again")
        return held

    def of(self, owner: int) -> list[int]:
        """The reservations of ``owner``."""
        return [number for number, held in self._all.items() if held.owner == owner]

    def forfeit(self, namespace: NamespacePages, begin: bytes) -> list[Page]:
        """The pages of ``namespace`` that are being written where ``begin`` says; none of them can be committed now."""
        gone: list[Page] = []
        for held in self._all.values():
            if held.namespace is namespace:
                lost = [at for at, page in held.waiting.items() if page.ref.startswith(begin)]
                gone += [held.waiting.pop(at) for at in lost]
        return gone

    def waiting(self, namespace: NamespacePages) -> Iterator[Page]:
        """Pages of ``namespace`` that are being written."""
        for held in self._all.values():
            if held.namespace is namespace:
                yield from held.waiting.values()

    # Another process

    def snapshot(self) -> list[ReservationState]:
        """All of them."""
        return [
            ReservationState(
                number, held.owner, held.namespace.number, {at: page.key for at, page in held.waiting.items()}
            )
            for number, held in self._all.items()
        ]

    def resume(self, states: Iterable[ReservationState], namespaces: Sequence[NamespacePages]) -> None:
        """Go on from a :meth:`snapshot`, with the pages of ``namespaces``.

        Raises:
            StaleReference: a page that is being written is not there.
        """
        for state in states:
            space = namespaces[state.namespace]
            self.promise(state.number, state.owner, space, {at: space.known(key) for at, key in state.waiting.items()})

    def check(self, namespaces: Iterable[NamespacePages]) -> list[str]:
        """What does not hold, one sentence each; empty when all is well."""
        waiting = sum(len(held.waiting) for held in self._all.values())
        if waiting != sum(namespace.writing for namespace in namespaces):
            return ["a page is being written that no reservation holds"]
        return []
