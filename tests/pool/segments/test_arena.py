"""Segments as files: who may hold a folder, what old headers vouch for, memory that runs out."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ems.config import NodeConfig, default_pool_size, pick_segment_size
from ems.errors import ConfigError
from ems.pool.layout import (
    HEADERS_OFFSET,
    UNKNOWN,
    Description,
    PageRef,
    SlotState,
    carve,
    carving_of,
    header_offset,
    unpack_description,
    unpack_header,
)
from ems.pool.node.listener import Listener, refuse_if_taken
from ems.pool.pages import Assigned, Page
from ems.pool.segments.arena import Arena
from ems.pool.segments.folder import Folder, make_folder, starting
from ems.pool.segments.plan import plan_segments
from ems.pool.segments.recovery import recover
from ems.pool.segments.touch import TOUCH_STEP, warm, yield_to_others
from tests.kit.waiting import until

MIB = 1 << 20
NODE_ID = bytes(range(16))


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ems-test-", dir="/dev/shm") as path:
        yield Path(path)


def config(home: Path, **settings: object) -> NodeConfig:
    return NodeConfig(directory=home / "pool", socket=home / "s", **{"size": 2 * MIB, **settings})  # type: ignore[arg-type]


@pytest.fixture
def arena(home: Path) -> Iterator[Arena]:
    made = Arena(config(home, segment_size=MIB), NODE_ID)
    yield made
    made.close()


def header(arena: Arena, segment: int, slot: int) -> tuple[int, int, bytes, int]:
    found = unpack_header(os.pread(arena._files[segment].descriptor, 1 << 20, 0), header_offset(slot))
    return found.state, found.generation, found.key, found.length


def assigned(segment: int, page_size: int, name: str = "a") -> Assigned:
    return Assigned(segment, name, carve(MIB, page_size), 1)


# Headers


def test_a_segment_describes_itself(arena: Arena) -> None:
    arena.headers.describe(assigned(1, 8192, "model"))
    raw = os.pread(arena._files[1].descriptor, HEADERS_OFFSET, 0)
    assert unpack_description(raw, MIB) == Description(1, "model", NODE_ID, carve(MIB, 8192), 1, 1)
    arena.headers.describe(assigned(1, 4096, "model"))
    assert carving_of(memoryview(os.pread(arena._files[1].descriptor, HEADERS_OFFSET, 0))) == 2


def test_a_header_says_writing_before_it_says_present(arena: Arena) -> None:
    arena.headers.describe(assigned(0, 8192))
    assert header(arena, 0, 3) == (SlotState.FREE, 0, bytes(16), 0)
    page = Page(b"k" * 16, PageRef(0, 3, 7).pack())
    arena.headers.begin_writing([page], 8192, UNKNOWN)
    assert header(arena, 0, 3) == (SlotState.WRITING, 7, b"k" * 16, 8192)
    arena.headers.publish([page], 8192)
    assert header(arena, 0, 3) == (SlotState.PRESENT, 7, b"k" * 16, 8192)
    assert header(arena, 0, 2) == header(arena, 0, 4) == (SlotState.FREE, 0, bytes(16), 0)


def test_no_old_header_vouches_for_bytes_of_a_new_page(arena: Arena) -> None:
    small, large = carve(MIB, 1024), carve(MIB, 256 << 10)
    arena.headers.describe(assigned(0, 1024))
    last = small.slot_count - 1
    assert header_offset(last) > large.data_offset, "the old header must lie where new pages will"
    page = Page(b"k" * 16, PageRef(0, last, 7).pack())
    arena.headers.begin_writing([page], 1024, UNKNOWN)
    arena.headers.publish([page], 1024)
    arena.headers.describe(assigned(0, 256 << 10, "b"))
    assert header(arena, 0, last) == (SlotState.FREE, 0, bytes(16), 0)


def test_segments_are_private_files_of_their_size(arena: Arena, home: Path) -> None:
    files = sorted((home / "pool").glob("segment-*"))
    assert [(entry.name, entry.stat().st_size) for entry in files] == [("segment-00000", MIB), ("segment-00001", MIB)]


# First touch


def test_touching_tells_its_progress_in_steps(home: Path) -> None:
    arena = Arena(config(home, size=20 * MIB, segment_size=10 * MIB), NODE_ID)
    told: list[tuple[int, int]] = []
    assert arena.prefault(lambda segment, touched: told.append((segment, touched)), threading.Event()) is None
    assert told == [(0, TOUCH_STEP), (0, 10 * MIB), (1, TOUCH_STEP), (1, 10 * MIB)]
    allocated = os.fstat(arena._files[1].descriptor).st_blocks * 512
    assert allocated >= 10 * MIB
    arena.close()


def test_the_first_memory_is_touched_before_engines_take_precedence(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    monkeypatch.setattr("ems.pool.segments.arena.URGENT_BYTES", 2 * TOUCH_STEP)
    monkeypatch.setattr("ems.pool.segments.arena.yield_to_others", lambda: events.append("yields"))
    arena = Arena(config(home, size=4 * TOUCH_STEP, segment_size=4 * TOUCH_STEP), NODE_ID)
    arena.prefault(lambda _, touched: events.append(touched // TOUCH_STEP), threading.Event())
    assert events == [1, 2, "yields", 3, 4]
    arena.close()


def test_a_stop_ends_touching(home: Path) -> None:
    arena = Arena(config(home, size=64 * MIB, segment_size=64 * MIB), NODE_ID)
    stop = threading.Event()
    told: list[int] = []

    def progress(segment: int, touched: int) -> None:
        told.append(touched)
        stop.set()

    assert arena.prefault(progress, stop) is None
    assert told == [TOUCH_STEP]
    arena.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EIO])
def test_touching_ends_where_memory_does(home: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    arena = Arena(config(home, size=64 * MIB, segment_size=32 * MIB), NODE_ID)
    left = 3
    allocate = os.posix_fallocate

    def scarce(descriptor: int, start: int, length: int) -> None:
        nonlocal left
        if not left:
            raise OSError(code, os.strerror(code))
        left -= 1
        allocate(descriptor, start, length)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    told: list[tuple[int, int]] = []
    reason = arena.prefault(lambda segment, touched: told.append((segment, touched)), threading.Event())
    assert reason == os.strerror(code)
    assert told == [(0, TOUCH_STEP), (0, 2 * TOUCH_STEP), (0, 3 * TOUCH_STEP)]
    arena.close()


def test_memory_is_allocated_also_where_it_is_not_to_be_touched(home: Path) -> None:
    arena = Arena(config(home, prefault=False), NODE_ID)
    arena.prefault(lambda *_: None, threading.Event())
    assert os.fstat(arena._files[0].descriptor).st_blocks * 512 >= 2 * MIB
    arena.close()


def test_an_old_kernel_touches_without_changing_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ems.pool.segments.touch._POPULATE_WRITE", 9999)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(MIB)
        mapped = mmap.mmap(file.fileno(), MIB)
        mapped[::4096] = bytes(range(256))
        view = memoryview(mapped)
        warm(view)
        assert mapped[::4096] == bytes(range(256))
        view.release()
        mapped.close()


def test_a_lowest_priority_that_is_refused_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def forbid(*arguments: int) -> None:
        asked.append(arguments)
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbid)
    yield_to_others()
    assert asked == [(os.PRIO_PROCESS, threading.get_native_id(), 19)]


# Sizes


@pytest.mark.parametrize(
    "pool", [4096, MIB, 100 * MIB, 127 * MIB, 128 * MIB, 1 << 30, 5 << 30, 17 << 30, (1 << 40) + 1]
)
def test_segments_of_a_size_of_choice_use_nearly_all_memory(pool: int) -> None:
    segment = pick_segment_size(pool)
    assert segment % 4096 == 0
    assert 0 <= pool - pool // segment * segment < 4096 * (pool // segment) + 4096
    assert segment <= 2 << 30
    assert segment >= min(pool, 64 * MIB)


def test_the_default_pool_leaves_room_for_others() -> None:
    gib = 1 << 30
    assert default_pool_size(100 * gib, 100 * gib) == 4 * gib
    assert default_pool_size(2 * gib, 100 * gib) == gib
    assert default_pool_size(100 * gib, 2 * gib) == gib // 2
    assert default_pool_size(0, 0) == MIB


def test_a_pool_larger_than_what_is_free_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(home)
    small = os.statvfs_result([*real[:3], real.f_bfree, MIB // real.f_frsize, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with pytest.raises(ConfigError, match=r"a pool of 2.0 MiB does not fit in .*, which has 1.0 MiB free"):
        Arena(config(home), NODE_ID)
    assert list(home.iterdir()) == []
    assert plan_segments(config(home, size=0), 8 * MIB, 1 << 40) == [4 * MIB]


def test_a_file_system_that_refuses_a_segment_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _size: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match=r"cannot make segments in .*: File too large"):
        Arena(config(home), NODE_ID)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("wanted", [1 << 60, 4 * MIB], ids=["a size that does not fit", "a segment that is refused"])
def test_a_start_that_is_refused_takes_nothing_of_what_an_earlier_node_left(
    home: Path, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    def refuse(_descriptor: int, _size: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    earlier = Arena(config(home, segment_size=MIB), NODE_ID)
    os.pwrite(earlier._files[1].descriptor, b"page", 0)
    earlier.close()
    before = sorted(home.rglob("*"))
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match=r"does not fit in|cannot make segments in"):
        Arena(config(home, size=wanted, segment_size=MIB), NODE_ID)
    assert sorted(home.rglob("*")) == before
    assert (home / "pool" / "segment-00001").read_bytes() == b"page" + bytes(MIB - 4)


def test_segments_larger_than_the_pool_are_refused(home: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"segments of 1\.0 TiB do not fit in a pool of .*, give a smaller --segment-size"
    ):
        Arena(config(home, size=0, segment_size=1 << 40), NODE_ID)
    assert list(home.iterdir()) == []


# A node that comes after


def test_a_pool_that_is_smaller_than_asked_for_says_why(home: Path) -> None:
    Arena(config(home, size=9 * MIB, segment_size=3 * MIB), NODE_ID).close()
    smaller = Arena(config(home, size=8 * MIB), NODE_ID)
    smaller.close()
    assert sum(smaller.sizes) == 6 * MIB
    assert [note for note in smaller.notes if "the pool has 6.0 MiB of 8.0 MiB" in note]
    fitting = Arena(config(home, size=6 * MIB), NODE_ID)
    fitting.close()
    assert fitting.notes == []


def test_memory_that_was_being_given_back_when_the_node_ended_is_touched_again(home: Path) -> None:
    whole = 2 * TOUCH_STEP
    settings = config(home, size=whole, segment_size=whole)
    earlier = Arena(settings, NODE_ID)
    earlier.prefault(lambda *_: None, threading.Event())
    earlier.give_up(0, 0, TOUCH_STEP)
    earlier.close()
    arena = Arena(settings, NODE_ID)
    arena.adopt(recover(arena.images()))
    arena.prefault(lambda *_: None, threading.Event())
    assert os.fstat(arena._files[0].descriptor).st_blocks * 512 == whole
    arena.close()


def test_memory_is_not_given_back_where_no_file_can_take_its_place(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next node must find who may still write into it."""
    arena = Arena(config(home, size=TOUCH_STEP, segment_size=TOUCH_STEP), NODE_ID)
    arena.prefault(lambda *_: None, threading.Event())
    os.pwrite(arena._files[0].descriptor, b"who writes", 0)
    monkeypatch.setattr(Arena, "_new_file", full)
    with pytest.raises(OSError, match="No space left"):
        arena.give_up(0, 0, TOUCH_STEP)
    assert os.pread(arena._files[0].descriptor, 10, 0) == b"who writes"
    monkeypatch.undo()
    arena.give_up(0, 0, TOUCH_STEP)
    assert os.fstat(arena._files[0].descriptor).st_blocks == 0
    assert arena.given_up == {0}
    arena.close()


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# The folder


def test_a_folder_of_somebody_else_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"belongs to user \d+, who could put anything into the pool"):
        make_folder(home)


def test_a_folder_for_everybody_is_refused(home: Path) -> None:
    home.chmod(0o1777)
    with pytest.raises(ConfigError, match="is a folder for everybody"):
        make_folder(home)
    assert home.stat().st_mode & 0o7777 == 0o1777


def test_a_folder_that_others_may_read_stays_as_it_is(home: Path) -> None:
    home.chmod(0o755)
    make_folder(home)
    assert home.stat().st_mode & 0o7777 == 0o755


def test_a_file_in_place_of_the_folder_is_refused(home: Path) -> None:
    (home / "file").touch()
    with pytest.raises(ConfigError, match="cannot use"):
        make_folder(home / "file" / "pool")


def test_a_folder_has_one_holder(home: Path) -> None:
    folder = Folder(home / "pool")
    with pytest.raises(ConfigError, match=rf"already running in .* \(process {os.getpid()}\)"):
        Folder(home / "pool", patience=0.0)
    folder.close(log=False)
    assert list(home.iterdir()) == []


def test_a_folder_that_goes_while_it_is_made_is_made_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that stops removes it at any moment: before it is made, while it is looked at, after that."""
    path, left = home / "pool", [9]
    is_dir, lstat, status = Path.is_dir, Path.lstat, Path.stat

    def going(look: Callable[[Path], Any]) -> Callable[..., Any]:
        def gone_first(one: Path, *arguments: Any, **named: Any) -> Any:
            if one == path and left[0] and path.exists():
                left[0] -= 1
                path.rmdir()
            return look(one, *arguments, **named)

        return gone_first

    make_folder(path)
    with monkeypatch.context() as patched:
        for name, look in (("is_dir", is_dir), ("lstat", lstat)):
            patched.setattr(Path, name, going(look))
        make_folder(path)
    assert left == [0]
    assert status(path).st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a link away takes root")
def test_a_link_of_somebody_else_is_not_followed(home: Path) -> None:
    """In a folder for everybody, as /dev/shm is, anybody can put one where a node would make its own."""
    (home / "mine").mkdir(mode=0o700)
    (home / "link").symlink_to(home / "mine")
    make_folder(home / "link")
    os.lchown(home / "link", 12345, 12345)
    with pytest.raises(ConfigError, match=r"is a link of user 12345, who could put the pool anywhere"):
        make_folder(home / "link")


def test_a_holder_that_is_leaving_is_waited_for(home: Path) -> None:
    first = Folder(home / "pool")
    second: list[Folder] = []
    waiting = threading.Thread(target=lambda: second.append(Folder(home / "pool", patience=60.0)))
    waiting.start()
    first.close(log=False)
    waiting.join()
    assert (home / "pool" / "node.lock").exists()
    second[0].close(log=False)


def test_the_lock_of_a_removed_folder_holds_nothing(home: Path) -> None:
    """A holder that leaves removes the file that the next one may have open already."""
    first = Folder(home / "pool")
    late = os.open(home / "pool" / "node.lock", os.O_RDWR)
    first.close(log=False)
    fcntl.flock(late, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = Folder(home / "pool", patience=0.0)
    with pytest.raises(ConfigError):
        Folder(home / "pool", patience=0.0)
    second.close(log=False)
    os.close(late)


def test_only_segments_are_removed(home: Path) -> None:
    folder = Folder(home / "pool")
    folder.node_state.write_bytes(b"EMSMARK1")
    for name in ("segment-00000", "segment-00001", "segment-x", "segment-1", "other"):
        (home / "pool" / name).touch(mode=0o600)
    folder.remove_segments()
    assert sorted(entry.name for entry in (home / "pool").iterdir()) == ["node.lock", "other", "segment-1", "segment-x"]
    folder.close(log=True)


def test_one_at_a_time_may_start_a_node(home: Path) -> None:
    with starting(home / "pool") as first, starting(home / "pool") as second:
        assert (first, second) == (True, False)
    with starting(home / "pool") as third:
        assert third
    assert [entry.name for entry in (home / "pool").iterdir()] == []


# The socket


def test_a_socket_of_a_dead_node_is_replaced(home: Path) -> None:
    first = Listener(home / "s")
    first.sock.close()
    second = Listener(home / "s")
    second.close()
    assert not (home / "s").exists()


def test_a_socket_that_somebody_listens_on_is_left_alone(home: Path) -> None:
    first = Listener(home / "s")
    with pytest.raises(ConfigError, match="another node is already listening"):
        Listener(home / "s")
    with pytest.raises(ConfigError, match="another node is already listening"):
        refuse_if_taken(home / "s")
    first.close()
    refuse_if_taken(home / "s")


def test_a_listener_removes_only_its_own_socket(home: Path) -> None:
    first = Listener(home / "s")
    (home / "s").unlink()
    second = Listener(home / "s")
    first.close()
    assert (home / "s").exists()
    second.close()
    until(lambda: not (home / "s").exists(), "the socket is gone")


def test_a_folder_in_place_of_the_socket_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match="is no socket"):
        Listener(home)
