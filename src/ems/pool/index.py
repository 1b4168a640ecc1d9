"""Which pages the pool holds, and how they hang together.

A page is known by its key within a namespace.  It is either being written (promised to one writer) or
present (committed, readable); a key that is not here is absent.  Pages know their parent, the page of the
block before, so that a suffix can leave before its prefix.  Memory is bounded: one small object a page.
"""

from __future__ import annotations

from collections.abc import Iterator

from ems.pool.layout import PageRef


class Page:
    """One page: where it lies, who holds it, and its neighbours in the recency list.

    ``ref`` says where the page lies in the form that travels (a packed :class:`PageRef`).  ``leases``
    counts readers that were promised the page, ``children`` the pages whose prefix it is; the page may not be
    evicted while either is above zero.
    """

    __slots__ = ("children", "key", "leases", "newer", "older", "parent", "present", "ref")

    def __init__(self, key: bytes, ref: bytes) -> None:
        self.key = key
        self.ref = ref
        self.present = False
        self.leases = 0
        self.children = 0
        self.parent: Page | None = None
        self.older: Page | None = None
        self.newer: Page | None = None

    @property
    def segment(self) -> int:
        """Number of the segment that the page lies in."""
        return PageRef.unpack(self.ref).segment

    def ancestors(self) -> Iterator[Page]:
        """The page's prefix, nearest first."""
        page = self.parent
        while page is not None:
            yield page
            page = page.parent


class Recency:
    """Pages from the least to the most recently used, as a linked list through the pages themselves."""

    __slots__ = ("_newest", "_oldest", "count")

    def __init__(self) -> None:
        self._oldest: Page | None = None
        self._newest: Page | None = None
        self.count = 0

    def __iter__(self) -> Iterator[Page]:
        page = self._oldest
        while page is not None:
            following = page.newer
            yield page
            page = following

    @property
    def oldest(self) -> Page | None:
        """The page that was not used for longest."""
        return self._oldest

    def add(self, page: Page) -> None:
        """Put a page that is not in the list at its newest end."""
        page.older = self._newest
        page.newer = None
        if self._newest is None:
            self._oldest = page
        else:
            self._newest.newer = page
        self._newest = page
        self.count += 1

    def remove(self, page: Page) -> None:
        """Take a page out of the list."""
        if page.older is None:
            self._oldest = page.newer
        else:
            page.older.newer = page.newer
        if page.newer is None:
            self._newest = page.older
        else:
            page.newer.older = page.older
        page.older = page.newer = None
        self.count -= 1

    def touch(self, page: Page) -> None:
        """Make a page of the list the newest one."""
        if page is not self._newest:
            self.remove(page)
            self.add(page)


class Index:
    """The pages of one namespace by key, and the order in which they were used.

    What always holds: present pages are in the recency list and no others, and a page's parent, where it has
    one, is present.
    """

    __slots__ = ("_pages", "recency")

    def __init__(self) -> None:
        self._pages: dict[bytes, Page] = {}
        self.recency = Recency()

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def get(self, key: bytes) -> Page | None:
        """The page of ``key``, present or being written."""
        return self._pages.get(key)

    def insert(self, page: Page) -> None:
        """Add a page that is about to be written."""
        self._pages[page.key] = page

    def publish(self, page: Page, parent: Page | None) -> None:
        """A written page becomes readable and the most recently used; ``parent`` is its prefix if present."""
        page.present = True
        if parent is not None and parent.present:
            page.parent = parent
            parent.children += 1
        self.recency.add(page)

    def discard(self, page: Page) -> None:
        """Forget a page that nobody holds and that is no page's prefix."""
        del self._pages[page.key]
        if page.present:
            self.recency.remove(page)
            page.present = False
        if page.parent is not None:
            page.parent.children -= 1
            page.parent = None

    def leading(self, keys: list[bytes]) -> list[Page]:
        """The present pages of the longest prefix of ``keys`` that is present without a gap."""
        found: list[Page] = []
        get = self._pages.get
        for key in keys:
            page = get(key)
            if page is None or not page.present:
                break
            found.append(page)
        return found

    def pending(self, keys: list[bytes], start: int) -> int:
        """How many of ``keys`` from ``start`` on are, without a gap, present or being written."""
        get = self._pages.get
        count = 0
        for key in keys[start:]:
            if get(key) is None:
                break
            count += 1
        return count

    def use(self, pages: list[Page]) -> None:
        """Pages of one prefix, in order, were used: they and what they hang on become the most recent."""
        if not pages:
            return
        touch = self.recency.touch
        for page in reversed(pages):
            touch(page)
        for page in pages[0].ancestors():
            touch(page)
