"""What readers and writers hold: leases and reservations, apart from the rest of the brain."""

from __future__ import annotations

from math import inf

import pytest

from ems.errors import StaleReference
from ems.pool.core.leases import Leases
from ems.pool.core.namespaces import NamespacePages
from ems.pool.core.reservations import Reservation, Reservations
from ems.pool.layout import REF_BYTES
from ems.pool.pages import Page
from tests.pool.brain import chain
from tests.pool.wrong_core import wrong_leases, wrong_reservations

KEYS = chain("x", 4)


def ns(*, present: bool = True) -> tuple[NamespacePages, list[Page]]:
    namespace = NamespacePages(0, "a", 64, 0.0, "lru")
    before, pages = bytes(16), []
    for number, key in enumerate(KEYS):
        pages.append(namespace.index.insert(key, bytes([number]) * REF_BYTES, before))
        before = key
    if present:
        namespace.index.publish(pages)
    else:
        namespace.writing = len(pages)
    return namespace, pages


def test_a_page_counts_the_leases_that_promise_it() -> None:
    namespace, pages = ns()
    leases = Leases()
    leases.promise(1, 7, namespace, pages[:3], weighs=True)
    leases.use(namespace.index, pages[:3])
    leases.promise(2, 8, namespace, pages[:1], weighs=False)
    assert [page.leases for page in pages] == [2, 1, 1, 0]
    assert (len(leases), leases.of(7), leases.pages(7, 1), leases.pages(8, 1)) == (2, [1], pages[:3], [])
    assert sum(len(held) for held in leases.held(namespace)) == 4
    leases.break_off(pages[0])
    assert (leases.pages(7, 1), leases.pages(8, 2), pages[0].leases) == (pages[1:3], [], 0)
    assert wrong_leases(leases, [namespace]) == []
    with pytest.raises(StaleReference):
        leases.end(8, 1)
    leases.end(7, 1)
    leases.end(8, 2)
    assert [page.leases for page in pages] == [0, 0, 0, 0]


def test_uses_are_settled_once() -> None:
    namespace, pages = ns()
    leases = Leases()
    leases.promise(1, 7, namespace, pages[:2], weighs=True)
    leases.use(namespace.index, pages[:2])
    leases.promise(2, 7, namespace, pages[2:], weighs=False)
    leases.settle_some(5.0)
    leases.settle_some(6.0)
    assert [page.used for page in pages] == [5.0, 5.0, 0.0, 0.0]


def test_leases_that_do_not_add_up_are_noticed() -> None:
    namespace, pages = ns()
    leases = Leases()
    leases.promise(1, 7, namespace, pages[:1], weighs=False)
    pages[3].leases += 1
    namespace.index.discard(pages[3])
    namespace.index.discard(pages[2])
    pages[0].leases = 5
    assert wrong_leases(leases, [namespace]) == [f"page {KEYS[0].hex()} counts 5 leases, expected 1"]


def test_a_commit_takes_all_that_it_names_or_nothing() -> None:
    namespace, pages = ns(present=False)
    reservations = Reservations()
    reservations.promise(1, Reservation(7, namespace, dict(enumerate(pages)), None, inf))
    with pytest.raises(StaleReference, match="no page 9"):
        reservations.take(7, 1, [0, 9])
    with pytest.raises(StaleReference, match="reserve again"):
        reservations.take(8, 1, None)
    assert list(reservations.waiting(namespace)) == pages
    assert reservations.take(7, 1, [2, 0]) == (namespace, [pages[0], pages[2]])
    assert reservations.take(7, 1, None) == (namespace, [pages[1], pages[3]])
    assert (len(reservations), reservations.of(7)) == (0, [])
    assert wrong_reservations(reservations, [namespace]) == ["a page is being written that no reservation holds"]
