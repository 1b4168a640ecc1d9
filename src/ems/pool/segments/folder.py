"""The folder of one node: whose it is, which node holds it, what is in it.

What always holds: one living node a folder (a lock on a file in it says so, and the kernel drops the lock
however the process ends); nobody else may write into it; a node that stops leaves its pages behind and nothing else;
nothing is changed in a folder that holds anything but a node's own files, nor the mode of one that is there already.

The file of marks makes a folder a node's: it is made before everything but the lock and the log, and removed last.
What remains then, the size that the pool was given while it ran, says so as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ems.errors import ConfigError
from ems.pool import layout
from ems.pool.segments import side_file, tail_file
from ems.pool.segments.plan import MAX_SEGMENTS

LOG_NAME = "node.log"
"""What a node that was started by an engine says, after :data:`LOG_BEGINS`."""
LOG_BEGINS = b"EMS node log\n"
MAKE_TRIES = 100
"""How often a folder is made anew that goes while it is made."""
STOP_SECONDS = 3.0
"""How long a node may take from closing its socket to leaving its folder."""
OWNERS_NAME = "owners"
"""Which tenant's pages each segment has held."""
PINS_NAME = "pins"
"""What an administrator has pinned."""
GIVEN_UP_NAME = "given-up"
"""Which segments have no memory since the pool was made smaller."""
SIZE_NAME = "size"
"""What size the pool was given while it ran; it stays when the segments go."""
_POLL_SECONDS = 0.05
_LOCK_NAME = "node.lock"
_TAILS_NAME = "tails"
_NODE_STATE_NAME = "marks"
_SEGMENT = re.compile(r"segment-([0-9]{5})")
_SIDE_FILES = dict.fromkeys((OWNERS_NAME, GIVEN_UP_NAME, PINS_NAME, SIZE_NAME), side_file.MAGIC)
_SIDE_FILES |= {_TAILS_NAME: tail_file.MAGIC}
_SIDE_FILES |= {f"{name}.new": magic for name, magic in _SIDE_FILES.items()}
"""How the files beside segments begin, by name; the ones that replace them, too."""
_LOCK_BEGINS = b"EMS node lock\n"
_FIRST_FILES = {_LOCK_NAME: _LOCK_BEGINS, LOG_NAME: LOG_BEGINS, _NODE_STATE_NAME: side_file.NODE_STATE_MAGIC}
"""How the files begin that are in a folder before it is marked, or mark it."""
_BEGINNING_BYTES = 64
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
"""File systems that live in memory, by the numbers that statfs(2) gives them."""
_REMEDY = "give a writable tmpfs folder of its own with --dir"
_libc = ctypes.CDLL(None, use_errno=True)


def refuse_disk(path: Path) -> None:
    """Make sure that files in ``path``, which need not be there yet, live in memory; nothing is made."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    buffer = ctypes.create_string_buffer(512)
    # The number of the file system is the first field, a machine word.
    failed = _libc.statfs(os.fsencode(there), buffer)
    if not failed and (number := ctypes.c_ulong.from_buffer(buffer).value) not in _IN_MEMORY:
        raise ConfigError(
            f"{path} is not in memory (file system {number:#x}), expected a folder on a tmpfs such as /dev/shm; "
            "give one with --dir, or --allow-disk if pages are to be written to a disk"
        )


def refuse_strangers(path: Path) -> None:
    """Make sure that there is nothing in the folder ``path`` but a node's own files and sockets."""
    try:
        entries = sorted(path.iterdir())
        marked = _is_marked(path)  # after the list: a node that begins in this very moment makes its marks first
        for entry in entries:
            if not stat.S_ISSOCK(entry.lstat().st_mode) and not _is_own(entry, marked=marked):
                raise ConfigError(
                    f"{path} holds {entry.name}, which no pool node wrote, expected a folder for the node alone; give "
                    "another --dir, or move that file away"
                )
    except FileNotFoundError:
        return  # a node that stopped in this very moment removed it
    except OSError as error:
        raise ConfigError(f"cannot use {path} for a pool node: {error.strerror}; {_REMEDY}") from error


def _is_marked(path: Path) -> bool:
    """Whether a node made ``path`` its own.  Marks that are damaged further behind say so as well."""
    for name, magic in ((_NODE_STATE_NAME, side_file.NODE_STATE_MAGIC), (SIZE_NAME, side_file.MAGIC)):
        file = path / name
        if file.is_file() and _beginning(file).startswith(magic):
            return True
    return False


def _is_own(path: Path, *, marked: bool) -> bool:
    """Whether a node wrote the file, in a folder that is ``marked`` as a node's or not.

    Clients can write anything into a segment, and what is damaged costs what is in it, never the start of the node:
    what nobody else can open is known by its name.
    """
    name, status = path.name, path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return False
    private = not status.st_mode & 0o077
    begins = _beginning(path)
    if name in _FIRST_FILES:
        # A node that was killed in between may have made the file and written nothing yet.
        return begins.startswith(_FIRST_FILES[name]) or (private and not begins)
    segment = _SEGMENT.fullmatch(name)
    magic = layout.MAGIC if segment and int(segment[1]) < 2 * MAX_SEGMENTS else _SIDE_FILES.get(name)
    return marked and magic is not None and (private or not any(begins) or begins.startswith(magic))


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_BEGINNING_BYTES)


def make_folder(path: Path) -> None:
    """Make sure that ``path`` is a folder of this user that nobody else may write into, without changing one."""
    try:
        link, status = _made(path)
    except OSError as error:
        raise ConfigError(f"cannot use {path} for a pool node: {error.strerror}; {_REMEDY}") from error
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} is a link of user {link.st_uid}, who could put the pool anywhere, expected a folder of user "
            f"{os.geteuid()}; {_REMEDY}"
        )
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, who could put anything into the pool, expected one of user "
            f"{os.geteuid()}; {_REMEDY}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        if status.st_mode & stat.S_ISVTX:
            raise ConfigError(f"{path} is a folder for everybody, expected one for the node alone; {_REMEDY}")
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):o}, so others may write into it, expected a folder for the "
            f"node alone; run 'chmod 700 {path}' or give another --dir"
        )


def _made(path: Path) -> tuple[os.stat_result, os.stat_result]:
    """What is at ``path`` and, if that is a link, where it leads; a folder that was made if nothing was there."""
    tries = MAKE_TRIES
    while True:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return path.lstat(), path.stat()
        except (FileNotFoundError, FileExistsError):
            # A node that stopped in this very moment removed it: between two looks, or while it was made.
            tries -= 1
            if not tries:
                raise


class Folder:
    """The folder ``path``, held by this node until :meth:`close`.

    A node that is about to stop gets ``patience`` seconds to leave.  With ``lock``, the open file by which an earlier
    process of the same node holds it, nothing is waited for.
    """

    def __init__(self, path: Path, patience: float = STOP_SECONDS, lock: int | None = None) -> None:
        self.path = path
        self.tails = path / _TAILS_NAME
        self.node_state = path / _NODE_STATE_NAME
        self.lock = _lock(path, time.monotonic() + patience) if lock is None else lock
        """The open file whose lock says who holds the folder."""

    def leave(self) -> None:
        os.close(self.lock)

    def segment(self, number: int) -> Path:
        return self.path / f"segment-{number:05d}"

    def segments(self) -> int:
        """How many segments an earlier node left, as far as they are numbered without a gap."""
        count = 0
        while self.segment(count).is_file():
            count += 1
        return count

    def remove_segments(self, first: int = 0) -> None:
        """Remove the segments from number ``first`` on; all with what belongs to them."""
        marked = _is_marked(self.path)
        own = [entry for entry in self.path.iterdir() if _is_own(entry, marked=marked)]
        for entry in own:
            segment = _SEGMENT.fullmatch(entry.name)
            beside = not first and entry.name in _SIDE_FILES and entry.name != SIZE_NAME
            if int(segment[1]) >= first if segment else beside:
                entry.unlink(missing_ok=True)
        if not first:
            self.node_state.unlink(missing_ok=True)

    def close(self, *, log: bool) -> None:
        """Let others have the folder; the node's log goes if ``log``, and the folder too when nothing is in it."""
        with contextlib.suppress(OSError):
            if log:
                (self.path / LOG_NAME).unlink(missing_ok=True)
            # Whoever waits for the lock finds that its file is gone and begins anew.
            (self.path / _LOCK_NAME).unlink(missing_ok=True)
            self.path.rmdir()
        os.close(self.lock)


def _lock(path: Path, deadline: float) -> int:
    lock_path = path / _LOCK_NAME
    while (lock := _locked(lock_path, path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)) is None:
        if time.monotonic() >= deadline:
            holder = ""
            with contextlib.suppress(OSError):
                holder = _beginning(lock_path).removeprefix(_LOCK_BEGINS).decode(errors="replace").strip()
            raise ConfigError(
                f"a node is already running in {path}{f' (process {holder})' if holder else ''}; use it, stop it "
                "with 'ems stop', or give another --dir"
            )
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
    with contextlib.suppress(OSError):  # memory may be full
        os.ftruncate(lock, 0)
        os.pwrite(lock, _LOCK_BEGINS + b"%d\n" % os.getpid(), 0)
    return lock


@contextlib.contextmanager
def starting(path: Path) -> Iterator[bool]:
    """Hold the right to start a node in ``path`` if nobody else has it; yields whether this caller has.

    The lock is on the folder itself, so that it leaves nothing behind.
    """
    folder = _locked(path, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder is not None
    finally:
        if folder is not None:
            os.close(folder)


def _locked(place: Path, folder: Path, flags: int) -> int | None:
    """The open file ``place``, which is ``folder`` or in it, once it is locked; None while another process has it."""
    while True:
        make_folder(folder)
        refuse_strangers(folder)
        try:
            descriptor = os.open(place, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # a node that stopped in this very moment removed the folder
        except OSError as error:
            raise ConfigError(f"cannot use {folder} for a pool node: {error.strerror}; {_REMEDY}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _is_at(descriptor, place):
            return descriptor
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
