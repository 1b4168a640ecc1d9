"""The process that moves pages for a node."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from ems.errors import ConfigError, EmsError
from ems.pool.movement.hot_list import HotRun
from ems.pool.segments.touch import TOUCH_STEP
from ems.pool.tiers.answers import Outcome
from ems.pool.tiers.cluster import calls
from ems.pool.tiers.cluster.agent import lend, serve
from ems.pool.tiers.cluster.direct_reads import DirectReads
from ems.pool.tiers.cluster.lent_memory import LentMemory
from ems.pool.tiers.cluster.mooncake_client import check_address, check_names
from ems.pool.tiers.cluster.mooncake_config import MooncakeConfig
from ems.pool.tiers.cluster.mover import Lane, Mover
from ems.pool.tiers.cluster.objects import Objects
from ems.pool.tiers.pack_seal import SealKeys
from tests.kit.waiting import until

SHARED = ("t/m/cleared", "t/m/kept")
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


@pytest.mark.process
@pytest.mark.parametrize("gives", [True, False])
def test_it_ends_with_its_node_while_it_starts(*, gives: bool) -> None:
    """The master takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as master:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "ems.pool.tiers.cluster.agent", str(theirs.fileno())]
        with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL) as agent:
            theirs.close()
            address = f"127.0.0.1:{master.getsockname()[1]}"
            config = MooncakeConfig(master_server_address=address, global_segment_size=1 << 28)
            calls.send(ours, calls.Start(config, gives=gives, secrets={}))
            connection, _ = master.accept()
            ours.close()
            assert agent.wait(60) in (-signal.SIGIO, 1)
            connection.close()


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


AT_WORK = """
import os, sys, threading
from ems.pool.tiers.cluster import agent

class Store:
    def close(self):
        os._exit(3 if thread.is_alive() else 4)

thread = threading.Thread(target=sys.stdin.read)  # as one that stores, until somebody writes
thread.start()
threading.Timer(0.0, lambda: print("leaves", flush=True)).start()
agent.STORED_SECONDS = float(sys.argv[1])
agent.leave(Store(), [thread])
"""


@pytest.mark.process
def test_it_leaves_when_what_it_stores_is_stored() -> None:
    command = [sys.executable, "-c", AT_WORK, "600"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"leaves\n"
        agent.communicate(timeout=60)
        assert agent.returncode == 4


@pytest.mark.process
def test_it_leaves_in_time_also_where_a_store_hangs() -> None:
    with subprocess.Popen([sys.executable, "-c", AT_WORK, "0.01"], stdin=subprocess.PIPE) as agent:
        assert agent.wait(60) == 3


def test_a_defect_does_not_end_who_lends_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, *_: object) -> None:
            pass

        def answer(self, *_: object) -> calls.Answer:
            raise KeyError("what nobody thought of")

    monkeypatch.setattr("ems.pool.tiers.cluster.agent.Lane", Failing)
    ours, theirs = socket.socketpair()
    with theirs, ThreadPoolExecutor(1) as threads:
        serving = threads.submit(serve, theirs, cast(Any, None), False)
        for _ in range(2):
            calls.send(ours, calls.Probe())
            assert calls.receive(ours, calls.answers)[0].error == "a defect of EMS: KeyError: 'what nobody thought of'"
            calls.send(ours, calls.Cancel())
        ours.close()
        serving.result(60)


class Lender:
    """A store that lends what it is told to, unless it ``fails`` so often."""

    def __init__(self, fails: int = 0) -> None:
        self.lent: list[int] = []
        self._fails = fails

    def allocate_and_mount_segment(self, size: int, _protocol: str) -> dict[str, int]:
        if self._fails:
            self._fails -= 1
            return {"ret": -1}
        self.lent.append(size)
        return {"ret": 0}


@pytest.mark.parametrize("fails", [0, 3], ids=["master there", "master lost for a while"])
def test_what_lends_memory_answers_while_it_lends_more(monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    ours, theirs = socket.socketpair()
    store = Lender(fails)
    ours.send(b"?")
    monkeypatch.setattr("ems.pool.tiers.cluster.agent.RAMP_SECONDS", 0.0)
    with theirs, ThreadPoolExecutor(1) as threads:
        lending = threads.submit(lend, theirs, store, [1, 2, 3], "tcp", LentMemory())
        assert ours.recv(1) == b"?"
        until(lambda: store.lent == [1, 2, 3], "all is lent", 60.0)
        ours.send(b"?")
        assert ours.recv(1) == b"?"
        ours.close()
        lending.result(60)


def test_what_lends_memory_answers_while_a_part_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where RDMA has it touched: the node would end an agent that does not answer, and all that it lends."""
    mounting, mounted = threading.Event(), threading.Event()

    class Slow:
        def allocate_and_mount_segment(self, _size: int, _protocol: str) -> dict[str, int]:
            mounting.set()
            mounted.wait()
            return {"ret": 0}

    ours, theirs = socket.socketpair()
    monkeypatch.setattr("ems.pool.tiers.cluster.agent.RAMP_SECONDS", 0.0)
    with ours, theirs, ThreadPoolExecutor(1) as threads:
        lending = threads.submit(lend, theirs, Slow(), [1], "rdma", LentMemory())
        assert mounting.wait(60)
        ours.settimeout(60)
        ours.send(b"?")
        answered = ours.recv(1) if not lending.done() else b""
        ours.shutdown(socket.SHUT_WR)
        mounted.set()
        lending.result(60).join(60)
    assert answered == b"?"


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """As many as a node with many clients has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def renumbered(sock: socket.socket) -> socket.socket:
    with sock:
        return socket.socket(fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, 2000))


@pytest.mark.usefixtures("many_descriptors")
def test_what_lends_memory_answers_on_a_descriptor_of_any_number() -> None:
    ours, theirs = map(renumbered, socket.socketpair())
    with theirs, ThreadPoolExecutor(1) as threads:
        lending = threads.submit(lend, theirs, Lender(), [], "tcp", LentMemory())
        ours.send(b"?")
        ours.settimeout(60)
        answered = ours.recv(1) if not lending.done() else b""
        ours.close()
        lending.result(60)
    assert answered == b"?"


@pytest.mark.usefixtures("many_descriptors")
def test_a_late_answer_is_seen_on_a_descriptor_of_any_number() -> None:
    ours, theirs = map(renumbered, socket.socketpair())
    with ours, theirs:
        assert not calls.readable(ours, 0.0)
        calls.send(theirs, calls.Answer())
        assert calls.readable(ours, 60.0)


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
    mover = Mover(Registrar(), cast(Any, None), cast(Any, None), None, None)

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
    mover = Mover(Registrar(), cast(Any, None), cast(Any, None), None, None)

    def warm(view: memoryview) -> None:
        mapped.append(len(view))
        mover.know(calls.Detach(1), [])

    monkeypatch.setattr("ems.pool.tiers.cluster.mover.warm", warm)
    mover.know(calls.Attach(1, size, mapped=True), [os.dup(file)])
    until(lambda: mapped and not any(one.name == "ems-warm" for one in threading.enumerate()), "it ended", 60.0)
    os.close(file)

    assert mapped == [TOUCH_STEP]


class Giving(Registrar):
    """A store that takes pages, with what happens while it does, or before that."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.when_asked: Callable[[], object] = lambda: None
        self.when_put: Callable[[], object] = lambda: None

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self.when_asked()
        return [int(name in self.content) for name in names]

    def batch_put_from_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]], _config: object
    ) -> list[int]:
        for name, parts, lengths in zip(names, addresses, sizes, strict=True):
            self.content[name] = b"".join(map(ctypes.string_at, parts, lengths))
        self.when_put()
        return [0] * len(names)

    def remove(self, name: str, *, force: bool) -> int:
        assert force
        del self.content[name]
        return 0


@pytest.mark.parametrize("when", ["never", "before", "meanwhile"])
def test_a_store_that_nobody_waits_for_leaves_nothing(when: str) -> None:
    """Where it reads may be another page by then or no segment, and what it stores may have been cleared."""
    giving, cancelled = Giving(), threading.Event()

    def cancel() -> None:
        cancelled.set()
        mover.know(calls.Detach(1), [])

    if when == "before":
        giving.when_asked = cancel
    elif when == "meanwhile":
        giving.when_put = cancelled.set
    mover = Mover(giving, cast(Any, None), Objects(SealKeys(b"a secret of sixteen", encrypts=False)), None, None)
    file = os.memfd_create("ems-given-up")
    os.pwrite(file, os.urandom(4096), 0)
    mover.know(calls.Attach(1, 4096, mapped=False), [file])
    lane = Lane(mover, cancelled.is_set)

    store = calls.Store("t/m/l", 4096, [calls.Place(bytes(32), 1, 0)])
    with pytest.raises(EmsError, match="nobody waits") if when == "before" else contextlib.nullcontext():
        lane.answer(store, [])

    assert len(giving.content) == (when == "never")


def test_what_somebody_else_began_to_store_does_not_count_as_stored() -> None:
    """Mooncake says that it was stored, and has nothing of it for as long as the other one does not finish."""
    giving = Giving()
    giving.when_put = giving.content.clear
    mover = Mover(giving, cast(Any, None), Objects(SealKeys(b"a secret of sixteen", encrypts=False)), None, None)
    file = os.memfd_create("ems-half-stored")
    os.pwrite(file, os.urandom(4096), 0)
    mover.know(calls.Attach(1, 4096, mapped=False), [file])
    store = calls.Store("t/m/l", 4096, [calls.Place(bytes(32), 1, 0)])

    assert Lane(mover).answer(store, []).codes == [Outcome.MISSING]


class Shelf(Registrar):
    """A cluster of two namespaces' lists, one of which is cleared right after somebody read them."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.when_read: Callable[[], object] = lambda: None

    def get_batch(self, names: list[str]) -> list[bytes]:
        found = [self.content.get(name, b"") for name in names]
        self.when_read()
        return found

    def upsert(self, name: str, raw: bytes, _config: object) -> int:
        self.content[name] = raw
        return 0

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, list[Any]]:
        return {name: [SimpleNamespace(is_memory_replica=lambda: False)] for name in names if name in self.content}

    def remove_by_regex(self, pattern: str, *, force: bool) -> int:
        gone = [name for name in self.content if re.search(pattern, name)]
        for name in gone:
            del self.content[name]
        return len(gone) if force else 0


def test_a_list_that_was_read_before_it_was_cleared_is_not_written_back() -> None:
    shelf = Shelf()
    objects = Objects(SealKeys(b"a secret of sixteen", encrypts=False))
    mover = Mover(shelf, DirectReads(shelf, None, {}), objects, None, None)
    mine, other = Lane(mover), Lane(mover)

    def share(key: bytes) -> None:
        mine.answer(calls.ShareHot([calls.HotList(name, [HotRun(bytes(16), key * 16)]) for name in SHARED]), [])

    share(b"a")
    assert len(shelf.content) == 2
    shelf.when_read = lambda: other.answer(calls.Clear(SHARED[0]), [])
    share(b"b")
    shelf.when_read = lambda: None
    assert len(shelf.content) == 1, "what was cleared is not there, and the other list is told again"
    share(b"c")
    (cleared, kept) = mine.answer(calls.ShareHot([calls.HotList(name, []) for name in SHARED]), []).hot
    assert [run.packed[:1] for run in cleared.runs] == [b"c"]
    assert [run.packed[:1] for run in kept.runs] == [b"a", b"c"]


@pytest.mark.parametrize("named", ["127.0.0.1", "localhost", "[::1]"])
def test_an_address_of_this_host_alone_goes_with_a_master_of_this_host_alone(named: str) -> None:
    check_address(named, "127.0.0.1")
    with pytest.raises(ConfigError, match="where other hosts do not reach this one; leave it out"):
        check_address(named, "192.0.2.1")


@pytest.mark.parametrize("named", ["192.0.2.7", "[2001:db8::7]"])
def test_an_address_of_another_host_is_not_taken_for_this_one(named: str) -> None:
    with pytest.raises(ConfigError, match="where other hosts do not reach this one; leave it out"):
        check_address(named, "127.0.0.1")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, ""),
        ({"local_hostname": "localhost"}, ""),
        (
            {"local_hostname": "no.such.host.invalid"},
            "local_hostname is 'no.such.host.invalid', which this host does not ",
        ),
        (
            {"metadata_server": "http://127.0.0.1:1/metadata"},
            "nobody answers at the metadata_server http://127.0.0.1:1/",
        ),
        ({"metadata_server": "http://no.such.host.invalid/"}, "nobody answers at the metadata_server http://no.such"),
        ({"metadata_server": "127.0.0.1:1,127.0.0.2:1"}, ""),
    ],
)
def test_what_mooncake_tells_by_a_number_is_a_sentence(
    said: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = socket.getaddrinfo

    def look_up(host: str, *rest: Any, **named: Any) -> Any:
        """As where nobody knows such a name, without asking anybody."""
        if host.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    config = msgspec.structs.replace(MooncakeConfig(master_server_address="127.0.0.1:1"), **said)
    with pytest.raises(ConfigError, match=re.escape(why)) if why else contextlib.nullcontext():
        check_names(config)
