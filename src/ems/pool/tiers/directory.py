"""A folder as a place for blobs: a local disk, or one that several hosts share.

A blob appears by a rename, so that nobody sees a part of one, on NFS neither.  Several nodes may use one folder: names
differ, and what one removes while another reads stays readable until that one is done.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ems.errors import ConfigError, TierFailed
from ems.pool.files import replace_file
from ems.pool.tiers.blobs import Blob, Gone

_UNFINISHED = ".new-"
_OUR_UNFINISHED = re.compile(r"\.new-[0-9a-f]{16}")
_OUR_FOLDER = re.compile(r"[0-9a-f]{32}")


class FolderBlobs:
    """Blobs below the folder ``root``, made with mode 0700 if it is not there.

    ``sync`` waits for the disk before a blob gets its name.

    Raises ConfigError: the folder cannot be used.
    """

    def __init__(self, root: Path, *, sync: bool = False) -> None:
        self._root = root
        self._sync = sync
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = root.stat()
        except OSError as error:
            raise ConfigError(
                f"cannot keep pages in {root}: {error.strerror}; name a folder that can be written"
            ) from error
        if reason := _distrust(status):
            raise ConfigError(f"cannot keep pages in {root}: {reason}, so that others could put anything into the pool")

    def _path(self, name: str) -> Path:
        return self._root / name

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        folder = self._path(name).parent
        new = folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
        with _failures_named(f"cannot write {name}"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path(name), new, parts, sync=self._sync)

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        with _failures_named(f"cannot open {name}"):
            try:
                # A pipe would keep whoever opens it waiting.
                descriptor = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise Gone(name) from error
        done = 0
        with _failures_named(f"cannot read {name}"), os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or _distrust(status):
                raise Gone(name)
            # What is read of a pack lies side by side; the kernel reads ahead further when it is told.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            file.seek(offset)
            for part in into:
                count = file.readinto(part)
                done += count
                if count < len(part):
                    break
        return done

    def blobs(self) -> Iterable[Blob]:
        with _failures_named(f"cannot list {self._root}"):
            if reason := _distrust(self._root.stat()):
                raise TierFailed(f"{self._root} is not to be believed any more: {reason}")
            yield from self._walk(self._root, "", "")

    def _walk(self, folder: Path, prefix: str, refused: str) -> Iterator[Blob]:
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and not prefix:
                    yield from self._walk(folder / entry.name, f"{entry.name}/", _distrust(status))
                else:
                    why = refused or _distrust(status)
                    if not stat.S_ISREG(status.st_mode):
                        why = "it is a link, a pipe or a folder, expected a file"
                    yield Blob(prefix + entry.name, status.st_size, status.st_mtime, why)
            except FileNotFoundError:
                continue

    def move(self, name: str, new: str) -> None:
        with _failures_named(f"cannot move {name}"):
            self._path(new).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._path(name).rename(self._path(new))
            except FileNotFoundError as error:
                raise Gone(name) from error

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with _failures_named(f"cannot remove {name}"), contextlib.suppress(FileNotFoundError):
                self._path(name).unlink()

    def touch(self, name: str) -> None:
        with contextlib.suppress(OSError):  # gone, or of another user: recency is a courtesy
            os.utime(self._path(name))

    def sweep(self, older: float) -> int:
        count = 0
        with _failures_named(f"cannot list {self._root}"):
            ours = (path for path in self._root.iterdir() if _OUR_FOLDER.fullmatch(path.name) and path.is_dir())
            for folder in (self._root, *ours):
                for path in folder.glob(f"{_UNFINISHED}*"):
                    with contextlib.suppress(FileNotFoundError):
                        if _OUR_UNFINISHED.fullmatch(path.name) and path.lstat().st_mtime <= older:
                            path.unlink()
                            count += 1
        return count

    def room(self) -> int | None:
        with _failures_named(f"cannot look at {self._root}"):
            figures = os.statvfs(self._root)
        return figures.f_bavail * figures.f_frsize


def _distrust(status: os.stat_result) -> str:
    """Why what has this ``status`` may be of others than the node's user; empty when it is not."""
    if status.st_uid not in {0, os.geteuid()}:
        return f"it belongs to user {status.st_uid}, expected user {os.geteuid()} or root"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "its group or everybody may write it, chmod go-w it"
    return ""


@contextlib.contextmanager
def _failures_named(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierFailed(f"{what}: {error.strerror or error}") from error
