"""Which of the pool's blocks this engine has told others about, and what it has to tell next (KV events).

A brain: it hears which blocks the engine offers or finds, and what the node stored and removed, in any order, and
answers with what became true.  What always holds: a block is told of only while all its pages are in the pool as far as
the node has told; each telling is followed by one taking back at most, and no block is told of twice in between;
memory is bounded by :data:`MOST_BLOCKS` and :data:`MOST_STRAYS`, and who must be forgotten is taken back first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

import msgspec

from ems.pool.core.changes import Run
from ems.pool.keys import KEY_BYTES

MOST_BLOCKS = 65536
"""Blocks that are followed at a time."""
MOST_STRAYS = 65536
"""Pages that the node stored and that belong to no block known here yet: they may have come before their offer."""

Page = tuple[int, bytes]
"""A plane's number and a key."""


class Block(msgspec.Struct, frozen=True):
    """A full block of one KV cache group as the engine names it; ``parent`` is the name of the block before."""

    name: Hashable
    group: int
    parent: Hashable | None
    tokens: tuple[int, ...]
    extra: object = None


class Stored(msgspec.Struct, frozen=True):
    """All pages of the block are in the pool."""

    block: Block


class Removed(msgspec.Struct, frozen=True):
    """The block ``name`` of ``group`` is no longer whole in the pool."""

    name: Hashable
    group: int


Tidings = Stored | Removed


class _Followed:
    __slots__ = ("block", "group", "missing", "name", "pages")

    def __init__(self, block: Block, pages: Collection[Page]) -> None:
        self.name = block.name
        self.group = block.group
        self.block: Block | None = block
        self.pages = tuple(pages)
        self.missing = set(pages)

    @property
    def told(self) -> bool:
        return self.block is None


class Announced:
    """The blocks of one engine."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, Hashable], _Followed] = {}
        self._by_page: dict[Page, _Followed] = {}
        self._strays: dict[Page, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def offered(self, blocks: Iterable[tuple[Block, Sequence[Page]]], *, present: bool = False) -> list[Tidings]:
        """The engine offers blocks for saving, each with its pages, or found them in the pool (``present``)."""
        tidings: list[Tidings] = []
        for block, pages in blocks:
            followed = self._blocks.get((block.group, block.name))
            if followed is None:
                followed = self._follow(block, pages, tidings)
            if present:
                followed.missing.clear()
            else:
                self._claim(followed)
            self._tell(followed, tidings)
        return tidings

    def changed(self, runs: Iterable[Run]) -> list[Tidings]:
        """The node stored and removed pages; ``namespace`` of a run is the number of a plane."""
        tidings: list[Tidings] = []
        for run in runs:
            for at in range(0, len(run.keys), KEY_BYTES):
                page = (run.namespace, run.keys[at : at + KEY_BYTES])
                (self._stored if run.stored else self._removed)(page, tidings)
        return tidings

    def withdraw(self) -> list[Tidings]:
        """Nothing is known for certain any more: take back all."""
        taken: list[Tidings] = [Removed(one.name, one.group) for one in self._blocks.values() if one.told]
        self._blocks.clear()
        self._by_page.clear()
        self._strays.clear()
        return taken

    def _follow(self, block: Block, pages: Sequence[Page], tidings: list[Tidings]) -> _Followed:
        if len(self._blocks) >= MOST_BLOCKS:
            self._forget(next(iter(self._blocks.values())), tidings)
        followed = self._blocks[block.group, block.name] = _Followed(block, pages)
        for page in pages:
            self._by_page[page] = followed
        return followed

    def _claim(self, followed: _Followed) -> None:
        for page in [page for page in followed.missing if page in self._strays]:
            del self._strays[page]
            followed.missing.discard(page)

    def _stored(self, page: Page, tidings: list[Tidings]) -> None:
        followed = self._by_page.get(page)
        if followed is not None:
            followed.missing.discard(page)
            self._tell(followed, tidings)
        else:
            self._stray(page)

    def _stray(self, page: Page) -> None:
        if len(self._strays) >= MOST_STRAYS:
            del self._strays[next(iter(self._strays))]
        self._strays[page] = None

    def _removed(self, page: Page, tidings: list[Tidings]) -> None:
        self._strays.pop(page, None)
        followed = self._by_page.get(page)
        if followed is None:
            return
        followed.missing.add(page)
        if followed.told:
            self._forget(followed, tidings)

    def _tell(self, followed: _Followed, tidings: list[Tidings]) -> None:
        if followed.block is not None and not followed.missing:
            tidings.append(Stored(followed.block))
            # Its tokens are not needed to take it back.
            followed.block = None

    def _forget(self, followed: _Followed, tidings: list[Tidings]) -> None:
        if followed.told:
            tidings.append(Removed(followed.name, followed.group))
        del self._blocks[followed.group, followed.name]
        for page in followed.pages:
            self._by_page.pop(page, None)
            if page not in followed.missing:
                self._stray(page)
