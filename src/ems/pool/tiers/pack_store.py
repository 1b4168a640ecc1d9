"""The packs in a place, and what this node knows of them: which come and go, which leave for others, which are damaged.

What always holds: the catalogue is what this node has seen itself; a pack that vanished or turned out bad costs its
pages and nothing else; what this node does not understand, or was sealed with another key, it neither changes nor
removes.
"""

from __future__ import annotations

import errno
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import structlog

from ems.errors import TierFailed
from ems.pool.tiers.blobs import Blob, Blobs, Gone, read_part, read_whole
from ems.pool.tiers.catalogue import (
    CATALOGUE,
    CATALOGUE_MAGIC,
    Catalogue,
    Pack,
    PackLocation,
    decode_packs,
    encode_packs,
)
from ems.pool.tiers.pack_format import PACK_NAME, Head, Malformed, find_head, folder_of, pack_name, parse_head
from ems.pool.tiers.pack_seal import SealKeys
from ems.pool.tiers.repair import QUARANTINE, Quarantine, mend

SCAN_SECONDS = 2.0
"""How long one look learns of new packs before it goes on in the next; listing them does not count."""
UNFINISHED_SECONDS = 600.0
"""What a writer has not finished for so long was left by one that died."""
SNAPSHOT_SECONDS = 600.0
MOST_CATALOGUE = 128 << 20
"""Bytes of a catalogue that are read; a larger one counts as damaged, and packs are looked at one by one."""
TOUCH_SECONDS = 60.0
"""A blob's use is noted at most this often."""
DEFAULT_PART = 2
"""A tier without a size may take one in so many bytes that are free in its place."""
PROBE_BYTES = 4096
PROBE_NAME = re.compile(r"probe-[0-9a-f]{16}")
UNFIT = {
    "wrong_key": "packs were sealed with another key and are left alone; all nodes of a tier need the same",
    "unreadable": "blobs that are named like packs are none of this format and are left alone; 'ems fsck' says more",
    "not_believed": "what others than this node's user may have written, or is no file, is left alone",
}
"""Why a blob is not learned of, and what is said of that."""

_log = structlog.get_logger("ems.tier")


class _Unfit(NamedTuple):
    """A blob that is not learned of, nor read again while it has this size; ``namespace`` is what it claims."""

    size: int
    why: str
    namespace: str = ""


class PackStore:
    """The packs in ``blobs``, sealed with ``keys``, of the tier ``name``.  Calls from several threads.

    ``limit`` is how many bytes they may take (0: what they take and half of what is free, no limit where there is no
    end), ``ttl`` after how many seconds without use one leaves.
    """

    def __init__(
        self, name: str, blobs: Blobs, keys: SealKeys, limit: int, ttl: float, clock: Callable[[], float]
    ) -> None:
        self._blobs = blobs
        self._keys = keys
        self._clock = clock
        self._catalogue = Catalogue()
        self._lock = threading.Lock()
        """Around changes of the catalogue; nobody does I/O while holding it."""
        self._quarantine = Quarantine(blobs, limit)
        self._leaving: set[str] = set()
        """Packs that an administrator cleared and that are still to be removed: they are not learned again."""
        self.scanned = False
        """Whether all that is there was learned of in the last look."""
        self.name = name
        self._limit = limit
        self._ttl = ttl
        self._unfit: dict[str, _Unfit] = {}
        self._warned: set[str] = set()
        self._suspects: set[str] = set()
        self._last_seen: dict[str, tuple[int, float, bytes]] | None = None
        """What the last node wrote down, until all was seen."""
        self._next_snapshot = clock() + SNAPSHOT_SECONDS
        self._next_sweep = clock()
        self._changed = False
        self._left = {"expired_packs": 0, "evicted_packs": 0}

    def figures(self) -> dict[str, Any]:
        return {
            "bytes": self._catalogue.bytes,
            "limit": self._limit,
            "pages": self._catalogue.pages,
            "packs": len(self._catalogue),
            "scanned": self.scanned,
            "quarantined_bytes": self._quarantine.bytes,
            **dict.fromkeys(UNFIT, 0),
            **Counter(unfit.why for unfit in list(self._unfit.values())),
            **self._left,
        }

    def left_alone(self) -> set[str]:
        return {unfit.namespace for unfit in list(self._unfit.values()) if unfit.namespace}

    def _left_alone_of(self, namespace: str) -> int:
        """How many packs of ``namespace`` this node does not understand."""
        folder = folder_of(namespace)
        return sum(name.startswith(folder) for name in list(self._unfit))

    # Writing

    def _write(self, head: Head, pages: Sequence[bytes | memoryview]) -> bool:
        """Write a new pack, for which others make room; False when it is larger than all that there may be."""
        if self._limit and head.total > self._limit:
            return False
        self._make_room(head.total)
        name = pack_name(head.namespace, head.stored_at, secrets.token_hex(8))
        self._put(name, head.around(pages))
        with self._lock:
            self._catalogue.add(name, head.total, head, head.stored_at)
            self._changed = True
        return True

    def _put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a blob; where the place is full, packs that were not used for longest give way to it."""
        try:
            self._blobs.put(name, parts)
        except TierFailed as error:
            most = max(self._catalogue.bytes - 2 * sum(map(len, parts)), 0)
            if not _is_full(error) or not self._leave("evicted_packs", lambda: self._catalogue.to_leave(most)):
                raise
            self._blobs.put(name, parts)

    def _make_room(self, size: int) -> None:
        if self._limit:
            most = self._limit - size - self._quarantine.bytes
            self._leave("evicted_packs", lambda: self._catalogue.to_leave(most))

    def _leave(self, count: str, choose: Callable[[], list[Pack]]) -> bool:
        """Remove the packs that ``choose`` says of what is known then; whether there are any."""
        with self._lock:
            names = [pack.name for pack in choose()]
            for name in names:
                self._catalogue.remove(name)
            self._left[count] += len(names)
            self._changed = self._changed or bool(names)
        if names:
            self._blobs.delete(names)
        return bool(names)

    # Reading

    def _forget(self, name: str) -> None:
        with self._lock:
            self._catalogue.remove(name)

    def _drop(self, place: PackLocation) -> None:
        """The page at ``place`` is not what it should be."""
        with self._lock:
            self._catalogue.drop(place)
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

    def maintain(self) -> None:
        """Mend what turned out bad, look what is there, make room, remove what is too old, write down what is known."""
        self._mend_suspects()
        self._look()
        now = self._clock()
        self._leave("expired_packs", lambda: self._catalogue.too_old(now, self._ttl))
        self._make_room(0)
        if now >= self._next_sweep:
            self._next_sweep = now + UNFINISHED_SECONDS
            if left := self._blobs.sweep(now - UNFINISHED_SECONDS):
                _log.info("what dead writers left was removed", tier=self.name, pieces=left)
        if self._changed and now >= self._next_snapshot:
            self._write_snapshot()

    def probe(self) -> None:
        """Find out whether the place works.  Raises TierFailed: it does not."""
        name, content = f"probe-{secrets.token_hex(8)}", secrets.token_bytes(PROBE_BYTES)
        try:
            self._put(name, [content])
        except TierFailed as error:
            if not _is_full(error):
                raise
            # It may be full of packs that were never read, or misread while the place was not well: these can give way.
            self._unfit = {}
            self._look()
            self._put(name, [content])
        try:
            found = read_part(self._blobs, name, 0, PROBE_BYTES)
        except Gone:
            found = b""
        self._blobs.delete([name])
        if found != content:
            raise TierFailed("what was written for a test is not what was read back")

    def _look(self) -> None:
        """Learn of packs that came and went; what one look does not get done is left to the next."""
        if self._last_seen is None:
            self._last_seen = self._read_snapshot()
        now = self._clock()
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
        with self._lock:
            for name in known:
                self._catalogue.remove(name)
        self._quarantine.know(aside)
        self._warn()
        self.scanned = not unread
        if self.scanned:
            self._last_seen = {}
            if not self._limit and (free := self._blobs.room()) is not None:
                self._limit = self._catalogue.bytes + free // DEFAULT_PART

    def _is_news(self, blob: Blob, before: _Unfit | None) -> bool:
        """Whether ``blob``, which was unfit ``before``, is to be learned of; why not is noted."""
        is_pack = PACK_NAME.fullmatch(blob.name) is not None
        if blob.refused and (is_pack or blob.name == CATALOGUE):
            self._unfit[blob.name] = _Unfit(blob.size, "not_believed")
        elif before is not None and before.size == blob.size and before.why != "not_believed":
            self._unfit[blob.name] = before
        else:
            return is_pack and blob.name not in self._leaving
        return False

    def _warn(self) -> None:
        """Say once what is not learned of, and why."""
        for name, unfit in sorted(self._unfit.items()):
            if unfit.why not in self._warned:
                self._warned.add(unfit.why)
                _log.warning(UNFIT[unfit.why], tier=self.name, first=name, number=self.figures()[unfit.why])

    def _learn(self, blob: Blob, now: float) -> None:
        try:
            head, used_at, whole = self._head(blob)
        except Gone:
            return
        except Malformed:
            self._unfit[blob.name] = _Unfit(blob.size, "unreadable")
            return
        if head.seal is None:
            self._unfit[blob.name] = _Unfit(blob.size, "wrong_key", head.namespace)
            return
        if not whole:
            self._suspects.add(blob.name)
        with self._lock:
            if self._catalogue.add(blob.name, blob.size, head, min(used_at, now)) is None:
                self._unfit[blob.name] = _Unfit(blob.size, "unreadable", head.namespace)
            self._changed = True

    def _head(self, blob: Blob) -> tuple[Head, float, bool]:
        """The head of the pack ``blob``, when it was used, and whether it is whole as far as can be seen.

        Raises Gone: the blob vanished.  Malformed: it is no pack of this format.
        """
        size, used_at, raw = (self._last_seen or {}).get(blob.name, (-1, 0.0, b""))
        if size == blob.size:
            try:
                head = parse_head(raw, blob.name, self._keys)
                return head, max(blob.modified, used_at), head.total == size
            except Malformed:
                pass  # what was written down is damaged, the pack itself need not be
        head, whole = find_head(partial(read_part, self._blobs, blob.name), blob.size, blob.name, self._keys)
        return head, blob.modified, whole

    def _mend_suspects(self) -> None:
        # Not those that come meanwhile: of a place that lies every pack looks bad, the mended ones as well.
        for name in sorted(self._suspects):
            self._suspects.discard(name)
            if name not in self._leaving:
                finding = mend(self._blobs, self._put, name, self._keys, self._quarantine, makes_room=True)
                self._forget(name)
                if finding.kind == "mended":
                    _log.warning("a damaged pack was set aside", tier=self.name, pack=name, reason=finding.reason)

    def _read_snapshot(self) -> dict[str, tuple[int, float, bytes]]:
        try:
            return decode_packs(read_whole(self._blobs, CATALOGUE, MOST_CATALOGUE))
        except (Gone, TierFailed):
            return {}

    def _write_snapshot(self) -> None:
        self._changed = False
        self._next_snapshot = self._clock() + SNAPSHOT_SECONDS
        try:
            strange = read_part(self._blobs, CATALOGUE, 0, len(CATALOGUE_MAGIC)) not in {CATALOGUE_MAGIC, b""}
        except Gone:
            strange = CATALOGUE in self._unfit
        if not strange:  # neither of somebody else nor of a later release
            self._put(CATALOGUE, encode_packs(self._catalogue))

    def close(self) -> None:
        """Write down what the next start can use; blocks."""
        if self.scanned and self._changed:
            self._write_snapshot()


def _is_full(error: TierFailed) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}
