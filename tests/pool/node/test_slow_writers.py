"""Writers that go on copying after their node, or their connection, has gone: nobody accepts a wrong byte for it.

The node's clock is the test's; the writers are processes of their own, stopped and continued by signals.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ems.errors import PoolTimeout, PoolUnavailable
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import NO_PARENT
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.aging_node import AGE
from tests.pool.brain import chain
from tests.pool.conftest import MakeClient
from tests.pool.stored_pages import NAMESPACE, back, load, store

pytestmark = pytest.mark.process

FLAGS = ("--size", "4MB", "--segment-size", "1MB", "--verify", "sampled")
PROMISED = 200
WRITER = """
import sys
from pathlib import Path
from ems.errors import EmsError
from ems.pool.client.pool_client import PoolClient
from tests.pool.brain import chain
from tests.pool.stored_pages import NAMESPACE, PAGE

client = PoolClient(Path(sys.argv[1]), "writer")
reserved = client.reserve(NAMESPACE, bytes(16), chain("slow", int(sys.argv[2])))
segments = client.segments(reserved.epoch)
places = [segments.page(ref, PAGE) for ref in reserved.granted.values()]
print(len(places), flush=True)
for line in sys.stdin:
    match line.split():
        case ["copy", first, last]:
            for place in places[int(first) : int(last)]:
                place[:] = b"w" * PAGE
        case ["leave"]:
            client.drop()
        case ["give", "up"]:
            try:
                client.abort(reserved)
            except EmsError:
                pass
            client.tell_stopped()
    print("done", flush=True)
"""


class Writer:
    """A process with a reservation, which copies when it is told to."""

    def __init__(self, node: NodeProcess, promised: int) -> None:
        command = [sys.executable, "-c", WRITER, str(node.socket), str(promised)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.promised = int(self.process.stdout.readline())

    def begin(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()

    def done(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "done\n"

    def do(self, what: str) -> None:
        self.begin(what)
        self.done()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node of which all memory is touched."""
    one = NodeProcess(*FLAGS)
    one.module, one.environment = "tests.pool.aging_node", {AGE: str(tmp_path / "age")}
    with one:
        one.wait_touched()
        yield one
        assert "Traceback" not in one.log, one.log


@pytest.fixture
def pass_by(node: NodeProcess, tmp_path: Path) -> Callable[[float], None]:
    """Let time go by for the node."""

    def let_pass(seconds: float) -> None:
        before = node.figures()["uptime_seconds"]
        (tmp_path / "new").write_text(str(seconds), encoding="ascii")
        (tmp_path / "new").rename(tmp_path / "age")
        until(lambda: node.figures()["uptime_seconds"] >= before + seconds, "time went by")
        ticks = node.figures()["ticks"]
        until(lambda: node.figures()["ticks"] > ticks + 1, "the node has looked around")

    return let_pass


@pytest.fixture
def writer(node: NodeProcess) -> Iterator[Writer]:
    """A writer that was promised a fifth of the pool."""
    with ExitStack() as stack:
        one = Writer(node, PROMISED)
        stack.callback(one.close)
        assert one.promised == PROMISED
        yield one


def resting(node: NodeProcess) -> int:
    count: int = node.figures()["slots_resting"]
    return count


def restart(node: NodeProcess) -> None:
    node.kill()
    node.start()
    node.wait_touched()


def fill(client: PoolClient, name: str) -> list[bytes]:
    """Store until the pool has no room that was not used; what was stored."""
    keys = chain(name, 1200)
    stored = store(client, keys)
    assert stored > 200
    return keys[:stored]


def check(client: PoolClient, keys: list[bytes]) -> None:
    """Pages are there, but for the last that made room, and have their bytes; ``load`` raises at a wrong one."""
    for _ in range(3):
        count, good = load(client, keys)
        assert len(keys) >= count == good > 0.7 * len(keys)


def test_a_writer_whose_node_was_killed_overwrites_nothing(
    node: NodeProcess, writer: Writer, pass_by: Callable[[float], None], make_client: MakeClient
) -> None:
    restart(node)
    pass_by(34.0)
    client = make_client(node)
    keys = fill(client, "others")
    writer.do(f"copy 0 {PROMISED}")
    check(client, keys)


def test_a_writer_that_was_stopped_in_its_copy_overwrites_nothing(
    node: NodeProcess, writer: Writer, pass_by: Callable[[float], None], make_client: MakeClient
) -> None:
    writer.do("copy 0 50")
    writer.process.send_signal(signal.SIGSTOP)
    restart(node)
    pass_by(600.0)
    client = make_client(node)
    keys = fill(client, "others")
    writer.process.send_signal(signal.SIGCONT)
    writer.do(f"copy 50 {PROMISED}")
    check(client, keys)
    restart(node)  # what rests is known again, however often the node is killed
    back(node, client)
    check(client, keys)
    writer.do(f"copy 0 {PROMISED}")
    check(client, keys)


def test_a_writer_that_lost_its_connection_overwrites_nothing(
    node: NodeProcess, writer: Writer, pass_by: Callable[[float], None], make_client: MakeClient
) -> None:
    writer.do("leave")
    until(lambda: resting(node) == PROMISED, "the node notices")
    pass_by(600.0)
    client = make_client(node)
    keys = fill(client, "others")
    writer.do(f"copy 0 {PROMISED}")
    check(client, keys)


@pytest.mark.parametrize("killed", [False, True])
def test_slots_are_free_when_their_writer_ends(node: NodeProcess, writer: Writer, *, killed: bool) -> None:
    if killed:
        restart(node)
    else:
        writer.do("leave")
    until(lambda: resting(node) == PROMISED, "its slots wait for it")
    writer.close()
    until(lambda: resting(node) == 0, "its slots are free")


@pytest.mark.parametrize("killed", [False, True])
def test_slots_are_free_when_their_writer_says_that_it_stopped(
    node: NodeProcess, writer: Writer, *, killed: bool
) -> None:
    if killed:
        restart(node)
    else:
        writer.do("leave")
    until(lambda: resting(node) == PROMISED, "its slots wait for it")
    writer.do("give up")
    until(lambda: resting(node) == 0, "its slots are free")
    assert writer.process.poll() is None


def test_a_writer_that_never_heard_of_its_slots_gives_them_up(node: NodeProcess, make_client: MakeClient) -> None:
    """The node answered a connection that was lost by then."""
    client = make_client(node)
    client.open(NAMESPACE)
    assert node.pid is not None
    os.kill(node.pid, signal.SIGSTOP)
    with pytest.raises(PoolTimeout):
        client.reserve(NAMESPACE, NO_PARENT, chain("lost", 3), timeout=0.2)
    os.kill(node.pid, signal.SIGCONT)
    until(lambda: resting(node) == 3, "its slots wait for it")

    def told() -> bool:
        with suppress(PoolUnavailable):  # it was tried a moment ago
            client.tell_stopped()
        return resting(node) == 0

    until(told, "its slots are free")


def test_memory_is_replaced_when_slots_wait_for_long(
    node: NodeProcess, writer: Writer, pass_by: Callable[[float], None], make_client: MakeClient
) -> None:
    """A writer may hang for ever: the pool is whole again all the same."""
    writer.do("leave")
    until(lambda: resting(node) == PROMISED, "its slots wait for it")
    pass_by(34.0)
    until(lambda: resting(node) == 0, "the memory was replaced")
    node.wait_touched()
    client = make_client(node)
    keys = fill(client, "others")
    writer.do(f"copy 0 {PROMISED}")
    check(client, keys)
    assert client.lookup(NAMESPACE, b"".join(chain("slow", 1))).count == 0
    assert client.reserve(NAMESPACE, NO_PARENT, chain("slow", 1)).granted
