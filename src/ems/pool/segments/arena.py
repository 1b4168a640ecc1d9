"""The segments of a node as files in shared memory: found, made, touched, described.

They outlive the node.  A new arena goes on with those that an earlier node left, as far as their sizes fit; others it
replaces: engines that still map such a file keep their copy until they let go, and nobody is ever handed a slot in it
again.  Whatever clients do to the files (:mod:`ems.pool.segments.segment_file`), nothing here ends the node.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from ems.config import NodeConfig, format_size
from ems.errors import ConfigError
from ems.pool.layout import (
    HEADER_BYTES,
    HEADERS_OFFSET,
    Description,
    PageRef,
    header_offset,
    slot_offset,
    unpack_description,
)
from ems.pool.pages import Page
from ems.pool.segments.folder import GIVEN_UP_NAME, SIZE_NAME, Folder, refuse_disk
from ems.pool.segments.headers import Headers
from ems.pool.segments.plan import MAX_SEGMENTS, lay_out, plan_segments
from ems.pool.segments.recovery import MAX_SLOTS, Recovered, SegmentImage
from ems.pool.segments.segment_file import FileRange, SegmentFile
from ems.pool.segments.side_file import NodeStateFile, SideFile
from ems.pool.segments.tail_file import LEAST_BYTES, Listed, TailFile
from ems.pool.segments.touch import TOUCH_STEP, punch, yield_to_others

TAILS_SHARE = 256
"""The file of tails has at most one in so many bytes of the pool, and twice that while it is written anew."""
URGENT_BYTES = 512 << 20
"""Memory that is touched at full speed: about a second's work, while the engine is still loading its model."""


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Retired(msgspec.Struct, frozen=True):
    """Memory of a segment that was replaced: still open here, and perhaps mapped elsewhere."""

    segment: int
    file: SegmentFile


class Arena:
    """The segment files of one node.  Not safe for several threads but for :meth:`prefault`, :meth:`refill`.

    ``notes`` are sentences about what of an earlier node could not be kept; ``touched`` the bytes of each segment that
    are in memory already.  Raises ConfigError: the folder or the memory cannot be had.
    """

    def __init__(self, config: NodeConfig, node_id: bytes, lock: int | None = None) -> None:
        self._populate = config.prefault
        self._trusting = config.tenants is None
        """Whether tiers work on mapped memory, because all clients are of one user."""
        self._files: list[SegmentFile] = []
        self.sizes: list[int] = []
        self.touched: list[int] = []
        self.notes: list[str] = []
        self._going: dict[int, SegmentFile] = {}
        """Files of segments whose memory is being given back."""
        self.found: set[int] = set()
        """Segments whose memory an earlier node had: whoever was its client may still map it."""
        if not config.allow_disk:
            refuse_disk(config.directory)
        self._folder = Folder(config.directory, lock=lock)
        self._node_state = NodeStateFile(self._folder.node_state)
        self.headers = Headers(node_id, self._files, self._node_state.cover)
        self._tails = self._tail_file()
        try:
            if config.fresh:
                self._folder.remove_segments()
                self._node_state.forget()
            if config.fresh or (config.size and lock is None):  # a node that restarts has the size that it had
                (config.directory / SIZE_NAME).unlink(missing_ok=True)
            self._gone = SideFile(config.directory / GIVEN_UP_NAME, list[int])
            self._given_size = SideFile(config.directory / SIZE_NAME, list[int])
            """Bytes of a segment and their number, of a pool that was given another size while it ran."""
            found, cut = self._find()
            free = self.free_bytes() + sum(file.allocated() for file in self._files)
            self.sizes = self._planned(config, free, found)
            self._keep(found, cut)
            self._complete()
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot make segments in {config.directory}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def _planned(self, config: NodeConfig, free: int, found: list[int]) -> list[int]:
        """Sizes of the segments, those among them that stay given up."""
        gone = {number for number in self._gone.value if number < len(found)}
        before = found[len(gone) :]
        if not found and self._given_size.value:
            size, count = self._given_size.value
            before = [size] * min(count, MAX_SEGMENTS)
        sizes = plan_segments(config, free, total_memory(), before)
        if not config.segment_size and sizes[0] == (before or [0])[0] and config.size - sum(sizes) > config.size // 16:
            self.notes.append(
                f"the pool has {format_size(sum(sizes))} of {format_size(config.size)}, because segments of "
                f"{format_size(sizes[0])} of the node before are kept; --fresh gives all of it, without their pages"
            )
        kept: set[int] = set()
        if gone and sizes[0] == found[0]:
            count, kept = lay_out(len(found), gone, len(sizes))
            sizes = [found[0]] * count
        self._gone.replace(sorted(kept))
        return sizes

    def keep_size(self, size: int, count: int) -> None:
        """The pool was given ``count`` segments of ``size`` bytes, which the next start goes on with, empty or not."""
        with contextlib.suppress(OSError):  # the next start finds the segments, if there is a page in them
            self._given_size.replace([size, count])

    @property
    def given_up(self) -> frozenset[int]:
        return frozenset(self._gone.value)

    @property
    def lock(self) -> int:
        return self._folder.lock

    def leave(self) -> None:
        """Let go of everything, with which another node goes on by a lock of its own or this one's."""
        self._release()
        self._folder.leave()

    def _release(self) -> None:
        # A thread that hangs in a read into a page keeps its file until the process ends.
        self._files.clear()
        self._going.clear()
        self._tails.close()
        self._node_state.close()

    def _find(self) -> tuple[list[int], set[int]]:
        """Open the segments of an earlier node: their sizes, one like the other, and those whose file was cut since.

        What size they have is in a file that no client can reach; where it is not known it is what most have.
        """
        opened: list[tuple[int, int]] = []
        for number in range(min(self._folder.segments(), MAX_SEGMENTS)):
            file = os.open(self._folder.segment(number), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                os.close(file)
                break
            opened.append((file, status.st_size))
        sizes = Counter(size for _, size in opened if size)
        size = self._node_state.segment or (sizes.most_common(1)[0][0] if sizes else 0)
        if not size:
            for file, _ in opened:
                os.close(file)
            return [], set()
        self._files += [self._file(file, size) for file, _ in opened]
        return [size] * len(opened), {number for number, one in enumerate(opened) if one[1] != size}

    def _keep(self, found: list[int], cut: set[int]) -> None:
        fit = len(self.sizes) if found and self.sizes and found[0] == self.sizes[0] else 0
        if found and not fit:
            self.notes.append(
                f"segments of {format_size(found[0])} do not fit a pool of segments of {format_size(self.sizes[0])}, "
                "all pages are dropped"
            )
        elif len(found) > fit:
            self.notes.append(f"the pool is smaller than before, the last {len(found) - fit} segments are dropped")
        del self._files[fit:]
        self._folder.remove_segments(len(self._files))
        if not self._files:
            self._node_state.forget()
        self.found = set(range(len(self._files)))
        for file in self._files:
            self.headers.ends.append(HEADERS_OFFSET)
            # Memory is touched from the beginning on.
            self.touched.append(file.allocated())
        lost = sorted(cut & self.found)
        for number in lost:
            self.renew(number)
        if lost:
            self.notes.append(
                f"{len(lost)} segments, the first of them {lost[0]}, have files of another size than the node made, "
                "their pages are gone"
            )

    def _complete(self) -> None:
        kept = len(self._files)
        try:
            self._node_state.keep(self.sizes[0])  # before the segments: by it they are known to be a node's
            for number in range(kept, len(self.sizes)):
                self._append(self.sizes[number])
        except OSError:
            for number in range(kept, len(self._files)):
                with contextlib.suppress(OSError):
                    self._folder.segment(number).unlink(missing_ok=True)
            if not kept:
                self._folder.node_state.unlink(missing_ok=True)
            raise

    def _append(self, size: int) -> None:
        self._files.append(self._made(self._folder.segment(len(self._files)), size))
        self.headers.ends.append(HEADERS_OFFSET)
        self.touched.append(0)

    def _made(self, path: Path, size: int) -> SegmentFile:
        """A new file of ``size`` bytes.  Raises OSError: there is no room for it, and nothing is left of it."""
        file = self._file(self._new_file(path), size)
        try:
            os.ftruncate(file.descriptor, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return file

    # Where files are had; a test kit puts itself in between

    def _file(self, descriptor: int, size: int) -> SegmentFile:
        return SegmentFile(descriptor, size)

    def _new_file(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _tail_file(self) -> TailFile:
        return TailFile(self._folder.tails)

    # What an earlier node left

    def images(self) -> Iterator[SegmentImage]:
        for number, file in enumerate(self._files):
            described = file.read(0, HEADERS_OFFSET) if self.touched[number] >= HEADERS_OFFSET else None
            if described is not None:
                description = unpack_description(described, file.size)
                table = b""
                if isinstance(description, Description) and description.geometry.slot_count <= MAX_SLOTS:
                    table = file.read(HEADERS_OFFSET, description.geometry.slot_count * HEADER_BYTES) or b""
                yield SegmentImage(number, file.size, self.touched[number], described + table)

    def adopt(self, recovered: Recovered) -> list[Listed]:
        """Go on with what could be read, begin the other segments anew; the tokens of blocks that are not full."""
        self.headers.stamp, self.headers.carving = recovered.stamp, recovered.carving
        # Where there is nothing memory may have been given back from the beginning on: that is touched again.
        readable = {segment.number for segment in recovered.segments}
        self.touched = [touched if number in readable else 0 for number, touched in enumerate(self.touched)]
        for segment in recovered.segments:
            self.headers.ends[segment.number] = header_offset(len(segment.generations))
        self.headers.forget(recovered.stale)
        try:
            for unreadable in recovered.unreadable:
                self.renew(unreadable.segment)
            self._node_state.cover(self.headers.stamp, self.headers.carving)
            return self._tails.read()
        except OSError as error:
            raise ConfigError(f"cannot make segments anew: {error.strerror or error}") from error

    # What clients did to the files

    def hurt(self) -> list[int]:
        return [number for number, file in enumerate(self._files) if file.hurt or not file.whole()]

    def cut_back(self) -> list[int]:
        """Give back what files are longer than their segments; the segments that were."""
        found = []
        for number, file in enumerate(self._files):
            with contextlib.suppress(OSError):  # it is looked at again
                if file.cut_back():
                    found.append(number)
        return found

    # Memory that comes and goes

    @property
    def limits(self) -> tuple[int, int]:
        return self._node_state.limits

    def free_bytes(self) -> int:
        file_system = os.statvfs(self._folder.path)
        return file_system.f_bavail * file_system.f_frsize

    def add(self, number: int, size: int) -> None:
        """Have segment ``number`` of ``size`` bytes: a new one, or one whose memory was given up.

        Raises OSError: its file cannot be made.
        """
        if number == len(self.sizes):
            self._append(size)
            self.sizes.append(size)
        else:
            self._gone.replace([gone for gone in self._gone.value if gone != number])
            if self._files[number].hurt or not self._files[number].whole():
                self.renew(number)

    def give_up(self, number: int, start: int, length: int) -> None:
        """Give memory of segment ``number`` back to the system; mappings of it stay, and read as zeros.

        So whoever still looks into it finds no page.  The segment can come back, in another file: somebody may still
        write into this one.  Raises OSError: there is no room for that file; everything is as it was, to be tried again
        from the beginning.
        """
        length = min(length, self.sizes[number] - start)
        if not start:
            self._going[number] = self.renew(number).file
        punch(self._going[number].descriptor, length, start)
        if start + length >= self.sizes[number]:
            del self._going[number]
            with contextlib.suppress(OSError):  # the next start has the segment back, which costs nothing but memory
                self._gone.replace(sorted({*self._gone.value, number}))

    def opened(self, segment: int) -> int:
        """A descriptor of a segment's file to be passed to an engine, and closed then.

        Raises OSError: there are no more.
        """
        return self._files[segment].opened()

    def renew(self, segment: int) -> Retired:
        """Put a new file in place of a segment's; :meth:`refill` gives the old memory back, in another thread.

        Whoever still maps the old one finds no description there any more, and no page.
        Raises OSError: there is no room for a file.
        """
        # By renaming, because a gap in the numbers would cost the segments behind it, should the node end in it.
        path = self._folder.segment(segment)
        new = self._folder.segment(segment + MAX_SEGMENTS)  # a name of a segment, so that it is swept when left behind
        file = self._made(new, self.sizes[segment])
        new.replace(path)
        retired = Retired(segment, self._files[segment])
        retired.file.write(0, bytes(HEADERS_OFFSET))
        self._files[segment] = file
        self.headers.ends[segment], self.touched[segment] = HEADERS_OFFSET, 0
        self.found.discard(segment)
        return retired

    def refill(self, retired: Retired, progress: Callable[[int, int], None], stop: threading.Event) -> str | None:
        """Free the memory of a renewed segment and touch what came in its place, as :meth:`prefault` does."""
        punch(retired.file.descriptor, retired.file.size)
        return self._touch(retired.segment, progress, stop)

    def keep_tail(self, namespace: str, page: Page, still_found: Callable[[str, bytes, bytes], bool]) -> None:
        """Keep the tokens of a page that is not full; ``still_found`` is as :meth:`TailFile.compact` wants it."""
        assert page.tail is not None
        most = max(sum(self.sizes) // TAILS_SHARE, LEAST_BYTES)
        with contextlib.suppress(OSError):
            self._tails.compact(still_found, most)
        # Where memory, or the file, is full the page is not found by its tokens after a restart.
        with contextlib.suppress(OSError):
            self._tails.add(namespace, page.key, page.ref, page.tail, most)

    def place(self, ref: PageRef, length: int) -> FileRange:
        """Where the page of ``length`` bytes lies, which is the size of all pages of its namespace."""
        file = self._files[ref.segment]
        return FileRange(file, slot_offset(file.size, length, ref.slot), length, mapped=self._trusting)

    def prefault(
        self, progress: Callable[[int, int], None], stop: threading.Event, segments: Iterable[int] | None = None
    ) -> str | None:
        """Touch all segments (or ``segments``) in order, telling ``progress(segment, touched bytes)``.

        It ends early on ``stop``.  Returns why memory ran out before the end, None when it did not.

        Meant for a thread of its own, which goes on at the lowest priority after :data:`URGENT_BYTES`.  A node that
        shall not touch its memory allocates it all the same: a page that is missing would end the process that writes
        to it.  A segment that somebody cuts meanwhile is passed over.
        """
        urgent = URGENT_BYTES
        for number in list(range(len(self._files)) if segments is None else segments):
            if self.touched[number] == self.sizes[number]:
                continue
            shortage = self._touch(number, progress, stop, urgent)
            if shortage is not None or stop.is_set():
                return shortage
            urgent -= self.sizes[number]
        return None

    def _touch(
        self, number: int, progress: Callable[[int, int], None], stop: threading.Event, urgent: int = 0
    ) -> str | None:
        file = self._files[number]
        try:
            for start in range(self.touched[number] // TOUCH_STEP * TOUCH_STEP, file.size, TOUCH_STEP):
                if stop.is_set():
                    return None
                length = min(TOUCH_STEP, file.size - start)
                if not file.touch(start, length, populated=self._populate):
                    return None
                progress(number, start + length)
                if 0 < urgent <= length:
                    yield_to_others()
                urgent -= length
        except OSError as error:
            return error.strerror or str(error)
        return None

    def close(self, *, keep: bool = True, log: bool = False) -> None:
        """Close the segments and give up the folder; they stay if ``keep``, and the node's log goes if ``log``."""
        if not keep:
            with contextlib.suppress(OSError):
                self._folder.remove_segments()
        self._release()
        self._folder.close(log=log)
