"""What a pool asks of an eviction policy, and nothing more.

A policy is told what happens to the present pages of one namespace and names the one that should leave first.  What
always holds: it orders exactly the pages that were added and not removed; equal histories give equal answers; no call
costs more than the pages that it names, beyond work that is shared by very many calls; what it remembers of pages that
left is bounded by the capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from ems.config import PolicyName
from ems.pool.pages import Page
from ems.pool.policy.forecast import Forecast
from ems.pool.policy.queue import Lru
from ems.pool.policy.scan_resistant import Arc, S3Fifo


class Policy(Protocol):
    """The order in which the pages of one namespace leave.

    Lists of pages are consecutive blocks of one prompt, the prefix first.
    """

    def resize(self, capacity: int) -> None:
        """The namespace has slots for ``capacity`` pages from now on."""

    def add(self, pages: list[Page]) -> None:
        """Pages that were absent became readable."""

    def use(self, pages: list[Page]) -> None:
        """Pages were loaded."""

    def refresh(self, pages: list[Page]) -> None:
        """Something was hung on the last of ``pages``: they are in use, though nobody loaded them."""

    def spare(self, page: Page) -> None:
        """The page that :meth:`first` named stays for now: name another."""

    def ready(self, page: Page) -> None:
        """The last page that hung on ``page`` has left."""

    def remove(self, page: Page) -> None: ...

    def first(self) -> Page | None: ...

    def __iter__(self) -> Iterator[Page]:
        """All pages, about in the order in which they would leave."""

    def __len__(self) -> int: ...


_POLICIES: dict[PolicyName, Callable[[], Policy]] = {"forecast": Forecast, "lru": Lru, "s3fifo": S3Fifo, "arc": Arc}


def make_policy(name: PolicyName) -> Policy:
    return _POLICIES[name]()
