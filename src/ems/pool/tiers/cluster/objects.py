"""A page as an object of the cluster: its name, the header before its bytes, the seal of both; and what lists tails.

A brain.  Names are a keyed digest of namespace and key, so that who lacks the secret cannot even ask for a page, and
two tenants never meet.  What always holds: a page opens only under the namespace, key and size that it was sealed with;
what another release wrote, whose format differs, has another name.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from ems.pool.keys import KEY_BYTES, MAX_TAIL, Tail
from ems.pool.movement.hot_list import HotRun
from ems.pool.tiers.answers import StoredTail
from ems.pool.tiers.pack_seal import NONCE_BYTES, SALT_BYTES, TAG_BYTES, PackSeal, SealKeys

FORMAT_VERSION = 1
MAGIC = b"EMSPAGE1"
MAX_LISTED = 16
"""Tails of one directory that are listed; the oldest leave the list."""
MAX_LISTING = 256 << 10
"""Bytes of the largest list that is believed, twice what is written."""
HOT_LIST_BYTES = 64 << 10
"""Of a list of hot pages, which each host reads each time it looks: about four thousand keys."""
_HOT = b"ems-hot-pages"
LEAST_LISTING = 1 << 10  # bytes of the smallest list of tails; each size is twice the one before
_FILLER = (b"", bytes(256))
"""What is no tail, for its second part is no key, and who reads it leaves it out."""

_HEADER = struct.Struct(f"<8sHHIQ{KEY_BYTES}s{KEY_BYTES}s{NONCE_BYTES}s{TAG_BYTES}s")
HEADER_BYTES = 128
_SALT = hashlib.sha256(b"ems-cluster-object-v1").digest()[:SALT_BYTES]
_NAME_BYTES = 20
_LENGTH = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview
_Told = TypeVar("_Told")


class Opened(msgspec.Struct, frozen=True):
    """What the header of a page says that is what was asked for."""

    parent: bytes
    checksum: int


class ObjectSeal:
    """Names, seals and opens all that belongs to one ``namespace``."""

    def __init__(self, namespace: str, seal: PackSeal) -> None:
        self._namespace = namespace.encode()
        self._seal = seal
        self._naming = seal.derived(b"ems-cluster-names")
        self._prefix = f"ems{FORMAT_VERSION}-{seal.derived(b'ems-cluster-namespace').hex()[:16]}-"
        self.all_names = f"^{self._prefix}.*"
        """Matches the names of all objects of the namespace, and no others."""

    def name(self, key: bytes) -> str:
        return self._named(b"page", key)

    def listing_name(self, directory: bytes) -> str:
        return self._named(b"tails", directory)

    @property
    def hot_name(self) -> str:
        return self._named(b"hot", b"")

    def _named(self, kind: bytes, key: bytes) -> str:
        digest = hashlib.blake2b(kind + b"\0" + key, digest_size=_NAME_BYTES, key=self._naming)
        return f"{self._prefix}{digest.hexdigest()}"

    def _names(self, key: bytes, parent: bytes, size: int, checksum: int) -> bytes:
        return msgspec.msgpack.encode((self._namespace, key, parent, size, checksum))

    def header(self, key: bytes, parent: bytes, payload: bytes | memoryview, checksum: int) -> bytes:
        """What stands before ``payload``, a page whose checksum is ``checksum``."""
        size = len(payload)
        nonce, tag, _ = self._seal.seal(payload, self._names(key, parent, size, checksum))
        packed = _HEADER.pack(MAGIC, FORMAT_VERSION, 0, checksum, size, key, parent, nonce, tag)
        return packed.ljust(HEADER_BYTES, b"\0")

    def open(self, header: Buffer, key: bytes, payload: Buffer) -> Opened | None:
        """What ``header`` says of ``payload``; None when they are not the page ``key`` as it was sealed."""
        magic, version, _, checksum, size, named, parent, nonce, tag = _HEADER.unpack_from(header)
        if (magic, version, size, named) != (MAGIC, FORMAT_VERSION, len(payload), key):
            return None
        opened = self._seal.open(payload, nonce, tag, self._names(key, parent, size, checksum))
        return None if opened is None else Opened(parent, checksum)

    def listing(self, directory: bytes, tails: Sequence[StoredTail]) -> bytes:
        """The object that lists ``tails`` of ``directory``, the newest last.

        Its sizes are few, as for the reason of :meth:`hot_list`: what comes first fills it up, and is no tail.
        """
        told = [(one.tail.tokens, one.parent) for one in tails[-MAX_LISTED:]]
        while (size := len(msgspec.msgpack.encode([_FILLER, *told]))) > MAX_LISTING // 2:
            del told[0]
        fills = bytes(max(1 << (size - 1).bit_length(), LEAST_LISTING) - size + len(_FILLER[1]))
        return self._sealed_list(msgspec.msgpack.encode([(b"", fills), *told]), directory)

    def listed(self, directory: bytes, raw: Buffer) -> list[StoredTail]:
        """The tails in ``raw``; none when it is not what was sealed."""
        told = _decoded(self._opened_list(raw, directory, MAX_LISTING), list[tuple[bytes, bytes]]) or []
        return [
            StoredTail(tail, parent)
            for tokens, parent in told[-MAX_LISTED:]
            if len(tokens) <= MAX_TAIL and len(parent) == KEY_BYTES and (tail := Tail(directory, tokens)).sound
        ]

    def hot_list(self, runs: Sequence[HotRun]) -> bytes:
        """The object that lists ``runs``, the newest last, as many as there is room for.

        All have one size, because Mooncake keeps the memory of what was replaced by another size for ten minutes.
        """
        parts = [msgspec.msgpack.encode(run) for run in runs]
        while sum(map(len, parts)) > HOT_LIST_BYTES - _LENGTH.size - 5:  # msgpack's longest head of a list
            del parts[0]
        told = msgspec.msgpack.encode([msgspec.Raw(part) for part in parts])
        return self._sealed_list((_LENGTH.pack(len(told)) + told).ljust(HOT_LIST_BYTES, b"\0"), _HOT)

    def hot_listed(self, raw: Buffer) -> list[HotRun] | None:
        """The runs in ``raw``; None when it is not what was sealed, or is being written just then."""
        body = self._opened_list(raw, _HOT, HOT_LIST_BYTES)
        if body is None or len(body) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(body)
        runs = _decoded(bytes(body[_LENGTH.size :][:length]), list[HotRun])
        return None if runs is None else [run for run in runs if run.sound]

    def _sealed_list(self, body: bytes, name: bytes) -> bytes:
        nonce, tag, _ = self._seal.seal(body, name)
        return nonce + tag + body

    def _opened_list(self, raw: Buffer, name: bytes, limit: int) -> bytes | None:
        nonce, tag, body = raw[:NONCE_BYTES], raw[NONCE_BYTES:][:TAG_BYTES], raw[NONCE_BYTES + TAG_BYTES :]
        if len(raw) > limit + NONCE_BYTES + TAG_BYTES or len(tag) < TAG_BYTES:
            return None
        return bytes(body) if self._seal.open(body, bytes(nonce), bytes(tag), name) is not None else None


def _decoded(body: bytes | None, kind: type[_Told]) -> _Told | None:
    """None where ``body`` is no such list: without a secret anybody may have put it there."""
    try:
        return None if body is None else msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError:
        return None


class Objects:
    """The seals of all namespaces, from the secrets ``keys``."""

    def __init__(self, keys: SealKeys) -> None:
        self._keys = keys
        self._seals: dict[str, ObjectSeal | None] = {}

    def of(self, namespace: str) -> ObjectSeal | None:
        """None where the namespace's tenant has no secret here."""
        if namespace not in self._seals:
            seal = self._keys.pack(namespace, _SALT)
            self._seals[namespace] = None if seal is None else ObjectSeal(namespace, seal)
        return self._seals[namespace]
