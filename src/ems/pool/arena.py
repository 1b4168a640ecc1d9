"""The segments of a node as files in shared memory: made, touched, described, removed.

The arena owns its folder while it lives (a lock file says so; the kernel drops the lock however the process
ends).  A new arena removes what a dead one left: engines that still map those files keep their copy until
they let go, and nobody is ever handed a slot in them again.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ems.config import NodeConfig, default_pool_size, format_size, pick_segment_size
from ems.errors import ConfigError
from ems.pool.layout import (
    HEADERS_OFFSET,
    Geometry,
    PageRef,
    SlotState,
    header_offset,
    pack_description,
    pack_header,
)
from ems.pool.touch import TOUCH_STEP, populate, yield_to_others

if TYPE_CHECKING:
    from ems.pool.index import Page


def total_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Arena:
    """The segment files of one node, mapped.  Not safe for several threads but for :meth:`prefault`."""

    def __init__(self, config: NodeConfig, node_id: bytes) -> None:
        self._directory = config.directory
        self._node_id = node_id
        self._maps: list[mmap.mmap] = []
        self._files: list[int] = []
        self._lock = self._claim(config.directory)
        try:
            self._remove_stale()
            self.sizes = self._plan(config)
            for number, size in enumerate(self.sizes):
                self._create(number, size)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _claim(directory: Path) -> int:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(directory / "node.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot use {directory} for segments: {error.strerror}; give a writable tmpfs folder with --dir"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConfigError(
                f"a node is already running in {directory}; use it, stop it with 'ems stop', or give another --dir"
            ) from error
        return lock

    def _remove_stale(self) -> None:
        for stale in self._directory.glob("segment-*"):
            stale.unlink(missing_ok=True)

    def _plan(self, config: NodeConfig) -> list[int]:
        file_system = os.statvfs(self._directory)
        free = file_system.f_bavail * file_system.f_frsize
        size = config.size or default_pool_size(free, total_memory())
        if size > free:
            raise ConfigError(
                f"a pool of {format_size(size)} does not fit in {self._directory}, which has {format_size(free)} free; "
                "give a smaller --size or mount a larger shared memory file system"
            )
        segment = config.segment_size or pick_segment_size(size)
        segment = max(segment // mmap.PAGESIZE, 1) * mmap.PAGESIZE
        if segment > size:
            raise ConfigError(f"a pool of {format_size(size)} is smaller than one memory page, give a larger --size")
        return [segment] * (size // segment)

    def _create(self, number: int, size: int) -> None:
        path = self._directory / f"segment-{number:05d}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._files.append(descriptor)
        os.ftruncate(descriptor, size)
        self._maps.append(mmap.mmap(descriptor, size))

    @property
    def node_id(self) -> bytes:
        """16 bytes, new with each start."""
        return self._node_id

    def descriptor(self, segment: int) -> int:
        """The open file of a segment, to be passed to an engine."""
        return self._files[segment]

    def describe(self, segment: int, geometry: Geometry, namespace_id: bytes) -> None:
        """Write a segment's description and clear its slot headers."""
        mapped = self._maps[segment]
        end = header_offset(geometry.slot_count)
        mapped[HEADERS_OFFSET:end] = bytes(end - HEADERS_OFFSET)
        description = pack_description(segment, geometry, namespace_id, self._node_id)
        mapped[: len(description)] = description

    def mark(self, page: Page, state: SlotState, length: int) -> None:
        """Write the header of a page's slot."""
        ref = PageRef.unpack(page.ref)
        header = pack_header(state, ref.generation, page.key, length)
        start = header_offset(ref.slot)
        self._maps[ref.segment][start : start + len(header)] = header

    def prefault(self, progress: Callable[[int, int], None], stop: threading.Event) -> str | None:
        """Touch all segments in order, telling ``progress(segment, touched bytes)``; ends early on ``stop``.

        Returns why memory ran out before the end, None when it did not.

        Meant for a thread of its own, at the lowest priority: engines need the cores more.  When the file
        system runs full the pool ends at what was touched.

        Raises:
            OSError: the kernel refuses to touch, in a way that is not a lack of memory.
        """
        yield_to_others()
        for number, mapped in enumerate(self._maps):
            # The exported buffer keeps the mapping alive while this thread is inside the kernel.
            anchor = ctypes.c_char.from_buffer(mapped)
            address = ctypes.addressof(anchor)
            try:
                for start in range(0, len(mapped), TOUCH_STEP):
                    if stop.is_set():
                        return None
                    length = min(TOUCH_STEP, len(mapped) - start)
                    os.posix_fallocate(self._files[number], start, length)
                    populate(address + start, length)
                    progress(number, start + length)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT):
                    raise
                return error.strerror or str(error)
            finally:
                del anchor
        return None

    def close(self) -> None:
        """Unmap and remove the segments and give up the folder."""
        for mapped in self._maps:
            mapped.close()
        for descriptor in self._files:
            os.close(descriptor)
        self._maps.clear()
        self._files.clear()
        self._remove_stale()
        os.close(self._lock)
