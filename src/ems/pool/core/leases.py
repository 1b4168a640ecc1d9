"""Pages that readers were promised, until they release them or are gone.

What always holds: ``leases`` of a page is the number of leases that promise it; that a promise is a use of its pages
is told to the policy later (:meth:`Leases.settle`), so that whoever looks up need not wait for it, and before anything
else happens to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ems.errors import StaleReference
from ems.pool.core.handover import LeaseState
from ems.pool.keys import KEY_BYTES, cut

if TYPE_CHECKING:
    from ems.pool.core.index import Index, Page
    from ems.pool.core.namespaces import NamespacePages


class Lease:
    """Pages of one namespace, promised to ``owner``."""

    __slots__ = ("namespace", "owner", "pages")

    def __init__(self, owner: int, namespace: NamespacePages, pages: list[Page]) -> None:
        self.owner = owner
        self.namespace = namespace
        self.pages = pages


class Leases:
    """All leases of a node, by their numbers."""

    def __init__(self) -> None:
        self._all: dict[int, Lease] = {}
        self._used: list[tuple[Index, list[Page]]] = []

    def __len__(self) -> int:
        return len(self._all)

    @property
    def all(self) -> Mapping[int, Lease]:
        """The leases by their numbers."""
        return self._all

    def promise(self, number: int, owner: int, namespace: NamespacePages, pages: list[Page], *, use: bool) -> None:
        """The lease ``number`` promises ``owner`` present ``pages``; with ``use`` they are of one prefix, and used."""
        for page in pages:
            page.leases += 1
        self._all[number] = Lease(owner, namespace, pages)
        if use:
            self._used.append((namespace.index, pages))

    def end(self, owner: int, number: int) -> None:
        """``owner`` no longer needs what the lease promised; its uses are settled.

        Raises:
            StaleReference: the lease is not ``owner``'s or is gone.
        """
        held = self._all.get(number)
        if held is None or held.owner != owner:
            raise StaleReference(f"lease {number} is gone")
        del self._all[number]
        for page in held.pages:
            page.leases -= 1

    def settle(self, now: float) -> None:
        """Tell the policies of the uses since the last call."""
        for index, pages in self._used:
            index.use(pages)
            for page in pages:
                page.used = now
        self._used.clear()

    def pages(self, owner: int, number: int) -> list[Page]:
        """What the lease promises ``owner`` still."""
        held = self._all.get(number)
        return list(held.pages) if held is not None and held.owner == owner else []

    def of(self, owner: int) -> list[int]:
        """The leases of ``owner``."""
        return [number for number, lease in self._all.items() if lease.owner == owner]

    def break_off(self, page: Page) -> None:
        """No lease promises ``page`` any more."""
        for lease in self._all.values():
            while page in lease.pages:
                lease.pages.remove(page)
                page.leases -= 1

    def forfeit(self, namespace: NamespacePages, begin: bytes) -> None:
        """No lease promises the pages of ``namespace`` any more that lie where ``begin`` says."""
        for lease in self._all.values():
            if lease.namespace is namespace:
                for page in lease.pages:
                    page.leases -= page.ref.startswith(begin)
                lease.pages = [page for page in lease.pages if not page.ref.startswith(begin)]

    def held(self, namespace: NamespacePages) -> Iterator[list[Page]]:
        """What the leases on pages of ``namespace`` promise, one after the other."""
        return (lease.pages for lease in self._all.values() if lease.namespace is namespace)

    def by_namespace(self) -> Counter[int]:
        """How many leases there are on pages of each namespace, by its number."""
        return Counter(lease.namespace.number for lease in self._all.values())

    # Another process

    def snapshot(self) -> list[LeaseState]:
        """All of them; uses are settled."""
        return [
            LeaseState(number, lease.owner, lease.namespace.number, b"".join([page.key for page in lease.pages]))
            for number, lease in self._all.items()
        ]

    def resume(self, states: Iterable[LeaseState], namespaces: Sequence[NamespacePages]) -> None:
        """Go on from a :meth:`snapshot`, with the pages of ``namespaces``.

        Raises:
            StaleReference: a page that was promised is not there.
        """
        for state in states:
            space = namespaces[state.namespace]
            pages = [space.known(key) for key in cut(state.keys, KEY_BYTES)]
            self.promise(state.number, state.owner, space, pages, use=False)

    def check(self, namespaces: Iterable[NamespacePages]) -> list[str]:
        """What does not hold, one sentence each; empty when all is well."""
        promised: Counter[int] = Counter()
        broken = []
        for lease in self._all.values():
            for page in lease.pages:
                promised[id(page)] += 1
                if lease.namespace.index.get(page.key) is not page:
                    broken.append(f"leased page {page.key.hex()} is no longer in the pool")
        broken += [
            f"page {page.key.hex()} counts {page.leases} leases, expected {promised[id(page)]}"
            for namespace in namespaces
            for page in namespace.index
            if page.leases != promised[id(page)]
        ]
        return broken
