"""A tier of packs: pages that were saved together lie together, in a folder or a bucket.

Together they are written in one go and read in one go, straight into the slots of their segment where they are neither
compressed nor encrypted.  A pack is never changed; it leaves as a whole, the one that was not used for longest first.
What always holds: a page that is handed back has the bytes that were stored under its namespace and key, which its seal
proves, or its outcome says why there is none; the first page stored under a key stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ems.pool.checksum import crc32c
from ems.pool.keys import Tail
from ems.pool.tiers import forgetting
from ems.pool.tiers.answers import ForgetRequest, ForgetResult, Holding, KeyRun, Outcome, Stored, StoredTail, Wanted
from ems.pool.tiers.blobs import Blobs
from ems.pool.tiers.catalogue import PackLocation
from ems.pool.tiers.codec import Codec, Compressor, expand
from ems.pool.tiers.pack_format import MAX_RECORDS, RECORD, Record, build_head, open_page, page_names
from ems.pool.tiers.pack_seal import PackSeal, SealKeys
from ems.pool.tiers.pack_store import SCAN_SECONDS, PackStore

_Row = tuple[Any, ...]
"""The fields of a :class:`Record`, without its place."""


class _Found(NamedTuple):
    """A page that is to be loaded, the ``position``-th of those that were asked for."""

    place: PackLocation
    record: Record
    position: int


class PackTier:
    """A tier that keeps packs in ``blobs``, sealed with ``keys``; see :class:`~ems.pool.tiers.pack_store.PackStore`.

    Calls from several threads.  :meth:`store`, :meth:`load`, :meth:`maintain`, :meth:`probe`, :meth:`forget` and
    :meth:`close` may block, and raise :class:`~ems.errors.TierFailed` when the tier does not work as a whole; nobody
    who calls anything else ever waits.
    """

    def __init__(
        self,
        name: str,
        blobs: Blobs,
        keys: SealKeys,
        *,
        limit: int = 0,
        ttl: float = 0.0,
        compressor: Compressor | None = None,
        default_share: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._store = PackStore(name, blobs, keys, limit=limit, ttl=ttl, default_share=default_share, clock=clock)
        self._catalogue = self._store.catalogue
        self._keys = keys
        self._compressor = compressor
        self._clock = clock

    # What is known without waiting

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` it has, as far as it knows at this moment."""
        return self._catalogue.holds(namespace, keys)

    def tails(self, namespace: str, keys: Sequence[bytes]) -> list[Tail | None]:
        """The tail of each page of ``keys`` that it has with one."""
        return [self._catalogue.tail(namespace, key) for key in keys]

    def find_tail(self, namespace: str, tail: Tail) -> StoredTail | None:
        """The stored tail of the same directory that shares most leading tokens with ``tail``."""
        best = self._catalogue.find_tail(namespace, tail)
        place = self._catalogue.find(namespace, best.key) if best is not None else None
        if best is None or place is None:
            return None
        return StoredTail(best, place.record.parent)

    def namespaces(self) -> dict[str, Holding]:
        """What it has, by the name of each namespace that it has pages of."""
        return self._catalogue.holdings(self._clock())

    def left_alone(self) -> set[str]:
        """The namespaces of which there are packs that this node does not understand, as far as these say so."""
        return self._store.left_alone()

    def recent(self, namespace: str) -> Iterator[KeyRun]:
        """All that it has of ``namespace``: what was used last comes first, a prefix before its suffix."""
        return self._catalogue.recent(namespace)

    @property
    def scanned(self) -> bool:
        """Whether it has seen all that is there."""
        return self._store.scanned

    def figures(self) -> dict[str, Any]:
        """Plain figures for status and metrics."""
        return self._store.figures()

    # Writing

    def store(self, namespace: str, pages: Sequence[Stored]) -> list[Outcome]:
        """Keep ``pages``; blocks."""
        expected = self._catalogue.page_size(namespace) or (len(pages[0].payload) if pages else 0)
        seal = self._keys.new_pack(namespace)
        if seal is None:
            return [Outcome.WRONG_KEY] * len(pages)
        outcomes: dict[int, Outcome] = {}
        new: dict[bytes, tuple[int, _Row, bytes | memoryview]] = {}
        for position, page in enumerate(pages):
            if page.key in new or self._catalogue.holds(namespace, [page.key]):
                outcomes[position] = Outcome.PRESENT
            elif len(page.payload) != expected:
                outcomes[position] = Outcome.WRONG_SIZE
            elif (page_sum := crc32c(page.payload)) != (page_sum if page.checksum is None else page.checksum):
                outcomes[position] = Outcome.CORRUPT
            else:
                new[page.key] = (position, *self._encode(namespace, page, page_sum, seal))
        made = list(new.values())
        for start in range(0, len(made), MAX_RECORDS):
            positions, rows, parts = zip(*made[start : start + MAX_RECORDS], strict=True)
            tails = {at: tail for at, position in enumerate(positions) if (tail := pages[position].tail) is not None}
            records = np.array(list(rows), dtype=RECORD)
            head = build_head(namespace, expected, self._clock(), records, tails, seal)
            outcome = Outcome.DONE if self._store.write(head, parts) else Outcome.NO_ROOM
            outcomes.update(dict.fromkeys(positions, outcome))
        return [outcomes[position] for position in range(len(pages))]

    def _encode(self, namespace: str, page: Stored, page_sum: int, seal: PackSeal) -> tuple[_Row, bytes | memoryview]:
        """The record of ``page`` and its stored bytes."""
        small = self._compressor.compress(namespace, page.payload) if self._compressor else None
        codec, bare = (Codec.RAW, page.payload) if small is None else (Codec.SHUFFLED_ZSTD, small)
        names = page_names(namespace, page.key, page.parent, len(page.payload), codec)
        nonce, tag, part = seal.seal(bare, names)
        stored_sum = page_sum if part is page.payload else crc32c(part)
        if seal.encrypts:
            page_sum = 0  # the checksum of a page would tell something about it
        return (page.key, page.parent, 0, len(part), codec, page_sum, stored_sum, nonce, tag), part

    # Reading

    def load(self, namespace: str, wanted: Sequence[Wanted]) -> list[Outcome]:
        """Fetch ``wanted``; blocks."""
        outcomes = [Outcome.MISSING] * len(wanted)
        by_pack: dict[int, list[_Found]] = {}
        for position, page in enumerate(wanted):
            place = self._catalogue.find(namespace, page.key)
            if place is None:
                continue
            if place.pack.head.page_size != len(page.into):
                outcomes[position] = Outcome.WRONG_SIZE
                continue
            by_pack.setdefault(place.pack.number, []).append(_Found(place, place.record, position))
        for found in by_pack.values():
            found.sort(key=lambda one: one.record.offset)
            for run in _runs(found):
                self._load_run(run, wanted, outcomes)
            self._store.used(found[0].place.pack)
        return outcomes

    def _load_run(self, run: list[_Found], wanted: Sequence[Wanted], outcomes: list[Outcome]) -> None:
        """Load pages that lie side by side in one pack."""
        pack = run[0].place.pack
        plain = not self._keys.encrypts and all(one.record.codec == Codec.RAW for one in run)
        buffers = [wanted[one.position].into if plain else memoryview(bytearray(one.record.stored)) for one in run]
        left = self._store.read(pack, run[0].record.offset, buffers)
        if left < 0:
            return
        for one, buffer in zip(run, buffers, strict=True):
            left -= len(buffer)
            opened = open_page(pack.head, one.record, buffer) if left >= 0 else None
            if opened is not None and (plain or self._expand(one.record, opened, wanted[one.position].into)):
                outcomes[one.position] = Outcome.DONE
            else:
                outcomes[one.position] = Outcome.CORRUPT
                self._store.bad(one.place)

    def _expand(self, record: Record, stored: bytes | bytearray | memoryview, into: memoryview) -> bool:
        return expand(record.codec, stored, into) and (self._keys.encrypts or crc32c(into) == record.page_sum)

    # Keeping order

    def maintain(self) -> None:
        """Look what is there, make room, remove what is too old; blocks."""
        self._store.maintain()
        forgetting.remove(self._store, self._clock() + SCAN_SECONDS)

    def probe(self) -> None:
        """Try only whether it works; blocks."""
        self._store.probe()

    def forget(self, request: ForgetRequest, *, dry_run: bool = False) -> ForgetResult:
        """Take a portion of ``request`` out, bounded in time, or only count all of it; blocks.

        What is meant is not handed out any more from the first call on, but for what is stored in one piece with a
        spared page: that goes call by call, the last of it with the one that leaves no ``more``.  After a restart none
        of it is handed out either, unless the tier ended or failed before there was such a call.  A spared page can be
        loaded at any time.
        """
        return (forgetting.count if dry_run else forgetting.forget)(self._store, request)

    def close(self) -> None:
        """Write down what the next start can use; blocks."""
        if self.scanned:
            self._store.write_snapshot()


def _runs(found: Sequence[_Found]) -> Iterable[list[_Found]]:
    """``found`` in one pack, in order, cut where pages do not lie side by side."""
    run: list[_Found] = []
    for one in found:
        if run and one.record.offset != run[-1].record.offset + run[-1].record.stored:
            yield run
            run = []
        run.append(one)
    if run:
        yield run
