"""The segments of a node as files in shared memory: made, touched, described, removed.

A new arena removes what a dead node left in its folder: engines that still map those files keep their copy
until they let go, and nobody is ever handed a slot in them again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ems.config import NodeConfig, default_pool_size, format_size, pick_segment_size
from ems.errors import ConfigError
from ems.pool.folder import Folder
from ems.pool.layout import (
    HEADERS_OFFSET,
    Geometry,
    SlotState,
    header_offset,
    pack_description,
    unpack_refs,
    write_header,
    write_state,
)
from ems.pool.touch import TOUCH_STEP, populate, yield_to_others

if TYPE_CHECKING:
    from ems.pool.index import Page

MAX_SEGMENTS = 4096
URGENT_BYTES = 512 << 20
"""Memory that is touched at full speed: about a second's work, while the engine is still loading its model."""


def total_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_segments(config: NodeConfig, free: int, memory: int) -> list[int]:
    """Sizes of the segments of a node, where the file system has ``free`` bytes left and the machine ``memory``.

    Raises:
        ConfigError: no pool can be made like that.
    """
    size = config.size or default_pool_size(free, memory)
    if size > free:
        raise ConfigError(
            f"a pool of {format_size(size)} does not fit in {config.directory}, which has {format_size(free)} free; "
            "give a smaller --size or mount a larger shared memory file system"
        )
    segment = (config.segment_size or pick_segment_size(size)) // mmap.PAGESIZE * mmap.PAGESIZE
    if not segment:
        raise ConfigError(
            f"segments of {format_size(config.segment_size or size)} are smaller than a memory page of "
            f"{mmap.PAGESIZE} bytes, give a larger {'--segment-size' if config.segment_size else '--size'}"
        )
    count = size // segment
    if count > MAX_SEGMENTS:
        raise ConfigError(
            f"a pool of {format_size(size)} in segments of {format_size(segment)} makes {count} of them, expected at "
            f"most {MAX_SEGMENTS}; give a larger --segment-size"
        )
    return [segment] * count


class Arena:
    """The segment files of one node, mapped.  Not safe for several threads but for :meth:`prefault`.

    Raises:
        ConfigError: the folder or the memory cannot be had.
    """

    def __init__(self, config: NodeConfig, node_id: bytes) -> None:
        self._node_id = node_id
        self._populate = config.prefault
        self._maps: list[mmap.mmap] = []
        self._files: list[int] = []
        self._header_ends: list[int] = []
        self._folder = Folder(config.directory)
        try:
            self._folder.remove_segments()
            file_system = os.statvfs(config.directory)
            self.sizes = plan_segments(config, file_system.f_bavail * file_system.f_frsize, total_memory())
            for number, size in enumerate(self.sizes):
                self._create(number, size)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot make segments in {config.directory}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def _create(self, number: int, size: int) -> None:
        descriptor = os.open(self._folder.segment(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._files.append(descriptor)
        os.ftruncate(descriptor, size)
        self._maps.append(mmap.mmap(descriptor, size))
        self._header_ends.append(HEADERS_OFFSET)

    def descriptor(self, segment: int) -> int:
        """The open file of a segment, to be passed to an engine."""
        return self._files[segment]

    def describe(self, segment: int, geometry: Geometry, namespace_id: bytes) -> None:
        """Write a segment's description and clear its slot headers, the old ones too.

        An old header in what becomes the bytes of a page would go on vouching for the page that was there.
        """
        mapped = self._maps[segment]
        end = header_offset(geometry.slot_count)
        stale = max(end, self._header_ends[segment])
        mapped[HEADERS_OFFSET:stale] = bytes(stale - HEADERS_OFFSET)
        self._header_ends[segment] = end
        description = pack_description(segment, geometry, namespace_id, self._node_id)
        mapped[: len(description)] = description

    def begin_writing(self, pages: Iterable[Page], refs: bytes, length: int) -> None:
        """Write the headers of ``pages`` of ``length`` bytes at packed ``refs``, before their writer learns of them."""
        for page, ref in zip(pages, unpack_refs(refs), strict=True):
            write_header(self._maps[ref.segment], ref, SlotState.WRITING, page.key, length)

    def publish(self, refs: bytes) -> None:
        """Say in the headers of the packed ``refs`` that their pages are whole."""
        for ref in unpack_refs(refs):
            write_state(self._maps[ref.segment], ref.slot, SlotState.PRESENT)

    def prefault(self, progress: Callable[[int, int], None], stop: threading.Event) -> str | None:
        """Touch all segments in order, telling ``progress(segment, touched bytes)``; ends early on ``stop``.

        Returns why memory ran out before the end, None when it did not.

        Meant for a thread of its own.  The first :data:`URGENT_BYTES` are for whoever saves first; then it goes
        on at the lowest priority, because engines need the cores more.  When the file system runs full the pool
        ends at what was touched.  A node that shall not touch its memory allocates
        it all the same: a page that is missing would end the process that writes to it.
        """
        urgent = URGENT_BYTES
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
                    if self._populate:
                        populate(address + start, length)
                    progress(number, start + length)
                    if 0 < urgent <= length:
                        yield_to_others()
                    urgent -= length
            except OSError as error:
                return error.strerror or str(error)
            finally:
                del anchor
        return None

    def close(self, *, log: bool = False) -> None:
        """Unmap and remove the segments and give up the folder, with the node's log if ``log``."""
        for mapped in self._maps:
            mapped.close()
        for descriptor in self._files:
            os.close(descriptor)
        self._maps.clear()
        self._files.clear()
        self._folder.close(log=log)
