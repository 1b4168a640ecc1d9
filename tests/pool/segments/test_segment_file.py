"""Segments whose files are cut under the node: said, remembered, and never the end of it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ems.pool.segments import touch
from ems.pool.segments.recovery import MOST
from ems.pool.segments.segment_file import FileRange, SegmentFile
from ems.pool.segments.side_file import CARVINGS_AHEAD, STAMPS_AHEAD, NodeStateFile
from ems.pool.tiers.answers import Outcome
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.pass_through import Leaving, load, store
from tests.kit.tiers import KEYS
from tests.pool.tiers.memory_blobs import MemoryBlobs

SIZE = 1 << 20


@pytest.fixture
def home() -> Iterator[Path]:
    with TemporaryDirectory(prefix="ems-test-", dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def file(home: Path) -> SegmentFile:
    descriptor = os.open(home / "segment", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, SIZE)
    return SegmentFile(descriptor, SIZE)


def test_what_is_written_is_read(file: SegmentFile) -> None:
    assert file.write(5000, b"abc" * 100)
    assert file.read(5000, 300) == b"abc" * 100
    into = bytearray(300)
    assert file.read_into(5000, memoryview(into))
    assert into == b"abc" * 100
    view = file.view(5000, 300)
    assert view is not None
    assert view == b"abc" * 100
    assert not file.hurt
    assert file.whole()


@pytest.mark.parametrize("size", [0, 5000, 5299])
def test_what_is_gone_is_said_to_be_gone(file: SegmentFile, size: int) -> None:
    assert file.write(5000, b"abc" * 100)
    os.ftruncate(file.descriptor, size)
    assert not file.whole()
    assert file.read(5000, 300) is None
    assert file.hurt
    file.hurt = False
    assert not file.read_into(5000, memoryview(bytearray(300)))
    assert file.hurt
    file.hurt = False
    assert file.view(0, 100) is None
    assert file.hurt


def test_memory_that_cannot_be_had_is_said_to_be_gone(file: SegmentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert not file.write(0, b"abc")
    assert file.hurt


def test_each_client_has_a_description_of_its_own(file: SegmentFile) -> None:
    other = file.opened()
    fcntl.fcntl(other, fcntl.F_SETFL, os.O_APPEND)
    assert not fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_APPEND
    assert os.path.samestat(os.fstat(other), os.fstat(file.descriptor))
    os.close(other)


def test_the_file_is_open_as_long_as_a_thread_may_use_it(file: SegmentFile) -> None:
    place = FileRange(file, 0, 4, mapped=False)
    del file
    assert place.write(memoryview(b"abcd"))
    into = bytearray(4)
    assert place.read_into(memoryview(into))
    assert into == b"abcd"


def test_the_file_is_closed_when_nobody_uses_it(home: Path) -> None:
    descriptor = os.open(home / "segment", os.O_RDWR | os.O_CREAT, 0o600)
    file = SegmentFile(descriptor, SIZE)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# First touch


def test_touching_has_the_memory(file: SegmentFile) -> None:
    assert file.allocated() == 0
    assert file.touch(0, SIZE, populated=True)
    assert file.allocated() == SIZE


@pytest.mark.parametrize("advice", [touch._POPULATE_WRITE, 9999], ids=["kernel", "old kernel"])
def test_a_file_that_is_cut_while_it_is_touched_ends_nobody(
    file: SegmentFile, monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    """The cut comes between the mapping and the touch, where only the kernel can notice it."""
    monkeypatch.setattr(touch, "_POPULATE_WRITE", advice)

    def cut(address: int, length: int) -> None:
        os.ftruncate(file.descriptor, 0)
        touch.populate(address, length)

    monkeypatch.setattr("ems.pool.segments.segment_file.populate", cut)
    assert not file.touch(0, SIZE, populated=True)
    assert file.hurt


def test_a_file_that_is_cut_before_it_is_mapped_ends_nobody(file: SegmentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: os.ftruncate(file.descriptor, 100))
    assert not file.touch(0, SIZE, populated=True)
    assert file.hurt


def test_mapped_memory_that_is_gone_ends_a_process() -> None:
    """What all of this is for: it holds on this system, or nothing here could fail."""
    script = (
        "import mmap, os, tempfile; f = tempfile.TemporaryFile(dir='/dev/shm'); f.truncate(8192); "
        "m = mmap.mmap(f.fileno(), 8192); f.truncate(0); m[0]"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode < 0


# Tiers


PAGE = 4096


def pages(file: SegmentFile, *, mapped: bool) -> list[Leaving]:
    places = [FileRange(file, number * PAGE, PAGE, mapped=mapped) for number in range(4)]
    return [Leaving(bytes([number]) * 16, bytes(16), None, place) for number, place in enumerate(places)]


@pytest.mark.parametrize("mapped", [True, False])
def test_pages_go_down_and_come_up(file: SegmentFile, mapped: bool) -> None:
    for number in range(4):
        file.write(number * PAGE, bytes([number + 1]) * PAGE)
    tier = PackTier("test", MemoryBlobs(), KEYS)
    leaving = pages(file, mapped=mapped)
    assert store(tier, "a/b/c", leaving) == [Outcome.DONE] * 4
    file.write(0, bytes(4 * PAGE))
    outcomes, sums = load(tier, "a/b/c", [(one.key, one.place) for one in leaving])
    assert outcomes == [Outcome.DONE] * 4
    assert len(set(sums)) == 4
    assert file.read(0, 4 * PAGE) == b"".join(bytes([number + 1]) * PAGE for number in range(4))


def test_pages_of_a_file_that_was_cut_are_missing_and_the_others_are_stored(file: SegmentFile) -> None:
    os.ftruncate(file.descriptor, 2 * PAGE + 100)
    tier = PackTier("test", MemoryBlobs(), KEYS)
    outcomes = store(tier, "a/b/c", pages(file, mapped=False))
    assert outcomes == [Outcome.DONE, Outcome.DONE, Outcome.MISSING, Outcome.MISSING]
    assert tier.holds("a/b/c", [bytes([number]) * 16 for number in range(4)]) == 2


def test_a_page_whose_segment_takes_nothing_more_is_missing(file: SegmentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = PackTier("test", MemoryBlobs(), KEYS)
    leaving = pages(file, mapped=False)
    store(tier, "a/b/c", leaving)
    monkeypatch.setattr(file, "write", lambda *_: False)
    outcomes, _ = load(tier, "a/b/c", [(one.key, one.place) for one in leaving])
    assert outcomes == [Outcome.MISSING] * 4


# Marks


def test_marks_are_ahead_of_all_numbers_that_were_given(home: Path) -> None:
    marks = NodeStateFile(home / "marks")
    assert (marks.segment, marks.stamps, marks.carvings) == (0, 0, 0)
    marks.keep(SIZE)
    for stamp in (1, STAMPS_AHEAD, STAMPS_AHEAD + 2, 5 * STAMPS_AHEAD):
        marks.cover(stamp, stamp >> 8)
        again = NodeStateFile(home / "marks")
        assert (again.segment, again.stamps, again.carvings) == (SIZE, marks.stamps, marks.carvings)
        assert stamp <= again.stamps <= stamp + STAMPS_AHEAD
        assert stamp >> 8 <= again.carvings <= (stamp >> 8) + CARVINGS_AHEAD
        again.close()
    marks.close()


@pytest.mark.parametrize("raw", [b"", b"EMSMARK1", bytes(100), b"EMSMARK1" + bytes(24) + b"abcd"])
def test_marks_that_cannot_be_read_say_nothing(home: Path, raw: bytes) -> None:
    (home / "marks").write_bytes(raw)
    marks = NodeStateFile(home / "marks")
    assert (marks.segment, marks.stamps, marks.carvings) == (0, 0, 0)
    assert marks.limits == (MOST >> 1, MOST >> 1), "a node goes on from below these"
    marks.keep(SIZE)
    marks.cover(1, 1)
    assert marks.limits == (marks.stamps, marks.carvings)
    marks.close()
    assert NodeStateFile(home / "marks").segment == SIZE
