"""Looks whether packs are what they claim to be, and keeps what is good of those that are damaged.

What always holds: what is good is written anew before the damaged pack is set aside; what is no pack of this format, or
was sealed with another key, stays as it is.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from ems.pool.layout import crc32c
from ems.pool.tiers.blobs import Blob, Blobs, Gone, read_whole
from ems.pool.tiers.pack_format import Head, Malformed, Record, build_head, find_head, folder_of, open_page, pack_name
from ems.pool.tiers.pack_seal import SealKeys

Put = Callable[[str, Sequence[bytes | memoryview]], None]
"""Writes a blob of a name from its parts."""
QUARANTINE = "quarantine/"
_SET_ASIDE = re.compile(QUARANTINE + r"[0-9a-f]{32}-[0-9a-f]{12}-[0-9a-f]{16}\.pack")
QUARANTINE_BYTES = 256 << 20
"""Most that is kept of damaged packs; the oldest leaves first."""
QUARANTINE_SHARE = 4
"""And no more than one in so many bytes of a tier with a size."""


class Finding(msgspec.Struct, frozen=True):
    """What a blob turned out to be, and the ``reason`` if something is wrong with it.

    ``unchecked``: a pack whose checksums are right, and for whose seals there is no key.  ``not_believed``: others may
    have written it, or it is no file.  Only what was ``mended`` was changed: its good pages are in a new pack, and the
    pack as it was is in the quarantine.
    """

    blob: str
    kind: Literal["good", "unchecked", "mended", "damaged", "other_key", "unreadable", "not_believed", "gone"]
    reason: str = ""
    good_pages: int = 0
    bad_pages: int = 0


class Quarantine:
    """Damaged packs that were set aside in ``blobs``, as far as it was told; ``limit`` is the tier's size."""

    def __init__(self, blobs: Blobs, limit: int) -> None:
        self._blobs = blobs
        self._most = min(QUARANTINE_BYTES, limit // QUARANTINE_SHARE) if limit else QUARANTINE_BYTES
        self._kept: dict[str, Blob] = {}

    def know(self, listed: Iterable[Blob]) -> None:
        """``listed`` is what is in the place."""
        found = [blob for blob in listed if _SET_ASIDE.fullmatch(blob.name) and not blob.refused]
        self._kept = {blob.name: blob for blob in sorted(found, key=lambda one: one.modified)}

    @property
    def bytes(self) -> int:
        return sum(blob.size for blob in self._kept.values())

    @property
    def names(self) -> list[str]:
        return list(self._kept)

    def take(self, blob: Blob) -> None:
        """Set ``blob`` aside; what was set aside long ago leaves for it."""
        name = QUARANTINE + blob.name.replace("/", "-")
        self._blobs.move(blob.name, name)
        self._kept[name] = msgspec.structs.replace(blob, name=name)
        while self.bytes > self._most:
            self._remove([next(iter(self._kept))])

    def clear(self, namespace: str, older: float) -> None:
        """Remove what there is of ``namespace`` from before the time ``older``."""
        mine = f"{QUARANTINE}{folder_of(namespace)}-"
        self._remove([name for name, one in self._kept.items() if name.startswith(mine) and one.modified <= older])

    def _remove(self, names: list[str]) -> None:
        if names:
            self._blobs.delete(names)
        for name in names:
            self._kept.pop(name, None)


def inspect(raw: bytes, name: str, keys: SealKeys | None) -> tuple[Head, list[int], str]:
    """The head of the pack ``raw``, the positions of its good pages, and what is wrong with it (empty: nothing).

    Without the right key pages are judged by their checksums alone.

    Raises Malformed: it is no pack of this format, or not the one that ``name`` says.
    """
    head, whole = find_head(lambda offset, count: raw[offset : offset + count], len(raw), name, keys)
    view, good = memoryview(raw)[head.data :], []
    for position, record in enumerate(map(Record._make, head.records.tolist())):
        stored = view[record.offset : record.offset + record.stored]
        if crc32c(stored) == record.stored_sum and (head.seal is None or open_page(head, record, stored) is not None):
            good.append(position)
    bad = len(head.records) - len(good)
    reasons = [f"{bad} bad page{'s' if bad > 1 else ''}"] if bad else []
    if not whole or not raw.endswith(head.last):
        reasons.append("its head or its end is damaged")
    return head, good, ", ".join(reasons)


def mend(
    blobs: Blobs,
    put: Put,
    name: str,
    keys: SealKeys | None,
    quarantine: Quarantine,
    *,
    dry_run: bool = False,
    makes_room: bool = False,
) -> Finding:
    """Look at the pack ``name``; if it is damaged, ``put`` its good pages into a new one and set it aside.

    ``makes_room`` says that ``put`` may remove the pack itself.  Raises TierFailed: the place does not work.
    """
    try:
        raw = read_whole(blobs, name)
        head, good, reason = inspect(raw, name, keys)
    except Gone:
        return Finding(name, "gone")
    except Malformed as error:
        return Finding(name, "unreadable", str(error))
    pages = (len(good), len(head.records) - len(good))
    if head.other_key:
        return Finding(name, "other_key", ", ".join(filter(None, ["it was sealed with another key", reason])), *pages)
    if not reason:
        return Finding(name, "unchecked" if head.seal is None else "good", "", *pages)
    if head.seal is None or dry_run:
        return Finding(name, "damaged", reason, *pages)
    fresh = ""
    if good:
        fresh, parts, _ = with_only(head, good, raw)
        put(fresh, parts)
    try:
        quarantine.take(Blob(name, len(raw), 0.0))
    except Gone:
        if not makes_room:  # it was cleared meanwhile, and nothing of it is to come back
            blobs.delete([fresh] if fresh else [])
            return Finding(name, "gone")
    return Finding(name, "mended", reason, *pages)


def with_only(head: Head, good: list[int], raw: bytes) -> tuple[str, list[bytes | memoryview], Head]:
    """The name, the parts and the head of a new pack that has only the pages at the positions ``good`` of ``raw``."""
    assert head.seal is not None
    view, records = memoryview(raw)[head.data :], head.records[good]
    places = zip(records["offset"].tolist(), records["stored"].tolist(), strict=True)
    parts = [view[offset : offset + stored] for offset, stored in places]
    tails = {new: head.tails[old] for new, old in enumerate(good) if old in head.tails}
    new = build_head(head.namespace, head.page_size, head.stored_at, records, tails, head.seal)
    return pack_name(head.namespace, head.stored_at, secrets.token_hex(8)), new.around(parts), new
