"""Looks whether packs are what they claim to be, and keeps what is good of those that are not.

What always holds: what is good is written anew before the old pack is removed; a blob that is not ours stays untouched.
"""

from __future__ import annotations

import secrets as random
from collections.abc import Callable, Sequence

import msgspec

from ems.pool.checksum import crc32c
from ems.pool.tiers.blobs import Blob, Blobs, Gone
from ems.pool.tiers.cipher import Secrets
from ems.pool.tiers.heads import folder_of, pack_name, read_whole, within
from ems.pool.tiers.record import Entry, Head, Malformed, Sealer, build_head, parse_head

Put = Callable[[str, Sequence[bytes | memoryview]], None]
"""Writes a blob of a name from its parts."""
_NUMBERS = ("length", "codec", "page_sum", "stored_sum")


class Verdict(msgspec.Struct, frozen=True):
    """What became of a pack: the blob that holds its good pages ``now`` (None: there is none), and how many pages.

    ``reason`` says what is wrong, empty when nothing is; ``mended`` is False after a look that changed nothing.
    """

    now: Blob | None
    good: int = 0
    bad: int = 0
    reason: str = ""
    mended: bool = False


def look(raw: bytes, name: str, keys: Secrets | None) -> tuple[Head | None, list[int], str]:
    """The head of the pack ``raw``, the positions of its good pages, and what is wrong (empty: nothing).

    Tails that are encrypted are read with ``keys`` only; pages are judged by their checksums, encrypted or not.
    """
    try:
        head = parse_head(raw, keys.unseal_tails if keys else _sealed)
    except Malformed as error:
        return None, [], str(error)
    if not name.startswith(f"{folder_of(head.namespace)}/"):
        return None, [], "it is the pack of another namespace than its name says"
    head = within(head, len(raw))
    view, records = memoryview(raw), head.records
    good = [
        position
        for position, (offset, stored, total) in enumerate(
            zip(records["offset"].tolist(), records["stored"].tolist(), records["stored_sum"].tolist(), strict=True)
        )
        if crc32c(view[offset : offset + stored]) == total
    ]
    whole = len(good) == len(records) and not head.damaged
    bad = len(records) - len(good)
    return head, good, "" if whole else f"{bad} bad pages, {head.damaged} damaged records"


def _sealed(_sealed: bytes, _namespace: str, _salt: bytes) -> None:
    return None


def mend(blobs: Blobs, name: str, keys: Secrets | None, *, dry_run: bool = False, put: Put | None = None) -> Verdict:
    """Look at the pack ``name``; unless ``dry_run``, put its good pages into a new one if any are bad.

    ``put`` writes the new one, where that takes more than ``blobs`` do on their own.

    Raises:
        TierFailed: the place does not work.
    """
    try:
        raw = read_whole(blobs, name)
    except Gone:
        return Verdict(None)
    head, good, reason = look(raw, name, keys)
    blob = Blob(name, len(raw), 0.0)
    if not reason:
        return Verdict(blob, good=len(good))
    bad = max(len(head.records) - len(good), 1) if head is not None else 1
    if dry_run:
        return Verdict(blob, len(good), bad, reason)
    mended = None
    if head is not None and good:
        new = with_only(head, good, raw, keys)
        fresh = pack_name(head.namespace, head.stored_at, random.token_hex(8))
        (put or blobs.put)(fresh, new)
        mended = Blob(fresh, sum(map(len, new)), 0.0)
    blobs.delete([name])
    return Verdict(mended, len(good), bad, reason, mended=True)


def with_only(head: Head, good: list[int], raw: bytes, keys: Secrets | None) -> list[bytes | memoryview]:
    """The parts of a pack that has only the pages at the positions ``good`` of the pack ``raw``."""
    view = memoryview(raw)
    cipher = keys.cipher(head.namespace, head.salt) if keys and head.sealed else None
    entries, parts = [], []
    for position in good:
        record = head.records[position]
        offset, stored = int(record["offset"]), int(record["stored"])
        parts.append(view[offset : offset + stored])
        key, parent, nonce = (record[name].tobytes() for name in ("key", "parent", "nonce"))
        length, codec, page_sum, stored_sum = (int(record[name]) for name in _NUMBERS)
        tail = head.tails.get(position)
        entries.append(Entry(key, parent, tail, stored, length, codec, page_sum, stored_sum, nonce))
    seal = cipher.seal_tails if cipher is not None else _nothing
    sealer = Sealer(head.salt, seal) if head.sealed else None
    pack_id = random.token_bytes(16)
    built, _ = build_head(head.namespace, head.page_size, pack_id, head.stored_at, entries, sealer)
    return [built, *parts]


def _nothing(_tails: bytes) -> bytes:
    return b""
