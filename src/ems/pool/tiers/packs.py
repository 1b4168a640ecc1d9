"""A tier of packs: pages that were saved together lie together, in a folder or a bucket.

Together they are written in one go and read in one go, straight into the slots of their segment where they are neither
compressed nor encrypted.  A pack is never changed; it leaves as a whole, the one that was not used for longest first.
What always holds: a page is handed out only when the seal over its bytes, its names and its size is right; the
catalogue is what this node has seen itself; a pack that vanished or turned out bad costs its pages and nothing else;
what this node does not understand, or was sealed with another key, it neither changes nor removes.
"""

from __future__ import annotations

import errno
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog

from ems.errors import TierFailed
from ems.pool.checksum import crc32c
from ems.pool.keys import Tail
from ems.pool.tiers.blobs import Blob, Blobs, Gone, read_whole
from ems.pool.tiers.catalogue import (
    CATALOGUE,
    CATALOGUE_MAGIC,
    Catalogue,
    Pack,
    PackLocation,
    decode_packs,
    encode_packs,
)
from ems.pool.tiers.codec import Codec, Compressor, expand
from ems.pool.tiers.forgetting import Forgetting
from ems.pool.tiers.pack_format import (
    FIRST_READ,
    MAX_RECORDS,
    PACK_NAME,
    RECORD,
    Head,
    Malformed,
    Record,
    build_head,
    fitting,
    folder_of,
    head_bytes,
    open_page,
    pack_name,
    page_names,
    parse_head,
)
from ems.pool.tiers.pack_seal import PackSeal, SealKeys
from ems.pool.tiers.repair import QUARANTINE, Quarantine, mend
from ems.pool.tiers.seam import ForgetRequest, ForgetResult, Holding, KeyRun, Outcome, Stored, StoredTail, Wanted

SCAN_SECONDS = 2.0
"""How long one look learns of new packs before it goes on in the next; listing them does not count."""
UNFINISHED_SECONDS = 600.0
"""What a writer has not finished for so long was left by one that died."""
SNAPSHOT_SECONDS = 600.0
TOUCH_SECONDS = 60.0
"""A blob's use is noted at most this often."""
PROBE_BYTES = 4096
PROBE_NAME = re.compile(r"probe-[0-9a-f]{16}")
UNFIT = {
    "wrong_key": "packs were sealed with another key and are left alone; all nodes of a tier need the same",
    "unreadable": "blobs that are named like packs are none of this format and are left alone; 'ems fsck' says more",
    "not_believed": "files that others than this node's user may have written are left alone",
    "wrong_size": "packs have pages of another size than their namespace and are left alone",
}
"""Why a blob is not learned of, and what is said of that."""

_log = structlog.get_logger("ems.tier")


class _Found(NamedTuple):
    """A page that is to be loaded, the ``position``-th of those that were asked for."""

    place: PackLocation
    record: Record
    position: int


class PackTier:
    """A tier that keeps packs in ``blobs``, sealed with ``keys``.  Calls from several threads.

    ``limit`` is how many bytes it may take (0: what it has and ``default_share`` of what is free; no limit when that
    is 0 too), ``ttl`` after how many seconds without use a pack leaves.
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
        self._blobs = blobs
        self._limit = limit
        self._ttl = ttl
        self._compressor = compressor
        self._keys = keys
        self._default_share = default_share
        self._clock = clock
        self._catalogue = Catalogue()
        self._lock = threading.Lock()
        """Around changes of the catalogue and the counters; nobody does I/O while holding it."""
        self._unfit: dict[str, tuple[int, str, str]] = {}
        """Blobs that are not learned of, nor read again: size, reason (:data:`UNFIT`), claimed namespace."""
        self._warned: set[str] = set()
        self._suspects: set[str] = set()
        self._quarantine = Quarantine(blobs, limit)
        self._forgetting = Forgetting(blobs, self._put, self._catalogue, self._lock, keys, self._quarantine, clock)
        self._kept: dict[str, tuple[int, float, bytes]] | None = None
        self._next_snapshot = clock() + SNAPSHOT_SECONDS
        self._next_sweep = clock()
        self._changed = False
        self._scanned = False
        self._unread = 0
        """Packs that were seen and not yet learned."""
        self._counts = dict.fromkeys(
            (
                *("stored", "loaded", "missing", "corrupt", "cleared"),
                *("expired_packs", "evicted_packs", "saved_bytes"),
            ),
            0,
        )

    # What is known without waiting

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        return self._catalogue.holds(namespace, keys)

    def tails(self, namespace: str, keys: Sequence[bytes]) -> list[Tail | None]:
        return [self._catalogue.tail(namespace, key) for key in keys]

    def find_tail(self, namespace: str, tail: Tail) -> StoredTail | None:
        best = self._catalogue.find_tail(namespace, tail)
        place = self._catalogue.find(namespace, best.key) if best is not None else None
        if best is None or place is None:
            return None
        return StoredTail(best, place.record.parent)

    def namespaces(self) -> dict[str, Holding]:
        return self._catalogue.holdings(self._clock())

    def left_alone(self) -> set[str]:
        return {namespace for _, _, namespace in list(self._unfit.values()) if namespace}

    def recent(self, namespace: str) -> Iterator[KeyRun]:
        return self._catalogue.recent(namespace)

    def figures(self) -> dict[str, Any]:
        return {
            "bytes": self._catalogue.bytes,
            "limit": self._limit,
            "pages": self._catalogue.pages,
            "packs": len(self._catalogue),
            "scanned": self._scanned,
            "quarantined_bytes": self._quarantine.bytes,
            **dict.fromkeys(UNFIT, 0),
            **Counter(why for _, why, _ in list(self._unfit.values())),
            **self._counts,
        }

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    # Writing

    def store(self, namespace: str, pages: Sequence[Stored]) -> list[Outcome]:
        size = len(pages[0].payload) if pages else 0
        expected = self._catalogue.page_size(namespace) or size
        outcomes = [Outcome.DONE] * len(pages)
        seal = self._keys.new_pack(namespace)
        rows: list[tuple[Any, ...]] = []
        parts: list[bytes | memoryview] = []
        new: dict[bytes, Tail | None] = {}
        for position, page in enumerate(pages):
            if page.key in new or self._catalogue.holds(namespace, [page.key]):
                outcomes[position] = Outcome.PRESENT
            elif len(page.payload) != expected:
                outcomes[position] = Outcome.WRONG_SIZE
            elif seal is None:
                outcomes[position] = Outcome.WRONG_KEY
            elif (page_sum := crc32c(page.payload)) != (page_sum if page.checksum is None else page.checksum):
                outcomes[position] = Outcome.CORRUPT
            else:
                new[page.key] = page.tail
                row, part = self._encode(namespace, page, page_sum, seal)
                rows.append(row)
                parts.append(part)
        tails = list(new.values())
        for start in range(0, len(rows), MAX_RECORDS) if seal is not None else ():
            assert seal is not None
            here = slice(start, start + MAX_RECORDS)
            if not self._write(namespace, expected, rows[here], parts[here], tails[here], seal):
                lost = {row[0] for row in rows[here]}
                outcomes = [Outcome.NO_ROOM if page.key in lost else o for page, o in zip(pages, outcomes, strict=True)]
        self._count("stored", outcomes.count(Outcome.DONE))
        return outcomes

    def _encode(
        self, namespace: str, page: Stored, page_sum: int, seal: PackSeal
    ) -> tuple[tuple[Any, ...], bytes | memoryview]:
        """The record of ``page``, without its place, and its stored bytes."""
        size = len(page.payload)
        small = self._compressor.compress(namespace, page.payload) if self._compressor else None
        if small is not None:
            self._count("saved_bytes", size - len(small))
        codec = Codec.RAW if small is None else Codec.SHUFFLED_ZSTD
        bare = page.payload if small is None else small
        nonce, tag, part = seal.seal(bare, page_names(namespace, page.key, page.parent, size, codec))
        stored_sum = page_sum if part is page.payload else crc32c(part)
        if seal.encrypts:
            page_sum = 0  # the checksum of a page would tell something about it
        return (page.key, page.parent, 0, len(part), size, codec, page_sum, stored_sum, nonce, tag, 0), part

    def _write(
        self,
        namespace: str,
        page_size: int,
        rows: list[tuple[Any, ...]],
        parts: list[bytes | memoryview],
        tails: list[Tail | None],
        seal: PackSeal,
    ) -> bool:
        now = self._clock()
        listed = {position: tail for position, tail in enumerate(tails) if tail is not None}
        begin, end, head = build_head(namespace, page_size, now, np.array(rows, dtype=RECORD), listed, seal)
        if self._limit and head.total > self._limit:
            return False
        self._make_room(head.total)
        name = pack_name(namespace, now, secrets.token_hex(8))
        self._put(name, [begin, *parts, end])
        with self._lock:
            self._catalogue.add(name, head.total, head, now)
            self._changed = True
        return True

    def _put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a blob; where the place is full, packs that were not used for longest give way to it."""
        try:
            self._blobs.put(name, parts)
        except TierFailed as error:
            if not _is_full(error):
                raise
            with self._lock:
                leaving = self._catalogue.to_leave(max(self._catalogue.bytes - 2 * sum(map(len, parts)), 0))
            if not leaving:
                raise
            self._leave(leaving, "evicted_packs")
            self._blobs.put(name, parts)

    def _make_room(self, size: int) -> None:
        most = self._limit - size - self._quarantine.bytes
        if self._limit and self._catalogue.bytes > most:
            with self._lock:
                leaving = self._catalogue.to_leave(most)
            self._leave(leaving, "evicted_packs")

    def _leave(self, packs: Sequence[Pack], count: str) -> None:
        if not packs:
            return
        with self._lock:
            for pack in packs:
                self._catalogue.remove(pack.name)
            self._counts[count] += len(packs)
            self._changed = True
        self._blobs.delete([pack.name for pack in packs])

    # Reading

    def load(self, namespace: str, wanted: Sequence[Wanted]) -> list[Outcome]:
        outcomes = [Outcome.MISSING] * len(wanted)
        by_pack: dict[int, list[_Found]] = {}
        for position, page in enumerate(wanted):
            place = self._catalogue.find(namespace, page.key)
            if place is None:
                continue
            if (record := place.record).length != len(page.into):
                outcomes[position] = Outcome.WRONG_SIZE
                continue
            by_pack.setdefault(place.pack.number, []).append(_Found(place, record, position))
        for found in by_pack.values():
            found.sort(key=lambda one: one.record.offset)
            for run in _runs(found):
                self._load_run(run, wanted, outcomes)
            self._used(found[0].place.pack)
        with self._lock:
            self._counts["loaded"] += outcomes.count(Outcome.DONE)
            self._counts["missing"] += outcomes.count(Outcome.MISSING)
        return outcomes

    def _load_run(self, run: list[_Found], wanted: Sequence[Wanted], outcomes: list[Outcome]) -> None:
        """Load pages that lie side by side in one pack."""
        pack = run[0].place.pack
        plain = not self._keys.encrypts and all(one.record.codec == Codec.RAW for one in run)
        buffers = [wanted[one.position].into if plain else memoryview(bytearray(one.record.stored)) for one in run]
        try:
            left = self._blobs.read(pack.name, run[0].record.offset, buffers)
        except Gone:
            with self._lock:
                self._catalogue.remove(pack.name)
            return
        for one, buffer in zip(run, buffers, strict=True):
            left -= len(buffer)
            opened = open_page(pack.head, one.record, buffer) if left >= 0 else None
            if opened is not None and (plain or self._expand(one.record, opened, wanted[one.position].into)):
                outcomes[one.position] = Outcome.DONE
            else:
                outcomes[one.position] = Outcome.CORRUPT
                self._bad(one.place)

    def _expand(self, record: Record, stored: bytes | bytearray | memoryview, into: memoryview) -> bool:
        return expand(record.codec, stored, into) and (self._keys.encrypts or crc32c(into) == record.page_sum)

    def _bad(self, place: PackLocation) -> None:
        with self._lock:
            self._catalogue.drop(place)
            self._counts["corrupt"] += 1
            first = place.pack.name not in self._suspects
            self._suspects.add(place.pack.name)
        if first:
            _log.warning("a page of a tier is damaged and was dropped", tier=self.name, pack=place.pack.name)

    def _used(self, pack: Pack) -> None:
        now = self._clock()
        late = now - pack.used_at >= TOUCH_SECONDS
        with self._lock:
            used = self._catalogue.use(pack, now)
            self._changed = True
        if late:
            for one in used:
                self._blobs.touch(one.name)

    # Keeping order

    def maintain(self, *, probe: bool = False) -> None:
        if probe:
            self._probe()
            return
        now = self._clock()
        self._look(now)
        with self._lock:
            expired = self._catalogue.too_old(now, self._ttl)
        self._leave(expired, "expired_packs")
        self._make_room(0)
        self._remove_suspects()
        self._forgetting.remove(self._clock() + SCAN_SECONDS)
        if now >= self._next_sweep:
            self._next_sweep = now + UNFINISHED_SECONDS
            left = self._blobs.sweep(now - UNFINISHED_SECONDS)
            if left:
                _log.info("what dead writers left was removed", tier=self.name, pieces=left)
        if self._changed and now >= self._next_snapshot:
            self._write_snapshot()

    def forget(self, request: ForgetRequest, *, dry_run: bool = False) -> ForgetResult:
        if dry_run:
            return msgspec.structs.replace(self._forgetting.count(request), left=self._left_of(request.namespace))
        if self._unread or not self._scanned:
            self._look(self._clock())
        # The written catalogue has tokens of what leaves: it is written anew when order is kept next.
        self._changed, self._next_snapshot = True, self._clock()
        gone = self._forgetting.forget(request)
        self._count("cleared", gone.pages)
        left = self._left_of(request.namespace)
        return msgspec.structs.replace(gone, more=gone.more or self._unread > 0, left=left)

    def _left_of(self, namespace: str) -> int:
        folder = folder_of(namespace)
        return sum(name.startswith(folder) for name in list(self._unfit))

    def _probe(self) -> None:
        name, content = f"probe-{secrets.token_hex(8)}", secrets.token_bytes(PROBE_BYTES)
        try:
            self._put(name, [content])
        except TierFailed as error:
            if not _is_full(error):
                raise
            # It may be full of packs that were never read, or misread while the place was not well: these can give way.
            self._unfit = {}
            self._look(self._clock())
            self._put(name, [content])
        found = memoryview(bytearray(PROBE_BYTES))
        try:
            count = self._blobs.read(name, 0, [found])
        except Gone:
            count = 0
        self._blobs.delete([name])
        if count != PROBE_BYTES or found != content:
            raise TierFailed("what was written for a test is not what was read back")

    def _look(self, now: float) -> None:
        """Learn of packs that came and went; what one look does not get done is left to the next."""
        if self._kept is None:
            self._kept = self._read_snapshot()
        known = {pack.name: pack for pack in self._catalogue}
        unfit, self._unfit = self._unfit, {}
        aside: list[Blob] = []
        spent, unread = 0.0, 0
        for blob in self._blobs.blobs():
            if blob.name.startswith(QUARANTINE):
                aside.append(blob)
            pack = known.get(blob.name)
            if pack is not None and pack.size == blob.size and not blob.refused:
                pack.used_at = max(pack.used_at, blob.modified)
                del known[blob.name]
            elif not self._is_news(blob, unfit.get(blob.name)):
                continue
            elif spent >= SCAN_SECONDS:
                unread += 1
            else:
                begun = self._clock()
                self._learn(blob, now)
                spent += self._clock() - begun
        if known:
            with self._lock:
                for name in known:
                    self._catalogue.remove(name)
        self._quarantine.know(aside)
        self._warn()
        self._unread = unread
        if not unread and not self._scanned:
            self._scanned, self._kept = True, {}
            self._limit = self._limit or self._default_limit()

    def _default_limit(self) -> int:
        free = self._blobs.room() if self._default_share else None
        return 0 if free is None else self._catalogue.bytes + int(self._default_share * free)

    def _is_news(self, blob: Blob, before: tuple[int, str, str] | None) -> bool:
        """Whether ``blob``, which was unfit ``before``, is to be learned of; why not is noted."""
        if blob.refused and (PACK_NAME.fullmatch(blob.name) or blob.name == CATALOGUE):
            self._unfit[blob.name] = (blob.size, "not_believed", "")
        elif before is not None and before[0] == blob.size and before[1] != "not_believed":
            self._unfit[blob.name] = before
        else:
            return PACK_NAME.fullmatch(blob.name) is not None and blob.name not in self._forgetting
        return False

    def _warn(self) -> None:
        """Say once what is not learned of, and why."""
        for name, (_, why, _) in sorted(self._unfit.items()):
            if why not in self._warned:
                self._warned.add(why)
                _log.warning(UNFIT[why], tier=self.name, first=name, number=self.figures()[why])

    def _learn(self, blob: Blob, now: float) -> None:
        try:
            head, used_at = self._head(blob)
        except Gone:
            return
        except Malformed:
            self._unfit[blob.name] = (blob.size, "unreadable", "")
            return
        if head.seal is None:
            self._unfit[blob.name] = (blob.size, "wrong_key", head.namespace)
            return
        if head.damaged:
            self._suspects.add(blob.name)
        with self._lock:
            if self._catalogue.add(blob.name, blob.size, head, min(used_at, now)) is None:
                self._unfit[blob.name] = (blob.size, "wrong_size", head.namespace)
            self._changed = True

    def _head(self, blob: Blob) -> tuple[Head, float]:
        """The head of the pack ``blob`` and when it was used, from what the last node wrote down if that is right.

        Raises:
            Gone: the blob vanished.
            Malformed: it is no pack of this format.
        """
        size, used_at, raw = (self._kept or {}).get(blob.name, (-1, 0.0, b""))
        if size == blob.size:
            with suppress(Malformed):
                return fitting(parse_head(raw, self._keys), blob.name, blob.size), max(blob.modified, used_at)
        start = bytearray(min(FIRST_READ, blob.size))
        read = self._blobs.read(blob.name, 0, [memoryview(start)])
        size = head_bytes(memoryview(start)[:read])
        if size > len(start):
            if size > blob.size:
                raise Malformed(f"{blob.size} bytes, its head alone has {size}")
            more = bytearray(size - len(start))
            read += self._blobs.read(blob.name, len(start), [memoryview(more)])
            start += more
        return fitting(parse_head(memoryview(start)[:read], self._keys), blob.name, blob.size), blob.modified

    def _remove_suspects(self) -> None:
        # Not those that come meanwhile: of a place that lies every pack looks bad, the mended ones as well.
        for name in sorted(self._suspects):
            self._suspects.discard(name)
            if name in self._forgetting:
                continue
            verdict = mend(self._blobs, name, self._keys, self._quarantine, put=self._put)
            with self._lock:
                self._catalogue.remove(name)
            if verdict.kind == "mended":
                _log.warning("a damaged pack was set aside", tier=self.name, pack=name, reason=verdict.reason)
            if verdict.now is not None:
                self._learn(verdict.now, self._clock())

    # The catalogue of the last start

    def _read_snapshot(self) -> dict[str, tuple[int, float, bytes]]:
        try:
            raw = read_whole(self._blobs, CATALOGUE)
        except (Gone, TierFailed):
            return {}
        return decode_packs(raw) or {}

    def _write_snapshot(self) -> None:
        self._changed = False
        self._next_snapshot = self._clock() + SNAPSHOT_SECONDS
        start = bytearray(len(CATALOGUE_MAGIC))
        try:
            strange = self._blobs.read(CATALOGUE, 0, [memoryview(start)]) > 0 and start != CATALOGUE_MAGIC
        except Gone:
            strange = CATALOGUE in self._unfit
        if not strange:  # neither of somebody else nor of a later release
            self._put(CATALOGUE, encode_packs(self._catalogue))

    def close(self) -> None:
        if self._scanned and self._changed:
            self._write_snapshot()


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


def _is_full(error: TierFailed) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}
