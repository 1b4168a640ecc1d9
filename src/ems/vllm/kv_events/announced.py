"""Which of the pool's blocks this engine has told others about, and what it has to tell next (KV events).

A brain.  It hears in any order which blocks the engine offers or finds and which pages the node stored or removed, and
returns the events to publish.  What always holds: the blocks of a chunk are announced only while the pool has all its
pages, as far as the node has said; between two announcements of a block there is one removal; memory is bounded by
:data:`MOST_CHUNKS` and :data:`MOST_STRAYS`, and the removal of a block that must be forgotten is published first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

import msgspec

from ems.pool.keys import KEY_BYTES
from ems.pool.protocol.messages import ChangeRun

MOST_CHUNKS = 65536
"""Chunks that are followed at a time."""
MOST_STRAYS = 65536
"""Stored pages of blocks that are not known yet: a page can be reported before its block is offered."""

Page = tuple[int, bytes]
"""A plane's number and a key."""


class Chunk(msgspec.Struct, frozen=True):
    """Full blocks of one KV cache group in a row, by the engine's ``names``; the block before is ``parent``."""

    group: int
    names: tuple[Hashable, ...]
    parent: Hashable | None = None
    tokens: tuple[int, ...] = ()
    extra: tuple[object, ...] = ()
    """What else names each block."""
    adapter: tuple[int, str] | None = None
    """Number and name of the LoRA adapter that computed them."""


class BlockEvent(msgspec.Struct, frozen=True):
    """All pages of the chunk are in the pool (``stored``), or no longer; then it has its group and names only."""

    chunk: Chunk
    stored: bool


class _Followed:
    """A chunk of which others have been told, or will be once none of its ``pages`` is ``missing``."""

    __slots__ = ("announced", "chunk", "missing", "pages")

    def __init__(self, chunk: Chunk, pages: Collection[Page]) -> None:
        self.chunk = chunk
        self.pages = tuple(pages)
        self.missing = set(pages)
        self.announced = False


class Announced:
    """The blocks of one engine, chunk by chunk."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[int, Hashable], _Followed] = {}
        """By group, and name of the last block."""
        self._by_page: dict[Page, _Followed] = {}
        self._strays: dict[Page, None] = {}

    def offered(self, chunks: Iterable[tuple[Chunk, Sequence[Page]]], *, present: bool = False) -> list[BlockEvent]:
        """The engine offers chunks for saving, each with its pages, or found them in the pool (``present``)."""
        events: list[BlockEvent] = []
        for chunk, pages in chunks:
            followed = self._chunks.get((chunk.group, chunk.names[-1]))
            if followed is None:
                followed = self._follow(chunk, pages, events)
            if present:
                followed.missing.clear()
            for page in [page for page in followed.missing if page in self._strays]:
                del self._strays[page]
                followed.missing.discard(page)
            self._announce(followed, events)
        return events

    def changed(self, runs: Iterable[ChangeRun]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for run in runs:
            for at in range(0, len(run.keys), KEY_BYTES):
                page = (run.namespace, run.keys[at : at + KEY_BYTES])
                (self._stored if run.stored else self._removed)(page, events)
        return events

    def withdraw(self) -> list[BlockEvent]:
        taken = [BlockEvent(one.chunk, stored=False) for one in self._chunks.values() if one.announced]
        self._chunks.clear()
        self._by_page.clear()
        self._strays.clear()
        return taken

    def _follow(self, chunk: Chunk, pages: Sequence[Page], events: list[BlockEvent]) -> _Followed:
        if len(self._chunks) >= MOST_CHUNKS:
            self._forget(next(iter(self._chunks.values())), events)
        followed = self._chunks[chunk.group, chunk.names[-1]] = _Followed(chunk, pages)
        for page in pages:
            self._by_page[page] = followed
        return followed

    def _stored(self, page: Page, events: list[BlockEvent]) -> None:
        followed = self._by_page.get(page)
        if followed is not None:
            followed.missing.discard(page)
            self._announce(followed, events)
        else:
            self._stray(page)

    def _stray(self, page: Page) -> None:
        if len(self._strays) >= MOST_STRAYS:
            del self._strays[next(iter(self._strays))]
        self._strays[page] = None

    def _removed(self, page: Page, events: list[BlockEvent]) -> None:
        self._strays.pop(page, None)
        followed = self._by_page.get(page)
        if followed is None:
            return
        followed.missing.add(page)
        if followed.announced:
            self._forget(followed, events)

    def _announce(self, followed: _Followed, events: list[BlockEvent]) -> None:
        if not followed.announced and not followed.missing:
            events.append(BlockEvent(followed.chunk, stored=True))
            followed.announced = True
            # Its tokens are not needed to take it back.
            followed.chunk = Chunk(followed.chunk.group, followed.chunk.names)

    def _forget(self, followed: _Followed, events: list[BlockEvent]) -> None:
        if followed.announced:
            events.append(BlockEvent(followed.chunk, stored=False))
        del self._chunks[followed.chunk.group, followed.chunk.names[-1]]
        for page in followed.pages:
            self._by_page.pop(page, None)
            if page not in followed.missing:
                self._stray(page)
