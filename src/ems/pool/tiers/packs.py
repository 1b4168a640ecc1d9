"""A tier of packs: pages that were saved together lie together, in a folder or a bucket.

Together they are written in one go and read in one go, straight into the slots of their segment where they are neither
compressed nor encrypted.  A pack is never changed; it leaves as a whole, the one that was not used for longest first.
What always holds: a page that is handed back has the bytes that were stored under its namespace and key, which its seal
proves, or its outcome says why there is none; the first page stored under a key stays; what an administrator clears is
not found any more before anything of it is removed, and a pack of which something stays is written anew before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from ems.errors import ConfigError
from ems.pool.keys import Tail
from ems.pool.layout import crc32c
from ems.pool.segments.segment_file import FileRange
from ems.pool.tiers.answers import ForgetRequest, ForgetResult, Holding, KeyRun, Outcome, Stored, StoredTail, Wanted
from ems.pool.tiers.blobs import Blobs, Gone, read_whole
from ems.pool.tiers.catalogue import Pack, PackLocation
from ems.pool.tiers.codec import Codec, Compressor, expand
from ems.pool.tiers.directory import FolderBlobs
from ems.pool.tiers.pack_format import MAX_RECORDS, RECORD, Head, Malformed, Record, build_head, open_page, page_names
from ems.pool.tiers.pack_seal import PackSeal, SealKeys, open_keys
from ems.pool.tiers.pack_store import PackStore
from ems.pool.tiers.pass_through import Leaving, load, store
from ems.pool.tiers.repair import inspect, with_only
from ems.pool.tiers.settings import TierConfig

FORGET_SECONDS = 1.0
"""How long one call forgets, which gets something done however slow the place is; a pack goes whole."""
REMOVE_SECONDS = 2.0
"""How long what could not be removed before is removed when order is kept."""
AT_ONCE = 64
"""Packs that are removed in one go."""
_Row = tuple[Any, ...]
"""The fields of a :class:`Record`, without its place."""


class PackTier(PackStore):
    """A tier that keeps packs in ``blobs``, sealed with ``keys``.  Calls from several threads.

    :meth:`store`, :meth:`load`, :meth:`maintain`, :meth:`probe`, :meth:`forget` and :meth:`close` may block, and raise
    :class:`~ems.errors.TierFailed` when the tier does not work as a whole; nobody who calls anything else ever waits.
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
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name, blobs, keys, limit, ttl, clock)
        self._compressor = compressor

    asks = False

    # What is known without waiting

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` it has, as far as it knows at this moment."""
        return self._catalogue.holds(namespace, keys)

    def lacks(self, namespace: str, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if not self._catalogue.holds(namespace, [key])]

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

    def recent(self, namespace: str) -> Iterator[KeyRun]:
        """All that it has of ``namespace``: what was used last comes first, a prefix before its suffix."""
        return self._catalogue.recent(namespace)

    # Storing

    def write(self, namespace: str, pages: Sequence[Leaving]) -> list[Outcome]:
        return store(self, namespace, pages)

    def store(self, namespace: str, pages: Sequence[Stored]) -> list[Outcome]:
        expected = self._catalogue.page_size(namespace) or (len(pages[0].payload) if pages else 0)
        seal = self._keys.pack(namespace)
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
            outcome = Outcome.DONE if self._write(head, parts) else Outcome.NO_ROOM
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

    # Loading

    def read(self, namespace: str, wanted: Sequence[tuple[bytes, FileRange]]) -> tuple[list[Outcome], list[int]]:
        return load(self, namespace, wanted)

    def load(self, namespace: str, wanted: Sequence[Wanted]) -> list[Outcome]:
        outcomes = [Outcome.MISSING] * len(wanted)
        by_pack: dict[int, list[tuple[PackLocation, int]]] = {}
        for number, page in enumerate(wanted):
            place = self._catalogue.find(namespace, page.key)
            if place is not None and place.pack.head.page_size == len(page.into):
                by_pack.setdefault(place.pack.number, []).append((place, number))
            elif place is not None:
                outcomes[number] = Outcome.WRONG_SIZE
        for found in by_pack.values():
            found.sort(key=lambda one: one[0].position)
            for run in _runs(found):
                self._load_run(run, wanted, outcomes)
            self._used(found[0][0].pack)
        return outcomes

    def _load_run(self, run: list[tuple[PackLocation, int]], wanted: Sequence[Wanted], outcomes: list[Outcome]) -> None:
        """Load pages that lie side by side in one pack: the place of each, and its number in ``wanted``."""
        pack, records = run[0][0].pack, [place.record for place, _ in run]
        plain = not self._keys.encrypts and all(record.codec == Codec.RAW for record in records)
        targets = [wanted[number].into for _, number in run]
        buffers = targets if plain else [memoryview(bytearray(record.stored)) for record in records]
        try:
            left = self._blobs.read(pack.name, pack.head.data + records[0].offset, buffers)
        except Gone:
            self._forget(pack.name)
            return
        for (place, number), record, buffer, into in zip(run, records, buffers, targets, strict=True):
            left -= len(buffer)
            opened = open_page(pack.head, record, buffer) if left >= 0 else None
            if opened is not None and (plain or self._expand(record, opened, into)):
                outcomes[number] = Outcome.DONE
            else:
                outcomes[number] = Outcome.CORRUPT
                self._drop(place)

    def _expand(self, record: Record, stored: bytes | bytearray | memoryview, into: memoryview) -> bool:
        return expand(record.codec, stored, into) and (self._keys.encrypts or crc32c(into) == record.page_sum)

    # Forgetting

    def forget(self, request: ForgetRequest, *, dry_run: bool = False) -> ForgetResult:
        """Take a portion of ``request`` out, bounded in time, or only count all of it; blocks.

        What is meant is not handed out any more from the first call on, but for what is stored in one piece with a
        spared page: that goes call by call, the last of it with the one that leaves no ``more``.  After a restart none
        of it is handed out either, unless the tier ended or failed before there was such a call.  A spared page can be
        loaded at any time.
        """
        if dry_run:
            return self._count(request)
        if not self.scanned:
            self._look()
        # The written catalogue has tokens of what leaves: it is written anew when order is kept next.
        self._changed, self._next_snapshot = True, self._clock()
        until = self._clock() + FORGET_SECONDS
        fewer = self._fewer(request)
        gone = [self._let_go(pack) for pack, staying in fewer if not staying]
        self._delete_cleared(until)
        self._quarantine.clear(request.namespace, self._clock() - request.unused_for if request.unused_for else inf)
        parts = [(pack, staying) for pack, staying in fewer if staying]
        while parts:
            gone.append(self._shrink(*parts.pop()))
            if self._clock() >= until:
                break
        self._delete_cleared(until)
        pages, size = (sum(column) for column in zip((0, 0), *gone, strict=True))
        more = bool(parts or self._leaving or not self.scanned)
        return ForgetResult(pages, size, more=more, left=self._left_alone_of(request.namespace))

    def _count(self, request: ForgetRequest) -> ForgetResult:
        pages = size = 0
        fewer = self._fewer(request)
        # What is also in a pack that is passed over is found there afterwards.
        others: set[bytes] = set()
        if request.unused_for:
            going = {pack.number for pack, _ in fewer}
            others.update(*(one.keys for one in self._catalogue.packs_of(request.namespace) if one.number not in going))
        for pack, staying in fewer:
            pages += sum(key not in staying and key not in others for key in self._catalogue.found_in(pack))
            leaving = [position for position, key in enumerate(pack.keys) if key not in staying]
            size += int(pack.head.records["stored"][leaving].sum()) if staying else pack.size
        return ForgetResult(pages, size, left=self._left_alone_of(request.namespace))

    def _fewer(self, request: ForgetRequest) -> list[tuple[Pack, set[bytes]]]:
        """The packs that have something of what is meant, and the keys of each that stay: mostly none."""
        oldest, spared = self._clock() - request.unused_for, frozenset(request.spared)
        fewer = []
        for pack in self._catalogue.packs_of(request.namespace):
            if request.unused_for and pack.used_at > oldest:
                continue
            # What is found in another pack need not stay in this one.
            staying = set(spared.intersection(self._catalogue.found_in(pack))) if spared else set()
            if len(staying) < len(pack.keys) or not pack.keys:
                fewer.append((pack, staying))
        return fewer

    def _let_go(self, pack: Pack, instead: str = "", head: Head | None = None) -> tuple[int, int]:
        """Forget ``pack``, which is to be removed; how many pages are not found any more, and how many bytes go.

        With a ``head`` the pack ``instead`` has what stays of it.
        """
        with self._lock:
            before = self._catalogue.pages
            self._leaving.add(pack.name)
            self._catalogue.remove(pack.name)
            if head is not None:
                self._catalogue.add(instead, head.total, head, pack.used_at)
            return before - self._catalogue.pages, max(pack.size - (0 if head is None else head.total), 0)

    def _shrink(self, pack: Pack, staying: set[bytes]) -> tuple[int, int]:
        """Write ``pack`` anew with the pages ``staying`` only; how many pages and bytes are gone."""
        try:
            raw = read_whole(self._blobs, pack.name)
            head, good, _ = inspect(raw, pack.name, self._keys)
        except (Gone, Malformed):
            return self._let_go(pack)
        kept = [at for at in good if head.records["key"][at].tobytes() in staying]
        if head.seal is None or not kept:
            return self._let_go(pack)
        name, parts, new = with_only(head, kept, raw)
        self._put(name, parts)
        return self._let_go(pack, name, new)

    def _delete_cleared(self, until: float) -> None:
        """Delete packs whose pages were cleared, some of them whatever the time; what fails stays to be deleted."""
        while self._leaving:
            names = sorted(self._leaving)[:AT_ONCE]
            self._blobs.delete(names)
            self._leaving.difference_update(names)
            if self._clock() >= until:
                break

    def maintain(self) -> None:
        super().maintain()
        self._delete_cleared(self._clock() + REMOVE_SECONDS)


def _runs(found: Sequence[tuple[PackLocation, int]]) -> Iterable[list[tuple[PackLocation, int]]]:
    """``found`` in one pack, in order, cut where pages do not lie side by side."""
    run: list[tuple[PackLocation, int]] = []
    for place, number in found:
        if run and place.position != run[-1][0].position + 1:
            yield run
            run = []
        run.append((place, number))
    if run:
        yield run


def open_blobs(config: TierConfig) -> Blobs:
    """The place of a tier.  Raises ConfigError: it cannot be used."""
    if config.kind == "mooncake":
        raise ConfigError(f"{config.name} keeps no packs, expected dir:/folder or s3://bucket/prefix")
    if config.kind == "dir":
        return FolderBlobs(Path(config.place), sync=config.sync)
    from ems.pool.tiers.object_store import BucketBlobs

    return BucketBlobs(config)


def open_packs(config: TierConfig) -> PackTier:
    """The tier that ``config`` describes; nothing of it was read yet.  Raises ConfigError: it cannot be used."""
    compressor = Compressor(config.element) if config.compress == "zstd" else None
    keys = open_keys(config)
    assert keys is not None
    return PackTier(config.name, open_blobs(config), keys, limit=config.size, ttl=config.ttl, compressor=compressor)
