"""Which of the pool's blocks this engine has told others about, and what it has to tell next (KV events).

A brain.  It hears in any order which blocks the engine offers or finds and which pages the node stored or removed, and
where, and returns the events to publish.  What always holds: the blocks of a chunk are announced in a medium only while
that has all its pages, as far as the node has said; an announced block is removed once; memory is bounded by
:data:`MOST_CHUNKS` and :data:`MOST_STRAYS`, and the removal of a block that must be forgotten is published first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import msgspec

from ems.pool.keys import KEY_BYTES
from ems.pool.media import MEDIA
from ems.pool.protocol.messages import ChangeRun

MOST_CHUNKS = 65536
"""Chunks that are followed at a time; their tokens take a kibibyte each."""
MOST_STRAYS = 65536
"""Stored pages of blocks that are not known yet: a page can be reported before its block is offered."""
AGAIN_SECONDS = 30.0
"""What is found so long after it was announced is announced again: a subscriber may have begun or forgotten since."""
_MEMORY = 0
_MEDIA = range(len(MEDIA))

Page = tuple[int, bytes]
"""A plane's number and a key."""


class Chunk(msgspec.Struct, frozen=True):
    """Full blocks of one KV cache group in a row, by the engine's ``names``; the block before is ``parent``."""

    group: int
    names: tuple[Hashable, ...]
    parent: Hashable | None = None
    tokens: bytes = b""
    """4 bytes a token, in this machine's order."""
    extra: tuple[object, ...] = ()
    """What else names each block."""
    adapter: tuple[int, str] | None = None
    """Number and name of the LoRA adapter that computed them."""


class BlockEvent(msgspec.Struct, frozen=True):
    """All pages of the chunk are in the medium (``stored``), or no longer; then it has its group and names only."""

    chunk: Chunk
    stored: bool
    medium: int = _MEMORY
    """Its position in :data:`~ems.pool.media.MEDIA`."""


class _Followed:
    """A chunk of which others have been told, or will be once none of its ``pages`` is missing in a medium."""

    __slots__ = ("announced", "chunk", "missing", "pages", "told_at")

    def __init__(self, chunk: Chunk, pages: Sequence[Page]) -> None:
        self.chunk = chunk
        self.pages = tuple(pages)
        self.missing = [self.all] * len(MEDIA)
        """For each medium the pages that it lacks, one bit each."""
        self.announced: set[int] = set()
        self.told_at: float | None = None
        """When it was found and announced last."""

    @property
    def all(self) -> int:
        return (1 << len(self.pages)) - 1


class Announced:
    """The blocks of one engine whose model has so many ``planes``, chunk by chunk."""

    def __init__(self, planes: int) -> None:
        self._planes = planes
        self._chunks: dict[tuple[int, Hashable], _Followed] = {}
        """By group, and name of the last block."""
        self._by_page: dict[Page, tuple[_Followed, int]] = {}
        """With the page's position in the chunk."""
        self._strays: dict[tuple[int, Page], None] = {}

    def offered(self, chunks: Iterable[tuple[Chunk, Sequence[Page]]]) -> list[BlockEvent]:
        """The engine offers chunks for saving, each with its pages."""
        events: list[BlockEvent] = []
        for chunk, pages in chunks:
            if (chunk.group, chunk.names[-1]) not in self._chunks:
                self._follow(chunk, pages, events)
        return events

    def found(self, chunks: Iterable[tuple[Chunk, Sequence[Page]]], now: float) -> list[BlockEvent]:
        """The engine found chunks in memory."""
        events: list[BlockEvent] = []
        for chunk, pages in chunks:
            followed = self._chunks.get((chunk.group, chunk.names[-1]))
            if followed is None:
                followed = self._follow(chunk, pages, events)
            followed.missing[_MEMORY] = 0
            if followed.told_at is None:
                followed.told_at = now
            elif now - followed.told_at >= AGAIN_SECONDS:
                followed.told_at = now
                followed.announced.clear()
            for medium in _MEDIA:
                self._announce(followed, medium, events)
        return events

    def changed(self, runs: Iterable[ChangeRun]) -> list[BlockEvent]:
        """``runs`` are those of :func:`ems.pool.media.asked_for`."""
        events: list[BlockEvent] = []
        for run in runs:
            medium, plane = divmod(run.namespace, self._planes)
            for at in range(0, len(run.keys), KEY_BYTES):
                page = (plane, run.keys[at : at + KEY_BYTES])
                (self._stored if run.stored else self._removed)(medium, page, events)
        return events

    def withdraw(self) -> list[BlockEvent]:
        taken: list[BlockEvent] = []
        for one in self._chunks.values():
            self._take_back(one, taken)
        self._chunks.clear()
        self._by_page.clear()
        self._strays.clear()
        return taken

    def _follow(self, chunk: Chunk, pages: Sequence[Page], events: list[BlockEvent]) -> _Followed:
        if len(self._chunks) >= MOST_CHUNKS:
            self._forget(next(iter(self._chunks.values())), events)
        followed = self._chunks[chunk.group, chunk.names[-1]] = _Followed(chunk, pages)
        for at, page in enumerate(pages):
            self._by_page[page] = (followed, at)
            for medium in _MEDIA if self._strays else ():
                if (medium, page) in self._strays:
                    del self._strays[medium, page]
                    followed.missing[medium] &= ~(1 << at)
        for medium in _MEDIA:
            self._announce(followed, medium, events)
        return followed

    def _stored(self, medium: int, page: Page, events: list[BlockEvent]) -> None:
        if (known := self._by_page.get(page)) is None:
            self._stray(medium, page)
            return
        followed, at = known
        followed.missing[medium] &= ~(1 << at)
        self._announce(followed, medium, events)

    def _stray(self, medium: int, page: Page) -> None:
        if len(self._strays) >= MOST_STRAYS:
            del self._strays[next(iter(self._strays))]
        self._strays[medium, page] = None

    def _removed(self, medium: int, page: Page, events: list[BlockEvent]) -> None:
        self._strays.pop((medium, page), None)
        if (known := self._by_page.get(page)) is None:
            return
        followed, at = known
        followed.missing[medium] |= 1 << at
        if medium in followed.announced:
            followed.announced.discard(medium)
            events.append(_taken_back(followed, medium))
        if all(missing == followed.all for missing in followed.missing):
            self._forget(followed, events)

    def _announce(self, followed: _Followed, medium: int, events: list[BlockEvent]) -> None:
        if not followed.missing[medium] and medium not in followed.announced:
            events.append(BlockEvent(followed.chunk, stored=True, medium=medium))
            followed.announced.add(medium)

    def _forget(self, followed: _Followed, events: list[BlockEvent]) -> None:
        self._take_back(followed, events)
        del self._chunks[followed.chunk.group, followed.chunk.names[-1]]
        for at, page in enumerate(followed.pages):
            self._by_page.pop(page, None)
            for medium in _MEDIA:
                if not followed.missing[medium] >> at & 1:
                    self._stray(medium, page)

    def _take_back(self, followed: _Followed, events: list[BlockEvent]) -> None:
        events.extend(_taken_back(followed, medium) for medium in sorted(followed.announced))


def _taken_back(followed: _Followed, medium: int) -> BlockEvent:
    chunk = Chunk(followed.chunk.group, followed.chunk.names)  # its tokens are not needed to take it back
    return BlockEvent(chunk, stored=False, medium=medium)
