"""The namespaces of one node: which there are, and whether one more may be.

What always holds: a namespace keeps its number, its name and the size of its pages for as long as the node runs, so a
number that a client was given never comes to mean other pages.
"""

from __future__ import annotations

from collections.abc import Iterator

from ems.config import PolicyName
from ems.errors import NoSpace, PoolRefused, StaleReference
from ems.pool.core.index import Index
from ems.pool.core.pins import PinSet
from ems.pool.layout import MAX_PAGE, carve
from ems.pool.names import MAX_NAME, tenant_of
from ems.pool.policy.seam import make_policy
from ems.pool.segments.recovery import MAX_SLOTS

MAX_NAMESPACES = 4096
"""Most namespaces of one node; more than any host's models and layouts, few enough to be walked."""


class NamespacePages:
    """One namespace: its pages, how many of them are being written, when it was used last."""

    def __init__(self, number: int, name: str, page_size: int, now: float, policy: PolicyName) -> None:
        self.number = number
        self.name = name
        self.tenant = tenant_of(name)
        self.page_size = page_size
        self.index = Index(make_policy(policy))
        self.pins = PinSet(self.tenant)
        self.writing = 0
        self.last_used = now
        self.debt = 0
        """Pages still to be evicted since the high watermark was reached."""
        self.denied = False
        """Whether no segment of another namespace could be emptied; not tried again before the next tick."""


class Namespaces:
    """All namespaces, in the order in which they were made, which is that of their numbers."""

    def __init__(self, policy: PolicyName) -> None:
        self._policy = policy
        self._all: list[NamespacePages] = []
        self._by_name: dict[str, NamespacePages] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[NamespacePages]:
        return iter(self._all)

    def __getitem__(self, number: int) -> NamespacePages:
        return self._all[number]

    def opened(self, number: int) -> NamespacePages:
        """The namespace of that number, which a client named.  Raises StaleReference: there is none."""
        if not 0 <= number < len(self._all):
            raise StaleReference(f"namespace {number} is not open, open it again")
        return self._all[number]

    def named(self, name: str) -> NamespacePages | None:
        return self._by_name.get(name)

    def pages_of(self, name: str) -> int:
        """How many pages the namespace of that name has, written or not; 0 when it is not there."""
        known = self.named(name)
        return 0 if known is None else len(known.index)

    def add(self, name: str, page_size: int, now: float) -> NamespacePages:
        namespace = NamespacePages(len(self._all), name, page_size, now, self._policy)
        self._all.append(namespace)
        self._by_name[name] = namespace
        return namespace

    def unopened(self, name: str, page_size: int, now: float) -> NamespacePages:
        """What the namespace ``name`` would be if somebody opened it."""
        return NamespacePages(-1, name, page_size, now, self._policy)

    def refuse_unfit(self, name: str, page_size: int, largest: int) -> None:
        """Refuse a namespace that cannot be opened where the largest segment has ``largest`` bytes.

        Raises:
            NoSpace: no segment can ever hold such a page.
            PoolRefused: the name is unfit, or there are too many namespaces, or too many such pages in a segment.
        """
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise PoolRefused(
                f"a namespace is called {name[:40]!r} ({len(name)} characters), expected 1 to {MAX_NAME} printable ones"
            )
        if len(self._all) >= MAX_NAMESPACES:
            raise PoolRefused(f"this node has {MAX_NAMESPACES} namespaces and takes no more, restart it to begin anew")
        if not 0 < page_size <= MAX_PAGE or carve(largest, page_size).slot_count == 0:
            raise NoSpace(
                f"a page of {page_size} bytes does not fit in a segment of {largest} bytes, "
                "start the node with a larger --size or --segment-size, or use a smaller block size"
            )
        if carve(largest, page_size).slot_count > MAX_SLOTS:
            raise PoolRefused(
                f"a segment of {largest} bytes would hold more than {MAX_SLOTS} pages of {page_size} bytes, use a "
                "larger block size, or start the node with a smaller --segment-size"
            )
