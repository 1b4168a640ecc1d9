"""The pool's keys of the chunks of one request, from vLLM's.

vLLM's key of a chunk is its block hash, which covers all tokens before it, and the number of its group.  What always
holds: keys of two epochs of weights differ; a chunk's parent is the chunk before it in its group, as far as that is
known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from itertools import islice

from ems.pool.keys import KEY_BYTES, NO_PARENT

GROUP_BYTES = 4


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")


class ChunkKeys:
    """Chunks of a request, whose group ``g`` has ``tokens[g]`` tokens a chunk; ``ends`` grows with the request.

    ``ends`` says of each of vLLM's keys with which token its chunk ends, in the order of chunks in each group.
    """

    def __init__(self, chain_name: str, tokens: Mapping[int, int], ends: Mapping[bytes, int]) -> None:
        self._salt = hashlib.blake2b(chain_name.encode(), digest_size=32).digest()
        self._tokens = tokens
        self.ends = ends
        self._seen = 0
        self._at: dict[tuple[int, int], bytes] = {}

    def _read(self) -> None:
        for key, end in islice(self.ends.items(), self._seen, None):
            self._at[group_of(key), end] = key
        self._seen = len(self.ends)

    def pool_key(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=KEY_BYTES, key=self._salt).digest()

    def parent(self, key: bytes) -> bytes:
        """The pool's key of the chunk before."""
        self._read()
        group = group_of(key)
        before = self._at.get((group, self.ends.get(key, 0) - self._tokens[group]))
        return NO_PARENT if before is None else self.pool_key(before)

    def chunks(self) -> dict[int, list[bytes]]:
        """VLLM's keys of all chunks by group, in order."""
        self._read()
        found: dict[int, list[tuple[int, bytes]]] = {group: [] for group in self._tokens}
        for (group, end), key in self._at.items():
            if end % self._tokens[group] == 0:  # vLLM asks for a part of a chunk by a key of its own
                found[group].append((end, key))
        return {group: [key for _, key in sorted(ends)] for group, ends in found.items()}


def packed(keys: Collection[bytes]) -> bytes:
    return b"".join(keys)
