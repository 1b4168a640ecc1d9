"""Names of blocks and namespaces: equal for equal KV state, different otherwise, on every host and Python.

A block's key is a hash chained over its whole prefix, so one key says everything that came before it.
Nothing here depends on ``PYTHONHASHSEED``, on pickling or on the process.  SHA-256 cut to 128 bits is used
because a key that collides would serve another prompt's state; it costs about half a microsecond a block.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, NewType

import msgspec
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

KEY_BYTES = 16
BlockKey = NewType("BlockKey", bytes)
"""16 bytes that name a block together with its whole prefix."""

NO_PARENT = BlockKey(bytes(KEY_BYTES))
"""The parent of a prompt's first block."""

NO_DIRECTORY = bytes(KEY_BYTES)
"""In place of a tail's directory: there is none."""

MAX_TAIL = 64 << 10
"""Bytes of the tokens of one tail."""

_canonical = msgspec.msgpack.Encoder(order="deterministic")


def fingerprint(facts: Mapping[str, object]) -> str:
    """32 hex digits that change when any of ``facts`` (plain values only) changes, whatever their order."""
    return hashlib.sha256(_canonical.encode(dict(facts))).hexdigest()[:32]


def namespace_name(tenant: str, model: str, layout_fingerprint: str) -> str:
    """The name under which pages of one tenant, model and layout live: ``tenant/model/fingerprint``.

    Models have slashes in their names; those of a tenant are escaped, or one tenant could pass for another.
    """
    return "/".join([_without_slash(tenant), model, _without_slash(layout_fingerprint)])


def _without_slash(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F")


@functools.lru_cache(maxsize=64)
def root_key(namespace: str) -> bytes:
    """Where the chains of ``namespace`` begin; two namespaces share no key even for equal tokens."""
    return hashlib.sha256(b"ems-block-v1\0" + namespace.encode()).digest()[:KEY_BYTES]


class Tail(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block by what is in it: ``directory`` names its place, ``tokens`` are those that it has, 4 bytes a token.

    The place is the block's prefix and whatever else matters.  Two tails of one directory that begin with the same
    tokens hold the same state for these tokens.
    """

    directory: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)]
    tokens: Annotated[bytes, msgspec.Meta(max_length=MAX_TAIL)]

    @property
    def key(self) -> BlockKey:
        """The key of a page with exactly these tokens."""
        return BlockKey(hashlib.sha256(self.directory + self.tokens).digest()[:KEY_BYTES])

    @property
    def sound(self) -> bool:
        """Whether it names a place, and whole tokens, one at least: others may send anything."""
        return len(self.directory) == KEY_BYTES and bool(self.tokens) and not len(self.tokens) % 4

    def common(self, tokens: bytes) -> int:
        """How many leading tokens this tail and ``tokens`` share."""
        mine, other = (np.frombuffer(raw, dtype="<u4") for raw in (self.tokens, tokens))
        length = min(len(mine), len(other))
        differ = np.flatnonzero(mine[:length] != other[:length])
        return int(differ[0]) if len(differ) else length


class KeyChain:
    """Keys of one request's blocks, made as its tokens become known; each is that of a :class:`Tail`, full or not.

    The chain grows only: :meth:`extend` takes all token ids known so far and adds a key for every block
    that is complete by then.  ``extra(start, end)`` names whatever else changes the KV state of the tokens
    ``[start, end)`` (LoRA adapter, multimodal content, cache salt): any values that msgpack can carry.
    """

    __slots__ = ("_block_size", "_keys", "_root", "_tails")

    def __init__(self, namespace: str, block_size: int) -> None:
        if block_size <= 0:
            raise ValueError(f"block_size is {block_size}, expected a positive number of tokens")
        self._block_size = block_size
        self._root = root_key(namespace)
        self._keys: list[BlockKey] = []
        self._tails: list[Tail] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, span: slice) -> list[BlockKey]:
        return self._keys[span]

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._keys)

    def packed(self, start: int, end: int) -> bytes:
        return b"".join(self._keys[start:end])

    def parent(self, index: int) -> BlockKey:
        """The key before block ``index``, :data:`NO_PARENT` for the first."""
        return self._keys[index - 1] if index else NO_PARENT

    def tails(self, start: int, end: int) -> list[Tail]:
        """What the full blocks ``[start, end)`` are found by beside their keys."""
        return self._tails[start:end]

    def tail(self, index: int, token_ids: Sequence[int], extra: object = None) -> Tail:
        """The name of a part of block ``index`` that holds ``token_ids``; ``extra`` is as in :meth:`extend`."""
        return self._named(index, np.asarray(token_ids, dtype="<u4").tobytes(), extra)

    def _named(self, index: int, tokens: bytes, extra: object) -> Tail:
        before = self._keys[index - 1] if index else self._root
        digest = hashlib.sha256(b"ems-tail-v1\0" + before)
        if extra is not None:
            digest.update(_canonical.encode(extra))
        return Tail(digest.digest()[:KEY_BYTES], tokens)

    def extend(self, token_ids: Sequence[int], extra: Sequence[object] = (), blocks: int | None = None) -> int:
        """Add keys for all blocks complete in ``token_ids`` (the request's tokens from its start).

        ``extra[i]`` belongs to block ``i``; missing entries and ``None`` mean nothing else matters.  With ``blocks``
        the chain becomes at most that long.  Returns the number of keys.
        """
        size, done = self._block_size, len(self._keys)
        whole = len(token_ids) // size if blocks is None else min(len(token_ids) // size, blocks)
        if whole <= done:
            return done
        raw, step = np.asarray(token_ids[done * size : whole * size], dtype="<u4").tobytes(), size * 4
        for index in range(done, whole):
            tokens = raw[(index - done) * step : (index - done + 1) * step]
            tail = self._named(index, tokens, extra[index] if index < len(extra) else None)
            self._tails.append(tail)
            self._keys.append(tail.key)
        return whole


def integer_key(value: int, namespace: str) -> BlockKey:
    """The key of a block that its caller names by any Python integer, negative and huge ones too."""
    size = (value.bit_length() + 8) // 8
    raw = value.to_bytes(size, "little", signed=True)
    return BlockKey(hashlib.sha256(root_key(namespace) + raw).digest()[:KEY_BYTES])


def cut(raw: bytes, size: int) -> list[bytes]:
    """``raw`` in pieces of ``size`` bytes; many at once cost a twentieth of what slicing costs.

    Raises ValueError: its length is no multiple of that.
    """
    pieces: list[bytes] = np.frombuffer(raw, dtype=f"V{size}").tolist()
    return pieces


def split_keys(raw: bytes) -> list[bytes]:
    return cut(raw, KEY_BYTES)


def directories_of(directories: bytes, keys: int, first: int) -> list[bytes]:
    """Of each key from the ``first`` of so many the directory of its chunk, and last the one behind all.

    ``directories`` has those of the chunks, of each of which equally many keys are, and the one behind; or it is empty.
    """
    each = split_keys(directories)
    if not each:
        return []
    shards = keys // (len(each) - 1)
    return [each[at // shards] for at in range(first, keys)] + each[-1:]


@functools.lru_cache(maxsize=64)
def _masks(shards: int) -> npt.NDArray[np.uint8]:
    """One row of 16 bytes a shard; the first is zero, so that a chunk of one shard keeps its key."""
    rows = [hashlib.sha256(b"ems-shard-v1\0%d" % shard).digest()[:KEY_BYTES] for shard in range(shards)]
    masks = np.frombuffer(b"".join(rows), np.uint8).reshape(shards, KEY_BYTES).copy()
    masks[0] = 0
    masks.setflags(write=False)
    return masks


def page_keys(keys: bytes, shards: int) -> bytes:
    """The keys of all pages of the chunks ``keys``, chunk by chunk: a key and a shard's constant, combined by XOR.

    Keys are hashes, so that two chunks' shards meet no more often than two hashes do.
    """
    if shards == 1:
        return keys
    chunks = np.frombuffer(keys, np.uint8).reshape(-1, 1, KEY_BYTES)
    return (chunks ^ _masks(shards)).tobytes()


def shard_masks(shards: int) -> bytes:
    """What, combined by XOR with the key of a chunk, names its pages but the first, joined."""
    return _masks(shards)[1:].tobytes()


def masked(key: bytes, masks: bytes) -> list[bytes]:
    """``key`` and, combined with each of ``masks``, the keys of the other pages of its chunk."""
    return [
        key,
        *split_keys((np.frombuffer(masks, np.uint8).reshape(-1, KEY_BYTES) ^ np.frombuffer(key, np.uint8)).tobytes()),
    ]


def page_key(key: bytes, shard: int) -> bytes:
    """The key of one shard of the chunk ``key``; no parent stays no parent."""
    return key if key == NO_PARENT else page_keys(key, shard + 1)[-KEY_BYTES:]
