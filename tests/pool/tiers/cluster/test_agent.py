"""The process that moves pages for a node."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from ems.errors import EmsError
from ems.pool.keys import NO_PARENT
from ems.pool.layout import crc32c
from ems.pool.segments.touch import TOUCH_STEP
from ems.pool.tiers.answers import Outcome
from ems.pool.tiers.cluster import calls
from ems.pool.tiers.cluster.agent import Lane, Mover, lend
from ems.pool.tiers.cluster.objects import HEADER_BYTES, Objects
from ems.pool.tiers.pack_seal import SealKeys, make_key, read_keys
from tests.kit.tiers import key
from tests.kit.waiting import until

BUSY = """
import ctypes, socket, sys
from ems.pool.tiers.cluster.agent import end_with
sock = socket.socket(fileno=int(sys.argv[1]))
end_with(sock)
sock.send(b"!")
ctypes.PyDLL(None).pause()  # as a call into Mooncake that hangs: no thread of Python runs from here on
"""


def test_it_ends_with_its_node_also_in_the_middle_of_a_call() -> None:
    ours, theirs = socket.socketpair()
    with subprocess.Popen([sys.executable, "-c", BUSY, str(theirs.fileno())], pass_fds=[theirs.fileno()]) as agent:
        theirs.close()
        assert ours.recv(1) == b"!"
        ours.close()
        assert agent.wait(60) == -signal.SIGIO


LEAVING = """
import ctypes
from ems.pool.tiers.cluster.agent import leave

class Store:
    def close(self):
        ctypes.PyDLL(None).pause()  # as Mooncake's client does where no master answers

leave(Store())
"""


@pytest.mark.process
def test_it_leaves_in_time_also_where_its_client_hangs() -> None:
    assert subprocess.run([sys.executable, "-c", LEAVING], timeout=60, check=False).returncode == -signal.SIGALRM


class Lender:
    """A store that lends what it is told to."""

    def __init__(self) -> None:
        self.lent: list[int] = []

    def allocate_and_mount_segment(self, size: int, _protocol: str) -> dict[str, int]:
        self.lent.append(size)
        return {"ret": 0}


def test_what_lends_memory_answers_while_it_lends_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    store = Lender()
    ours.send(b"?")
    monkeypatch.setattr("ems.pool.tiers.cluster.agent.RAMP_SECONDS", 0.0)
    with theirs, ThreadPoolExecutor(1) as threads:
        lending = threads.submit(lend, theirs, store, [1, 2, 3], "tcp")
        assert ours.recv(1) == b"?"
        until(lambda: store.lent == [1, 2, 3], "all is lent", 60.0)
        ours.send(b"?")
        assert ours.recv(1) == b"?"
        ours.close()
        lending.result(60)


class Registrar:
    """A store that takes all memory."""

    def register_buffer(self, _address: int, _size: int) -> int:
        return 0

    def unregister_buffer(self, _address: int) -> int:
        return 0


def mapped_bytes(name: str) -> int:
    """What of the files of this name this process has in its page tables."""
    found = re.findall(
        rf"memfd:{name}\b.*?^Rss: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.DOTALL | re.MULTILINE
    )
    return sum(map(int, found)) << 10


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut-by-somebody"])
def test_a_segment_is_mapped_before_pages_come(*, cut: bool) -> None:
    size, name = 16 << 20, f"ems-warmed-{cut}"
    file = os.memfd_create(name)
    os.truncate(file, size)
    mover = Mover(Registrar(), cast(Any, None), None, None)

    mover.know(calls.Attach(1, size, mapped=True), [os.dup(file)])

    if cut:
        os.truncate(file, 0)
        until(lambda: not any(one.name == "ems-warm" for one in threading.enumerate()), "it gave up", 60.0)
    else:
        until(lambda: mapped_bytes(name) == size, "all is mapped", 60.0)
    os.close(file)


def test_a_segment_that_is_gone_is_mapped_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    size, mapped = 64 << 20, list[int]()
    file = os.memfd_create("ems-given-up")
    os.truncate(file, size)
    mover = Mover(Registrar(), cast(Any, None), None, None)

    def warm(view: memoryview) -> None:
        mapped.append(len(view))
        mover.know(calls.Detach(1), [])

    monkeypatch.setattr("ems.pool.tiers.cluster.agent.warm", warm)
    mover.know(calls.Attach(1, size, mapped=True), [os.dup(file)])
    until(lambda: mapped and not any(one.name == "ems-warm" for one in threading.enumerate()), "it ended", 60.0)
    os.close(file)

    assert mapped == [TOUCH_STEP]


class Keeper(Registrar):
    """A store that keeps what is put."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.broken = False

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [int(name in self.kept) for name in names]

    def batch_put_from_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]], _config: Any
    ) -> list[int]:
        if self.broken:
            return [-900] * len(names)
        for name, places, lengths in zip(names, addresses, sizes, strict=True):
            self.kept[name] = b"".join(map(ctypes.string_at, places, lengths))
        return [0] * len(names)


PAGE = 4096
NAMESPACE = "tenant/model/layout"


class Copying:
    """A lane of who lends memory, beside a segment of four pages that is not mapped."""

    def __init__(self, keys: SealKeys) -> None:
        self.store = Keeper()
        self.objects = Objects(keys)
        self.file = os.memfd_create("ems-copied")
        os.truncate(self.file, 4 * PAGE)
        self.lane = Lane(Mover(self.store, self.objects, None, None))
        self.lane.answer(calls.Attach(1, 4 * PAGE, mapped=False), [os.dup(self.file)])

    def fill(self, position: int, content: bytes) -> None:
        os.pwrite(self.file, content * PAGE, position * PAGE)

    def copy(self, *pages: calls.Place) -> calls.Answer:
        return self.lane.answer(calls.Copy(NAMESPACE, PAGE, list(pages)), [])

    def store_copied(self) -> list[int]:
        return self.lane.answer(calls.StoreCopied(), []).codes

    def stored(self, name: str) -> bytes | None:
        """What the page of this name is, as whoever fetches it would see it; None: there is none, or it is damaged."""
        seal = self.objects.of(NAMESPACE)
        assert seal is not None
        found = self.store.kept.get(seal.name(key(name)))
        if found is None or seal.open(found[:HEADER_BYTES], key(name), found[HEADER_BYTES:]) is None:
            return None
        return found[HEADER_BYTES:]


@pytest.fixture
def copying() -> Iterator[Copying]:
    made = Copying(SealKeys(b"secret" * 8, encrypts=False))
    yield made
    os.close(made.file)


def at(position: int, name: str, content: bytes | None = None) -> calls.Place:
    checksum = None if content is None else crc32c(content * PAGE)
    return calls.Place(key(name), 1, position * PAGE, NO_PARENT, checksum)


def test_what_is_stored_is_what_was_copied(copying: Copying) -> None:
    copying.fill(0, b"a")
    copying.copy(at(0, "a"))
    copying.fill(0, b"b")
    assert copying.store_copied() == [Outcome.DONE]
    assert copying.stored("a") == b"a" * PAGE


def test_what_was_copied_is_stored_once_and_only_when_told(copying: Copying) -> None:
    copying.fill(0, b"a")
    copying.fill(1, b"b")
    copying.copy(at(0, "a"))
    copying.copy(at(1, "b"))
    assert copying.store_copied() == [Outcome.DONE]
    assert copying.store_copied() == []
    assert copying.stored("a") is None
    assert copying.stored("b") == b"b" * PAGE


def test_each_page_that_is_copied_has_its_own_outcome(copying: Copying) -> None:
    for position, content in enumerate((b"a", b"b", b"c")):
        copying.fill(position, content)
    copying.copy(at(0, "a"))
    copying.store_copied()
    os.truncate(copying.file, 3 * PAGE)  # as somebody does who has the file
    copying.copy(at(0, "a"), at(1, "b", b"x"), at(2, "c", b"c"), at(3, "d"))
    assert copying.store_copied() == [Outcome.PRESENT, Outcome.CORRUPT, Outcome.DONE, Outcome.MISSING]
    assert copying.stored("c") == b"c" * PAGE
    assert copying.stored("b") is None


def test_what_the_cluster_does_not_take_is_not_stored_with_the_next(copying: Copying) -> None:
    copying.copy(at(0, "a"))
    copying.store.broken = True
    with pytest.raises(EmsError, match="did not take pages"):
        copying.store_copied()
    copying.store.broken = False
    assert copying.store_copied() == []
    assert copying.stored("a") is None


def test_without_a_tenants_secret_nothing_of_it_is_copied(tmp_path: Path) -> None:
    make_key(tmp_path / "other.key")
    copying = Copying(read_keys(tmp_path, encrypts=False))
    copying.copy(at(0, "a"), at(1, "b"))
    assert copying.store_copied() == [Outcome.WRONG_KEY] * 2
    assert not copying.store.kept
    os.close(copying.file)
