"""Which pages the pool holds, and how they hang together.

A page is known by its key within a namespace.  It is either being written (promised to one writer) or
present (committed, readable); a key that is not here is absent.  Pages know their parent, the page of the
block before, so that a suffix can leave before its prefix.  Memory is bounded: one small object a page, and
one a missing prefix for as long as something hangs on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from ems.pool.keys import NO_PARENT, Tail
from ems.pool.layout import PageRef

_NOWHERE = b""
MAX_TAILS = 32
"""Tails that one directory lists; the oldest leaves the list first."""


class Page:
    """One page: where it lies, who holds it, and its neighbours in the recency list.

    ``ref`` says where the page lies in the form that travels (a packed :class:`PageRef`).  ``leases``
    counts readers that were promised the page, ``suffixes`` are the pages whose prefix it is: none, one, or a
    set of several; the page may not be evicted while there is any of either.
    """

    __slots__ = ("key", "leases", "newer", "older", "parent", "present", "ref", "suffixes", "tail")

    def __init__(self, key: bytes, ref: bytes) -> None:
        self.key = key
        self.ref = ref
        self.present = False
        self.leases = 0
        self.suffixes: Page | set[Page] | None = None
        self.parent: Page | None = None
        self.older: Page | None = None
        self.newer: Page | None = None
        self.tail: Tail | None = None

    @property
    def segment(self) -> int:
        """Number of the segment that the page lies in."""
        return PageRef.unpack(self.ref).segment

    def children(self) -> Collection[Page]:
        """The pages whose prefix this one is."""
        suffixes = self.suffixes
        if suffixes is None:
            return ()
        return (suffixes,) if isinstance(suffixes, Page) else suffixes

    def hang_on(self, parent: Page) -> None:
        """``parent`` is the prefix of this page, which had none."""
        self.parent = parent
        if parent.suffixes is None:
            parent.suffixes = self
        elif isinstance(parent.suffixes, Page):
            parent.suffixes = {parent.suffixes, self}
        else:
            parent.suffixes.add(self)

    def let_go(self, parent: Page) -> None:
        """``parent`` is no longer the prefix of this page."""
        self.parent = None
        suffixes = parent.suffixes
        if not isinstance(suffixes, set):
            parent.suffixes = None
            return
        suffixes.remove(self)
        if len(suffixes) == 1:
            parent.suffixes = suffixes.pop()

    def ancestors(self) -> Iterator[Page]:
        """The page's prefix, nearest first; missing ones among them."""
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
        self._bring(page, page)

    def touch_all(self, pages: list[Page]) -> None:
        """Make ``pages`` of the list the newest ones, the first of them the newest of all.

        Pages that lie side by side already, as those of one prefix do, move together: that costs a tenth.
        """
        if not pages:
            return
        if [page.older for page in pages[:-1]] == pages[1:]:
            self._bring(pages[0], pages[-1])
            return
        pages = list(dict.fromkeys(pages))
        olders = [page.older for page in pages]
        last = len(pages) - 1
        for position in range(last, 0, -1):
            if olders[position - 1] is not pages[position]:
                self._bring(pages[position], pages[last])
                last = position - 1
        self._bring(pages[0], pages[last])

    def _bring(self, newest: Page, oldest: Page) -> None:
        if newest is not self._newest:
            self._move(newest, oldest)

    def _move(self, newest: Page, oldest: Page) -> None:
        """Put the run of pages from ``oldest`` to ``newest`` behind the newest page, which is not one of them."""
        before, after = oldest.older, newest.newer
        assert after is not None
        assert self._newest is not None
        after.older = before
        if before is None:
            self._oldest = after
        else:
            before.newer = after
        oldest.older = self._newest
        self._newest.newer = oldest
        newest.newer = None
        self._newest = newest


class Index:
    """The pages of one namespace by key, and the order in which they were used.

    What always holds: present pages are in the recency list and no others; a page's parent is the page of the
    block before, also when that one is being written or missing, and no page is its own ancestor; a missing
    page is remembered only while others hang on it; a page is in a directory of tails only while it is here.
    """

    __slots__ = ("_missing", "_pages", "_tails", "recency")

    def __init__(self) -> None:
        self._pages: dict[bytes, Page] = {}
        self._missing: dict[bytes, Page] = {}
        self._tails: dict[bytes, list[Page]] = {}
        self.recency = Recency()

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    @property
    def missing(self) -> int:
        """How many prefixes are remembered only because something hangs on them."""
        return len(self._missing)

    def get(self, key: bytes) -> Page | None:
        """The page of ``key``, present or being written."""
        return self._pages.get(key)

    def insert(self, key: bytes, ref: bytes, before: bytes) -> Page:
        """Add a page that is about to be written at ``ref``, the one after the page of the key ``before``."""
        page = self._missing.pop(key, None)
        if page is None:
            page = Page(key, ref)
        else:
            page.ref = ref
        self._pages[key] = page
        if page.parent is None and before != NO_PARENT:
            self._hang(page, before)
        return page

    def list_tail(self, page: Page, tail: Tail) -> None:
        """Let ``page``, which was inserted just now, be found by the tokens of ``tail``."""
        page.tail = tail
        listed = self._tails.setdefault(tail.directory, [])
        listed.append(page)
        if len(listed) > MAX_TAILS:
            listed.pop(0).tail = None

    def find_tail(self, tail: Tail) -> tuple[Page | None, int, bool]:
        """The present page that shares most leading tokens with ``tail``, and how many.

        The third answer is whether a page that is being written shares more.
        """
        best: Page | None = None
        most = expected = 0
        for page in self._tails.get(tail.directory, ()):
            assert page.tail is not None
            shared = page.tail.common(tail.tokens)
            if not page.present:
                expected = max(expected, shared)
            elif shared > most:
                best, most = page, shared
        return best, most, expected > most

    def _hang(self, page: Page, before: bytes) -> None:
        parent = self._pages.get(before) or self._missing.get(before)
        if parent is None:
            parent = self._missing[before] = Page(before, _NOWHERE)
        # Honest keys name their whole prefix and cannot form a ring; a page that others hang on can be made to.
        elif parent is page or (page.suffixes is not None and page in parent.ancestors()):
            return
        page.hang_on(parent)

    def publish(self, pages: list[Page]) -> None:
        """Written pages, in the order of their blocks, become readable and the most recently used."""
        for page in reversed(pages):
            page.present = True
            self.recency.add(page)
        for page in pages:
            if page.suffixes is None:
                self.use([page])

    def discard(self, page: Page) -> None:
        """Forget a page that nobody reads; where others hang on it, that it is missing is remembered."""
        del self._pages[page.key]
        if page.tail is not None:
            listed = self._tails[page.tail.directory]
            listed.remove(page)
            if not listed:
                del self._tails[page.tail.directory]
            page.tail = None
        if page.present:
            self.recency.remove(page)
            page.present = False
        if page.suffixes is not None:
            page.ref = _NOWHERE
            self._missing[page.key] = page
            return
        while (parent := page.parent) is not None:
            page.let_go(parent)
            if parent.suffixes is not None or self._missing.get(parent.key) is not parent:
                return
            del self._missing[parent.key]
            page = parent

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
        """Present pages of one prefix, in order, were used: they and what they hang on become the most recent."""
        if not pages:
            return
        prefix = [page for page in pages[0].ancestors() if page.present]
        self.recency.touch_all([*reversed(prefix), *pages])

    def check(self) -> list[str]:
        """What does not hold, one sentence each; empty when all is well."""
        known = {id(page): page for page in chain(self._pages.values(), self._missing.values())}
        children: dict[int, set[Page]] = {}
        for page in known.values():
            if page.parent is not None:
                children.setdefault(id(page.parent), set()).add(page)
        broken = [
            f"page {page.key.hex()} has {len(page.children())} suffixes, expected {len(children.get(number, ()))}"
            for number, page in known.items()
            if set(page.children()) != children.get(number, set())
        ]
        broken += [
            f"the prefix of page {page.key.hex()} left before it"
            for page in known.values()
            if page.parent is not None and id(page.parent) not in known
        ]
        broken += [
            f"missing page {page.key.hex()} is nobody's prefix"
            for page in self._missing.values()
            if page.suffixes is None or page.present
        ]
        broken += [
            f"tail {page.key.hex()} is listed and not here"
            for listed in self._tails.values()
            for page in listed
            if self._pages.get(page.key) is not page or page.tail is None
        ]
        broken += [f"page {key.hex()} is both here and missing" for key in self._pages.keys() & self._missing.keys()]
        listed = {id(page) for page in self.recency}
        if listed != {id(page) for page in self if page.present} or len(listed) != self.recency.count:
            broken.append("the pages in order of use are not the present pages")
        return broken
