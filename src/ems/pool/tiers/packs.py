"""A tier of packs: pages that were saved together lie together, in a folder or a bucket.

Together they are written in one go and read in one go, straight into the slots of their segment where they are neither
compressed nor encrypted.  A pack is never changed; it leaves as a whole, the one that was not used for longest first.
What always holds: a page is handed out only when its checksum, its names and its size are right; the catalogue is what
this node has seen itself, and a pack that vanished or turned out bad costs its pages and nothing else.
"""

from __future__ import annotations

import errno
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import structlog

from ems.errors import TierFailed
from ems.pool.checksum import crc32c
from ems.pool.keys import Tail
from ems.pool.tiers.blobs import Blob, Blobs, Gone
from ems.pool.tiers.catalogue import Catalogue, Pack, Place
from ems.pool.tiers.cipher import PackCipher, Secrets
from ems.pool.tiers.codec import Codec, Compressor, expand
from ems.pool.tiers.forgetting import Forgetting
from ems.pool.tiers.heads import PACK_NAME, pack_name, read_head, read_whole
from ems.pool.tiers.record import MAX_RECORDS, Entry, Head, Malformed, Sealer, build_head
from ems.pool.tiers.repair import mend
from ems.pool.tiers.seam import Forgotten, Holding, Meant, Outcome, Run, Stored, StoredTail, Wanted
from ems.pool.tiers.snapshot import CATALOGUE, pack_snapshot, unpack_snapshot

SCAN_SECONDS = 2.0
"""How long one look learns of new packs before it goes on in the next; listing them does not count."""
UNFINISHED_SECONDS = 600.0
"""What a writer has not finished for so long was left by one that died."""
SNAPSHOT_SECONDS = 600.0
TOUCH_SECONDS = 60.0
"""A blob's use is noted at most this often."""
PROBE_BYTES = 4096

_log = structlog.get_logger("ems.tier")


class PackTier:
    """A tier that keeps packs in ``blobs``.  Calls from several threads.

    ``limit`` is how many bytes it may take (0: what it has and ``default_share`` of what is free; no limit when that
    is 0 too), ``ttl`` after how many seconds without use a pack leaves.
    """

    def __init__(
        self,
        name: str,
        blobs: Blobs,
        *,
        limit: int = 0,
        ttl: float = 0.0,
        compressor: Compressor | None = None,
        secrets_: Secrets | None = None,
        default_share: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._blobs = blobs
        self._limit = limit
        self._ttl = ttl
        self._compressor = compressor
        self._secrets = secrets_
        self._default_share = default_share
        self._clock = clock
        self._catalogue = Catalogue()
        self._lock = threading.Lock()
        """Around changes of the catalogue and the counters; nobody does I/O while holding it."""
        self._unfit: dict[str, int] = {}
        """Blobs that are no packs of ours, by name with their size: not read again."""
        self._suspects: set[str] = set()
        self._forgetting = Forgetting(blobs, self._put, self._catalogue, self._lock, secrets_, self._unseal, clock)
        self._kept: dict[str, tuple[int, float, Head]] | None = None
        self._next_snapshot = clock() + SNAPSHOT_SECONDS
        self._next_sweep = clock()
        self._changed = False
        self._scanned = False
        self._unread = 0
        """Packs that were seen and not yet learned."""
        self._counts = dict.fromkeys(
            (
                *("stored", "loaded", "missing", "corrupt", "wrong_key", "cleared"),
                *("expired_packs", "evicted_packs", "saved_bytes"),
            ),
            0,
        )

    # What is known without waiting

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        return self._catalogue.holds(namespace, keys)

    def find_tail(self, namespace: str, tail: Tail) -> StoredTail | None:
        best = self._catalogue.find_tail(namespace, tail)
        place = self._catalogue.find(namespace, best.key) if best is not None else None
        if best is None or place is None:
            return None
        return StoredTail(best, place.pack.records["parent"][place.position].tobytes())

    def namespaces(self) -> dict[str, Holding]:
        return self._catalogue.holdings(self._clock())

    def recent(self, namespace: str) -> Iterator[Run]:
        return self._catalogue.recent(namespace)

    def figures(self) -> dict[str, Any]:
        return {
            "bytes": self._catalogue.bytes,
            "limit": self._limit,
            "pages": self._catalogue.pages,
            "packs": len(self._catalogue),
            "scanned": self._scanned,
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
        cipher = self._secrets.new(namespace) if self._secrets else None
        entries: list[Entry] = []
        parts: list[bytes | memoryview] = []
        seen: set[bytes] = set()
        for position, page in enumerate(pages):
            if page.key in seen or self._catalogue.holds(namespace, [page.key]):
                outcomes[position] = Outcome.PRESENT
            elif len(page.payload) != expected:
                outcomes[position] = Outcome.WRONG_SIZE
            elif self._secrets is not None and cipher is None:
                outcomes[position] = Outcome.WRONG_KEY
            elif (page_sum := crc32c(page.payload)) != (page_sum if page.checksum is None else page.checksum):
                outcomes[position] = Outcome.CORRUPT
            else:
                seen.add(page.key)
                entry, part = self._encode(namespace, page, page_sum, cipher)
                entries.append(entry)
                parts.append(part)
        for start in range(0, len(entries), MAX_RECORDS):
            end = start + MAX_RECORDS
            if not self._write(namespace, expected, entries[start:end], parts[start:end], cipher):
                new = {entry.key for entry in entries[start:end]}
                outcomes = [Outcome.NO_ROOM if page.key in new else o for page, o in zip(pages, outcomes, strict=True)]
        self._count("stored", outcomes.count(Outcome.DONE))
        return outcomes

    def _encode(
        self, namespace: str, page: Stored, page_sum: int, cipher: PackCipher | None
    ) -> tuple[Entry, bytes | memoryview]:
        small = self._compressor.compress(namespace, page.payload) if self._compressor else None
        part: bytes | memoryview = page.payload if small is None else small
        codec = Codec.RAW if small is None else Codec.SHUFFLED_ZSTD
        if small is not None:
            self._count("saved_bytes", len(page.payload) - len(small))
        nonce = bytes(12)
        if cipher is not None:
            # The checksum of a page would tell something about it; sealed bytes prove themselves.
            nonce, part = cipher.seal(part, _names(namespace, page.key, page.parent, len(page.payload), codec))
            page_sum = 0
        stored_sum = page_sum if part is page.payload else crc32c(part)
        entry = Entry(
            page.key, page.parent, page.tail, len(part), len(page.payload), codec, page_sum, stored_sum, nonce
        )
        return entry, part

    def _write(
        self,
        namespace: str,
        page_size: int,
        entries: Sequence[Entry],
        parts: Sequence[bytes | memoryview],
        cipher: PackCipher | None,
    ) -> bool:
        now = self._clock()
        sealer = Sealer(cipher.salt, cipher.seal_tails) if cipher is not None else None
        raw, head = build_head(namespace, page_size, secrets.token_bytes(16), now, entries, sealer)
        total = len(raw) + sum(len(part) for part in parts)
        if self._limit and total > self._limit:
            return False
        self._make_room(total)
        name = pack_name(namespace, now, secrets.token_hex(8))
        self._put(name, [raw, *parts])
        with self._lock:
            self._catalogue.add(name, total, head, now)
            self._changed = True
        return True

    def _put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a blob; where the place is full, packs that were not used for longest give way to it."""
        try:
            self._blobs.put(name, parts)
        except TierFailed as error:
            if not _is_full(error) or not self._make_room_on_full_disk(sum(map(len, parts))):
                raise
            self._blobs.put(name, parts)

    def _make_room(self, size: int) -> None:
        if self._limit and self._catalogue.bytes + size > self._limit:
            with self._lock:
                leaving = self._catalogue.to_leave(self._limit - size)
            self._leave(leaving, "evicted_packs")

    def _make_room_on_full_disk(self, size: int) -> bool:
        with self._lock:
            leaving = self._catalogue.to_leave(max(self._catalogue.bytes - 2 * size, 0))
        self._leave(leaving, "evicted_packs")
        return bool(leaving)

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
        by_pack: dict[int, list[tuple[Place, int]]] = {}
        for position, page in enumerate(wanted):
            place = self._catalogue.find(namespace, page.key)
            if place is None:
                continue
            if int(place.pack.records["length"][place.position]) != len(page.into):
                outcomes[position] = Outcome.WRONG_SIZE
                continue
            by_pack.setdefault(place.pack.number, []).append((place, position))
        for places in by_pack.values():
            places.sort(key=lambda pair: int(pair[0].pack.records["offset"][pair[0].position]))
            for run in _runs(places):
                self._load_run(namespace, run, wanted, outcomes)
            self._used(places[0][0].pack)
        with self._lock:
            self._counts["loaded"] += outcomes.count(Outcome.DONE)
            self._counts["missing"] += outcomes.count(Outcome.MISSING)
        return outcomes

    def _load_run(
        self, namespace: str, run: list[tuple[Place, int]], wanted: Sequence[Wanted], outcomes: list[Outcome]
    ) -> None:
        pack, first = run[0][0].pack, run[0][0].position
        records = [pack.records[place.position] for place, _ in run]
        plain = not pack.head.sealed and all(int(record["codec"]) == Codec.RAW for record in records)
        if plain:
            buffers = [wanted[position].into for _, position in run]
        else:
            buffers = [memoryview(bytearray(int(record["stored"]))) for record in records]
        try:
            left = self._blobs.read(pack.name, int(pack.records["offset"][first]), buffers)
        except Gone:
            with self._lock:
                self._catalogue.remove(pack.name)
            return
        cipher = self._secrets.cipher(namespace, pack.head.salt) if pack.head.sealed and self._secrets else None
        for (place, position), record, buffer in zip(run, records, buffers, strict=True):
            left -= len(buffer)
            if left < 0 or crc32c(buffer) != int(record["stored_sum"]):
                outcome = Outcome.CORRUPT
            elif plain:
                outcome = Outcome.DONE
            else:
                outcome = self._decode(namespace, pack, record, buffer, cipher, wanted[position].into)
            outcomes[position] = outcome
            if outcome is Outcome.CORRUPT:
                self._bad(place, "bytes that do not match their checksum")
            elif outcome is Outcome.WRONG_KEY:
                self._leave_alone(pack)

    def _decode(
        self, namespace: str, pack: Pack, record: Any, stored: memoryview, cipher: PackCipher | None, into: memoryview
    ) -> Outcome:
        codec = int(record["codec"])
        bare: bytes | memoryview = stored
        if pack.head.sealed:
            if cipher is None:
                return Outcome.WRONG_KEY
            key, parent = record["key"].tobytes(), record["parent"].tobytes()
            names = _names(namespace, key, parent, int(record["length"]), codec)
            opened = cipher.open(stored, record["nonce"].tobytes(), names)
            if opened is None:
                # The checksum of what is stored was right, so it is the key that is not.
                return Outcome.WRONG_KEY
            bare = opened
        if not expand(codec, bare, into):
            return Outcome.CORRUPT
        right = pack.head.sealed or crc32c(into) == int(record["page_sum"])
        return Outcome.DONE if right else Outcome.CORRUPT

    def _bad(self, place: Place, why: str) -> None:
        with self._lock:
            self._catalogue.drop(place)
            self._counts["corrupt"] += 1
            first = place.pack.name not in self._suspects
            self._suspects.add(place.pack.name)
        if first:
            _log.warning("a page of a tier is bad and was dropped", tier=self.name, pack=place.pack.name, reason=why)

    def _leave_alone(self, pack: Pack) -> None:
        """Nothing of ``pack`` can be read with this node's keys."""
        with self._lock:
            self._counts["wrong_key"] += 1
            self._catalogue.remove(pack.name)
            first = pack.name not in self._unfit
            self._unfit[pack.name] = pack.size
        if first:
            _log.warning("a pack is encrypted with another key and is left alone", tier=self.name, pack=pack.name)

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

    def forget(self, meant: Meant, *, dry_run: bool = False) -> Forgotten:
        if dry_run:
            return self._forgetting.count(meant)
        if self._unread or not self._scanned:
            self._look(self._clock())
        # The written catalogue has tokens of what leaves: it is written anew when order is kept next.
        self._changed, self._next_snapshot = True, self._clock()
        gone = self._forgetting.forget(meant)
        self._count("cleared", gone.pages)
        return msgspec.structs.replace(gone, more=gone.more or self._unread > 0)

    def _probe(self) -> None:
        name, content = f"probe-{secrets.token_hex(8)}", secrets.token_bytes(PROBE_BYTES)
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
        spent, unread = 0.0, 0
        for blob in self._blobs.blobs():
            pack = known.pop(blob.name, None)
            if pack is not None and pack.size == blob.size:
                pack.used_at = max(pack.used_at, blob.modified)
            elif self._is_no_news(blob):
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
        self._unread = unread
        if not unread and not self._scanned:
            self._scanned, self._kept = True, {}
            free = self._blobs.room()
            if not self._limit and free is not None and self._default_share:
                self._limit = self._catalogue.bytes + int(self._default_share * free)

    def _is_no_news(self, blob: Blob) -> bool:
        """Whether ``blob``, which the catalogue does not have, is not to be learned of either."""
        known = self._unfit.get(blob.name) == blob.size or blob.name in self._forgetting
        return known or not PACK_NAME.fullmatch(blob.name)

    def _learn(self, blob: Blob, now: float) -> None:
        kept = (self._kept or {}).get(blob.name)
        try:
            if kept is not None and kept[0] == blob.size:
                head, used_at = kept[2], max(kept[1], blob.modified)
            else:
                head, used_at = read_head(self._blobs, blob, self._unseal), blob.modified
        except Gone:
            return
        except Malformed as error:
            self._unfit[blob.name] = blob.size
            _log.warning("a blob is no pack and is left alone", tier=self.name, blob=blob.name, reason=str(error))
            return
        if head.sealed and (self._secrets is None or self._secrets.cipher(head.namespace, head.salt) is None):
            self._unfit[blob.name] = blob.size
            self._count("wrong_key")
            return
        if head.damaged:
            self._suspects.add(blob.name)
        with self._lock:
            if self._catalogue.add(blob.name, blob.size, head, min(used_at, now)) is None:
                self._unfit[blob.name] = blob.size
            self._changed = True

    def _unseal(self, sealed: bytes, namespace: str, salt: bytes) -> bytes | None:
        return self._secrets.unseal_tails(sealed, namespace, salt) if self._secrets else None

    def _remove_suspects(self) -> None:
        # Not those that come meanwhile: of a place that lies every pack looks bad, the mended ones as well.
        for name in sorted(self._suspects):
            self._suspects.discard(name)
            if name in self._forgetting:
                continue
            mended = mend(self._blobs, name, self._secrets, put=self._put).now
            with self._lock:
                self._catalogue.remove(name)
            if mended is not None:
                self._learn(mended, self._clock())

    # The catalogue of the last start

    def _read_snapshot(self) -> dict[str, tuple[int, float, Head]]:
        try:
            raw = read_whole(self._blobs, CATALOGUE)
        except (Gone, TierFailed):
            return {}
        return unpack_snapshot(raw)

    def _write_snapshot(self) -> None:
        self._changed = False
        self._next_snapshot = self._clock() + SNAPSHOT_SECONDS
        self._put(CATALOGUE, pack_snapshot(self._catalogue))

    def close(self) -> None:
        if self._scanned and self._changed:
            self._write_snapshot()


def _names(namespace: str, key: bytes, parent: bytes, length: int, codec: int) -> bytes:
    return msgspec.msgpack.encode((namespace, key, parent, length, int(codec)))


def _runs(places: Sequence[tuple[Place, int]]) -> Iterable[list[tuple[Place, int]]]:
    """``places`` of one pack, in order, cut where they do not lie side by side."""
    run: list[tuple[Place, int]] = []
    end = -1
    for pair in places:
        record = pair[0].pack.records[pair[0].position]
        if run and int(record["offset"]) != end:
            yield run
            run = []
        run.append(pair)
        end = int(record["offset"]) + int(record["stored"])
    if run:
        yield run


def _is_full(error: TierFailed) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}
