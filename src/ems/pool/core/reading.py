"""What readers do: they look pages up, are promised them by leases, and ask why some are missing.

What always holds: a lookup finds present pages without a gap; a page that it promises stays where it is until the lease
ends; without a lease it leaves no trace but in the figures.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from ems.errors import PoolRefused
from ems.pool.pages import Page, packed_refs
from ems.pool.protocol.messages import Explained
from ems.pool.reasons.misses import Look

if TYPE_CHECKING:
    from ems.pool.core.namespaces import NamespacePages
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.keys import Tail


class Found(msgspec.Struct, frozen=True):
    """Answer to a lookup: the leading present pages, how many keys follow being written or present, a lease.

    ``code`` says why the first missing key is missing, see :class:`ems.pool.reasons.words.Reason`.
    """

    pages: list[Page]
    pending: int
    lease: int
    code: int = 0
    refs: bytes = b""
    """Where the pages lie that are leased."""


class Reading:
    """The readers of one node."""

    def __init__(self, state: PoolCore) -> None:
        self._state = state

    def lookup(self, client_id: int, namespace: int, keys: list[bytes], *, lease: bool, request: str = "") -> Found:
        """The pages of the longest present prefix of ``keys``, looked for by the engine's ``request``.

        With ``lease`` they are promised to ``client_id`` and count as used (see :meth:`PoolCore.settle`); without,
        the call leaves no trace but in the figures.
        """
        ns = self._state.namespaces.opened(namespace)
        pages = self._leading(ns, keys)
        pending = ns.index.pending(keys, len(pages)) if len(pages) < len(keys) else 0
        code = self._count(ns, len(keys), len(pages), keys[len(pages)] if len(pages) < len(keys) else b"", request)
        if not lease or not pages:
            return Found(pages, pending, 0, code)
        number = self._lease(client_id, ns, pages)
        self._state.leases.use(ns.index, pages)
        return Found(pages, pending, number, code, packed_refs(pages))

    def lookup_in_steps(
        self, client_id: int, namespace: int, parts: Iterator[list[bytes]], asked: int, *, lease: bool, request: str
    ) -> Generator[None, None, Found]:
        """As :meth:`lookup` does of all ``parts`` of ``asked`` keys, a part in each step; what is found stays found."""
        ns = self._state.namespaces.opened(namespace)
        pages: list[Page] = []
        refs: list[bytes] = []
        number, rest = 0, list[bytes]()
        for part in parts:
            here = self._leading(ns, part)
            if lease and here:
                if not number:
                    number = self._lease(client_id, ns, here)
                else:
                    here = self._lease_more(client_id, number, ns, here)
                refs.append(packed_refs(here))
            pages += here
            rest = part[len(here) :]
            if rest:
                break
            yield
        missing, pending = rest[0] if rest else b"", 0
        while rest:
            more = ns.index.pending(rest, 0)
            pending += more
            rest = next(parts, []) if more == len(rest) else []
            yield
        if number:
            self._state.leases.use(ns.index, pages)
        code = self._count(ns, asked, len(pages), missing, request)
        return Found(pages, pending, number, code, b"".join(refs))

    def _leading(self, namespace: NamespacePages, keys: list[bytes]) -> list[Page]:
        pages, leaving = namespace.index.leading(keys), self._state.pending_deletes
        return list(takewhile(lambda page: page not in leaving, pages)) if leaving else pages

    def _count(self, namespace: NamespacePages, asked: int, found: int, missing: bytes, request: str) -> int:
        """Count a lookup that found so many keys and then ``missing``, if any; why that is missing, as a code."""
        state, code = self._state, 0
        if missing:
            code = state.reasons.missed(namespace.number, namespace.name, namespace.index.pages, missing)
        state.counters.lookups += 1
        state.counters.keys_looked_up += asked
        state.counters.keys_hit += found
        if request:
            state.reasons.requests.looked(request, Look(namespace.name, asked, found, code, missing, state.now))
        return code

    def lookup_tail(self, client_id: int, namespace: int, tail: Tail, *, lease: bool) -> tuple[int, Found]:
        """How many leading tokens of ``tail`` a page of its directory holds, and that page, as :meth:`lookup` does."""
        ns = self._state.namespaces.opened(namespace)
        page, shared, pending = ns.index.find_tail(tail)
        if page is None or page in self._state.pending_deletes:
            return 0, Found([], int(pending), 0)
        self._state.counters.tails_hit += 1
        if not lease:
            return shared, Found([page], int(pending), 0)
        number = self._lease(client_id, ns, [page])
        self._state.leases.use(ns.index, [page])
        return shared, Found([page], int(pending), number, 0, page.ref)

    def missed_namespace(self, name: str, asked: int, request: str = "") -> int:
        """``asked`` keys were to be looked up in the namespace ``name``, which is not there; why, as a code."""
        self._state.counters.lookups += 1
        self._state.counters.keys_looked_up += asked
        code = self._state.reasons.missed_namespace(name)
        if request:
            self._state.reasons.requests.looked(request, Look(name, asked, 0, code, b"", self._state.now))
        return code

    def _lease(self, client_id: int, namespace: NamespacePages, pages: list[Page]) -> int:
        self._state.leases.refuse_too_many(client_id, namespace, len(pages))
        number = self._state.new_id()
        namespace.last_used = self._state.now
        self._state.leases.promise(number, client_id, namespace, pages, weighs=True)
        return number

    def _lease_more(self, client_id: int, number: int, namespace: NamespacePages, pages: list[Page]) -> list[Page]:
        leases = self._state.leases
        try:
            leases.refuse_too_many(client_id, namespace, len(pages))
        except PoolRefused:
            leases.end(client_id, number)
            raise
        return leases.add(number, pages)

    def release(self, client_id: int, lease: int) -> None:
        """``client_id`` no longer needs what ``lease`` promised.

        Raises StaleReference: the lease is not ``client_id``'s or is gone.
        """
        self._state.settle_some()
        self._state.leases.end(client_id, lease)

    def hold(self, client_id: int, namespace: int, keys: Sequence[bytes]) -> tuple[int, list[Page]]:
        """Promise ``client_id`` those of ``keys`` that are present, which is no use: the lease and the pages."""
        ns = self._state.namespaces.opened(namespace)
        pages = [page for page in map(ns.index.get, keys) if page is not None and page.present]
        if not pages:
            return 0, []
        number = self._state.new_id()
        self._state.leases.promise(number, client_id, ns, pages, weighs=False)
        return number, pages

    def explain(self, name: str, keys: list[bytes]) -> Explained:
        state = self._state
        ns = state.namespaces.named(name)
        number, index = (-1, None) if ns is None else (ns.number, ns.index.pages)
        return state.reasons.explain(number, name, index, keys, state.now, lambda one: state.namespaces[one].name)
