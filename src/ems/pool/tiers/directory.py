"""A folder as a place for blobs: a local disk, or one that several hosts share.

A blob appears by a rename, so that nobody sees a part of one, on NFS neither.  Several nodes may use one folder: names
differ, and what one removes while another reads stays readable until that one is done.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ems.errors import ConfigError, TierFailed
from ems.pool.tiers.blobs import Blob, Gone

_UNFINISHED = ".new-"
_PIECES = 1024
"""Buffers that one system call takes."""
_CALL_BYTES = 1 << 30
"""Bytes that one system call takes; the kernel's own limit is 2 GiB less a page."""


class FolderBlobs:
    """Blobs below the folder ``root``, made with mode 0700 if it is not there.

    ``sync`` waits for the disk before a blob gets its name.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, root: Path, *, sync: bool = False) -> None:
        self._root = root
        self._sync = sync
        self._made: set[str] = set()
        self._lock = threading.Lock()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = root.stat()
        except OSError as error:
            raise ConfigError(
                f"cannot keep pages in {root}: {error.strerror}; name a folder that can be written"
            ) from error
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise ConfigError(f"{root} can be written by everybody, who could put anything into the pool; chmod o-w it")

    def _path(self, name: str) -> Path:
        return self._root / name

    def _parent(self, name: str) -> Path:
        folder = self._path(name).parent
        if folder.name not in self._made:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._lock:
                self._made.add(folder.name)
        return folder

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        try:
            self._put(name, parts)
        except FileNotFoundError:
            # Somebody removed the folder of the namespace: make it anew.
            self._made.clear()
            with _told(f"cannot write {name}"):
                self._put(name, parts)
        except OSError as error:
            raise TierFailed(f"cannot write {name}: {error.strerror or error}") from error

    def _put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        folder = self._parent(name)
        new = folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                _write_all(descriptor, parts)
                if self._sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            new.rename(self._path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        if self._sync:
            _sync_folder(folder)

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        try:
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Gone(name) from error
        except OSError as error:
            raise TierFailed(f"cannot open {name}: {error.strerror or error}") from error
        try:
            with _told(f"cannot read {name}"):
                # What is read of a pack lies side by side; the kernel reads ahead further when it is told.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                return _read_all(descriptor, offset, into)
        finally:
            os.close(descriptor)

    def blobs(self) -> Iterable[Blob]:
        with _told(f"cannot list {self._root}"):
            yield from self._walk(self._root, "")

    def _walk(self, folder: Path, prefix: str) -> Iterator[Blob]:
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    if not prefix:
                        yield from self._walk(folder / entry.name, f"{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    yield Blob(prefix + entry.name, status.st_size, status.st_mtime)
            except FileNotFoundError:
                continue

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with _told(f"cannot remove {name}"), contextlib.suppress(FileNotFoundError):
                self._path(name).unlink()

    def touch(self, name: str) -> None:
        with contextlib.suppress(OSError):  # gone, or of another user: recency is a courtesy
            os.utime(self._path(name))

    def sweep(self, older: float) -> int:
        count = 0
        with _told(f"cannot list {self._root}"):
            for folder in (self._root, *(path for path in self._root.iterdir() if path.is_dir())):
                for path in folder.glob(f"{_UNFINISHED}*"):
                    with contextlib.suppress(FileNotFoundError):
                        if path.lstat().st_mtime <= older:
                            path.unlink()
                            count += 1
        return count

    def room(self) -> int | None:
        with _told(f"cannot look at {self._root}"):
            figures = os.statvfs(self._root)
        return figures.f_bavail * figures.f_frsize


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierFailed(f"{what}: {error.strerror or error}") from error


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        _advance(left, os.writev(descriptor, _one_call(left)))


def _read_all(descriptor: int, offset: int, into: Sequence[memoryview]) -> int:
    left = [part.cast("B") for part in into if len(part)]
    begin = offset
    while left:
        count = os.preadv(descriptor, _one_call(left), offset)
        if not count:
            break
        offset += count
        _advance(left, count)
    return offset - begin


def _one_call(left: list[memoryview]) -> list[memoryview]:
    taken, size = 0, 0
    while taken < min(len(left), _PIECES) and (not taken or size + len(left[taken]) <= _CALL_BYTES):
        size += len(left[taken])
        taken += 1
    return left[:taken]


def _advance(left: list[memoryview], count: int) -> None:
    done = 0
    while done < len(left) and count >= len(left[done]):
        count -= len(left[done])
        done += 1
    del left[:done]
    if count:
        left[0] = left[0][count:]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
