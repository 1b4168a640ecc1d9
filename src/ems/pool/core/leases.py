"""Pages that readers were promised, until they release them or are gone.

What always holds: ``leases`` of a page is the number of leases that promise it; that a promise is a use of its pages
is told to the policy later, a bounded number at a time (:meth:`Leases.settle_some`), so that nobody waits for it.  What
all leases of one owner, or of one tenant, may promise is bounded.  That a page is promised no longer costs the same
however many leases there are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from ems.errors import PoolRefused, StaleReference
from ems.pool.core.index import Index
from ems.pool.core.namespaces import NamespacePages
from ems.pool.pages import Page

MAX_LEASED_EACH = 1 << 21
"""Pages that the leases of one owner may promise, a page as often as it is promised (8 bytes each)."""
MAX_LEASED_TENANT = 1 << 23
"""Pages that the leases on one tenant's namespaces may promise; on an open node all."""
SETTLED_AT_ONCE = 256
"""Pages whose uses the policy is told in one go."""
MAX_UNSETTLED = 4096
"""Goes that may wait; of more the oldest are not told at all, which the order of eviction can do without."""
LEASE_WEIGHT = 64
"""Pages that a lease counts for beside those that it promises."""


@dataclass(slots=True, eq=False)
class Lease:
    """Pages of one namespace, promised to ``client_id``; ``number`` grows with each lease of a node."""

    number: int
    client_id: int
    namespace: NamespacePages
    pages: list[Page]
    weight: int
    """Pages that it counts for."""


class Leases:
    """All leases of a node, by their numbers."""

    def __init__(self) -> None:
        self.all: dict[int, Lease] = {}
        self._of: dict[int, dict[int, None]] = {}
        self._given = 0
        self._broken: dict[Page, tuple[int, int]] = {}
        """Pages that leases up to a number promise no longer, and how many of these leases are left."""
        self._leased = Counter[int | str]()
        """What the leases of each owner, and of each tenant, promise."""
        self._used: deque[tuple[Index, list[Page], bool]] = deque(maxlen=MAX_UNSETTLED)
        """Pages that were used, and whether it is to be told what the first of them hangs on."""

    def __len__(self) -> int:
        return len(self.all)

    def refuse_too_many(self, client_id: int, namespace: NamespacePages, count: int) -> None:
        """Look whether ``client_id`` may be promised ``count`` more pages of ``namespace``.

        Raises PoolRefused: too many are promised already.
        """
        weight = count + LEASE_WEIGHT
        mine, all_of_tenant = self._leased[client_id], self._leased[namespace.tenant]
        if mine + weight > MAX_LEASED_EACH or all_of_tenant + weight > MAX_LEASED_TENANT:
            raise PoolRefused(
                f"leases on {mine} pages are held by this connection and on {all_of_tenant} by all, expected at most "
                f"{MAX_LEASED_EACH} and {MAX_LEASED_TENANT}; release some"
            )

    def promise(
        self, number: int, client_id: int, namespace: NamespacePages, pages: list[Page], *, weighs: bool
    ) -> None:
        """The lease ``number`` promises ``client_id`` present ``pages``, and counts for its bounds if it ``weighs``."""
        for page in pages:
            page.leases += 1
        self._given += 1
        weight = len(pages) + LEASE_WEIGHT if weighs else 0
        self.all[number] = Lease(self._given, client_id, namespace, list(pages), weight)
        self._of.setdefault(client_id, {})[number] = None
        self._weigh(client_id, namespace.tenant, weight)

    def _weigh(self, client_id: int, tenant: str, more: int) -> None:
        for name in (client_id, tenant):
            self._leased[name] += more
            if not self._leased[name]:
                del self._leased[name]

    def add(self, number: int, pages: list[Page]) -> list[Page]:
        """The lease ``number`` promises present ``pages``, too, up to one that it was broken off for; those before."""
        held = self.all[number]
        if self._broken:
            pages = list(takewhile(lambda page: not self._is_broken(held, page), pages))
        for page in pages:
            page.leases += 1
        held.pages += pages
        held.weight += len(pages)
        self._weigh(held.client_id, held.namespace.tenant, len(pages))
        return pages

    def use(self, index: Index, pages: list[Page]) -> None:
        """``pages`` of ``index``, one prefix, were used; its policy is told later."""
        # The last first: a prefix is to be the more recently used.
        for start in range((len(pages) - 1) // SETTLED_AT_ONCE * SETTLED_AT_ONCE, -1, -SETTLED_AT_ONCE):
            part = pages[start : start + SETTLED_AT_ONCE] if len(pages) > SETTLED_AT_ONCE else pages
            self._used.append((index, part, not start))

    def end(self, client_id: int, number: int) -> None:
        """``client_id`` no longer needs what the lease promised; its uses are settled.

        Raises StaleReference: the lease is not ``client_id``'s or is gone.
        """
        held = self.all.get(number)
        if held is None or held.client_id != client_id:
            raise StaleReference(f"lease {number} is gone")
        mine = self._of[client_id]
        del self.all[number], mine[number]
        if not mine:
            del self._of[client_id]
        self._weigh(client_id, held.namespace.tenant, -held.weight)
        broken = self._broken
        for page in held.pages:
            if broken and self._is_broken(held, page):
                before, left = broken[page]
                if left > 1:
                    broken[page] = before, left - 1
                else:
                    del broken[page]
            else:
                page.leases -= 1

    def _is_broken(self, held: Lease, page: Page) -> bool:
        return held.number <= self._broken.get(page, (0, 0))[0]

    @property
    def unsettled(self) -> bool:
        return bool(self._used)

    def settle_some(self, now: float) -> None:
        """Tell of a bounded number of uses; pages that have left meanwhile are left out."""
        if self._used:
            index, pages, begins = self._used.popleft()
            used = []
            for page in pages:
                if page.present:
                    page.used = now
                    used.append(page)
            index.use(used, with_prefix=begins)

    def pages(self, client_id: int, number: int) -> list[Page]:
        held = self.all.get(number)
        return self._promised(held) if held is not None and held.client_id == client_id else []

    def _promised(self, held: Lease) -> list[Page]:
        if not self._broken:
            return list(held.pages)
        return [page for page in held.pages if not self._is_broken(held, page)]

    def of(self, client_id: int) -> list[int]:
        return list(self._of.get(client_id, ()))

    def break_off(self, page: Page) -> None:
        """No lease promises ``page`` any more; those that did find out when they end."""
        if page.leases:
            left = self._broken.get(page, (0, 0))[1] + page.leases
            self._broken[page] = self._given, left
            page.leases = 0

    def held(self, namespace: NamespacePages) -> Iterator[list[Page]]:
        """What the leases on pages of ``namespace`` promise, one after the other."""
        return (self._promised(lease) for lease in self.all.values() if lease.namespace is namespace)

    def by_namespace(self) -> Counter[int]:
        """How many leases there are on pages of each namespace, by its number."""
        return Counter(lease.namespace.number for lease in self.all.values())
