"""Which pages the pool holds, and how they hang together.

A page is known by its key within a namespace.  It is either being written (promised to one writer) or
present (committed, readable); a key that is not here is absent.  Pages know their parent, the page of the
block before, so that a suffix can leave before its prefix.  Memory is bounded: one small object a page, and
one a missing prefix for as long as something hangs on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from ems.pool.keys import NO_PARENT, Tail
from ems.pool.pages import Page
from ems.pool.policy.queue import Lru
from ems.pool.policy.seam import Policy

_NOWHERE = b""
MAX_TAILS = 32
"""Tails that one directory lists; the oldest leaves the list first."""
MAX_WALK = 4096
"""Pages of a prefix that one call looks at beside those that it names: what is told of a page costs the same however
much it hangs on, and of a longer prefix the beginning is not told that it was used."""
WALK_EACH = 16
"""Pages of prefixes that each inserted page adds to those that may be looked at for rings, up to :data:`MAX_WALK`."""


class Index:
    """The pages of one namespace by key, and the policy that orders them.

    What always holds: present pages are known to the policy and no others; a page's parent is the page of the
    block before, also when that one is being written or missing, and no page is its own ancestor; a missing
    page is remembered only while others hang on it; a page is in a directory of tails only while it is here.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.pages: dict[bytes, Page] = {}
        self._missing: dict[bytes, Page] = {}
        self._tails: dict[bytes, list[Page]] = {}
        self._walk = MAX_WALK
        """Pages that may be looked at for rings until others were inserted."""
        self.policy: Policy = Lru() if policy is None else policy

    def __len__(self) -> int:
        return len(self.pages)

    def __iter__(self) -> Iterator[Page]:
        return iter(self.pages.values())

    def get(self, key: bytes) -> Page | None:
        return self.pages.get(key)

    def insert(self, key: bytes, ref: bytes, before: bytes) -> Page:
        """Add a page that is about to be written at ``ref``, the one after the page of the key ``before``."""
        page = self._missing.pop(key, None) if self._missing else None
        if page is None:
            page = Page(key, ref)
        else:
            page.ref = ref
        self.pages[key] = page
        if self._walk < MAX_WALK:
            self._walk = min(max(self._walk, 0) + WALK_EACH, MAX_WALK)
        if page.parent is None and before != NO_PARENT:
            self._hang(page, before)
        return page

    def restore(self, pages: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        """Present pages as key, where they lie and key of the block before, from the least to the most recently used.

        For an index that is empty.  The keys differ and form no ring.
        """
        told = [(Page(key, ref), before) for key, ref, before in pages]
        restored = [page for page, _ in told]
        self.pages = {page.key: page for page in restored}
        for page, before in told:
            page.present = True
            if before != NO_PARENT:
                page.hang_on(self._here_or_missing(before))
        step = len(restored) // 256 + 1  # pages that the policy is told of together may be taken for equally old
        for at in range(0, len(restored), step):
            self.policy.add(restored[at : at + step][::-1])

    def _here_or_missing(self, key: bytes) -> Page:
        page = self.pages.get(key) or self._missing.get(key)
        if page is None:
            page = self._missing[key] = Page(key, _NOWHERE)
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
        parent = self.pages.get(before) or self._here_or_missing(before)
        # Honest keys name their whole prefix and cannot form a ring; a page that others hang on can be made to.
        if parent is not page and (page.suffixes is None or not self._may_form_a_ring(page, parent)):
            page.hang_on(parent)

    def _may_form_a_ring(self, page: Page, parent: Page) -> bool:
        """Whether ``page`` is, or for all that is known could be, among the prefix of ``parent``."""
        for above in parent.ancestors():
            self._walk -= 1
            if above is page or self._walk < 0:
                return True
        return False

    def publish(self, pages: list[Page]) -> None:
        """Written pages, in the order of their blocks, become readable; what they hang on is in use."""
        for page in pages:
            page.present = True
        self.policy.add(pages)
        tops = [page for before, page in zip([None, *pages], pages, strict=False) if page.parent is not before]
        if not tops:
            return
        seen = set(pages)
        for page in tops:
            # Many that hang on the same prefix do not each go all the way up.
            walk = islice(page.ancestors(), len(pages) + MAX_WALK - len(seen))
            prefix = list(takewhile(lambda above: above not in seen, walk))
            seen.update(prefix)
            prefix = [above for above in reversed(prefix) if above.present]
            if prefix:
                self.policy.refresh(prefix)

    def discard(self, page: Page) -> None:
        """Forget a page that nobody reads; where others hang on it, that it is missing is remembered."""
        del self.pages[page.key]
        if page.tail is not None:
            listed = self._tails[page.tail.directory]
            listed.remove(page)
            if not listed:
                del self._tails[page.tail.directory]
            page.tail = None
        if page.present:
            self.policy.remove(page)
            page.present = False
        if page.suffixes is not None:
            page.ref = _NOWHERE
            self._missing[page.key] = page
            return
        while (parent := page.parent) is not None:
            page.let_go(parent)
            if parent.suffixes is None and parent.present:
                self.policy.ready(parent)
            if parent.suffixes is not None or self._missing.get(parent.key) is not parent:
                return
            del self._missing[parent.key]
            page = parent

    def leading(self, keys: list[bytes]) -> list[Page]:
        """The present pages of the longest prefix of ``keys`` that is present without a gap."""
        found: list[Page] = []
        get = self.pages.get
        for key in keys:
            page = get(key)
            if page is None or not page.present:
                break
            found.append(page)
        return found

    def pending(self, keys: list[bytes], start: int) -> int:
        """How many of ``keys`` from ``start`` on are, without a gap, present or being written."""
        get = self.pages.get
        count = 0
        for key in keys[start:]:
            if get(key) is None:
                break
            count += 1
        return count

    def use(self, pages: list[Page], *, with_prefix: bool = True) -> None:
        """Present pages of one prefix, in order, were used: they and what they hang on."""
        if pages and with_prefix:
            prefix = [above for above in islice(pages[0].ancestors(), MAX_WALK) if above.present]
            pages = [*reversed(prefix), *pages]
        if pages:
            self.policy.use(pages)
