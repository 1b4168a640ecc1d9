"""A place for packs in this process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ems.pool.tiers.blobs import Blob, Gone


class MemoryBlobs:
    """A place in this process, whose blobs a test may change as it likes: ``contents`` by name."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        self.contents[name] = b"".join(parts)
        self.modified[name] = time.time()

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        if name not in self.contents:
            raise Gone(name)
        raw, done = self.contents[name][offset:], 0
        for part in into:
            piece = raw[done : done + len(part)]
            part[: len(piece)] = piece
            done += len(piece)
        return done

    def blobs(self) -> Iterable[Blob]:
        return [Blob(name, len(raw), self.modified[name]) for name, raw in list(self.contents.items())]

    def move(self, name: str, new: str) -> None:
        if name not in self.contents:
            raise Gone(name)
        self.contents[new], self.modified[new] = self.contents.pop(name), self.modified.pop(name, 0.0)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.contents.pop(name, None)

    def touch(self, name: str) -> None:
        if name in self.contents:
            self.modified[name] = time.time()

    def sweep(self, older: float) -> int:
        assert older
        return 0

    def room(self) -> int | None:
        return None
