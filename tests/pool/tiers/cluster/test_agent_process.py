"""What a node does about its agents' processes; the processes are the test's."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ems.errors import TierFailed
from ems.pool.segments.segment_file import FileRange, SegmentFile
from ems.pool.tiers.cluster import agent_process, calls
from ems.pool.tiers.cluster.agent_process import STORE_LANES, Agents
from ems.pool.tiers.cluster.mooncake_config import MooncakeConfig
from tests.kit.process import free_port
from tests.kit.waiting import until


class Agent:
    """An agent's process that has started, and whose sockets the test has."""

    def __init__(self, _command: list[str], *, pass_fds: list[int], **_others: object) -> None:
        self.sockets = [socket.socket(fileno=os.dup(number)) for number in pass_fds]
        self.stderr = BytesIO()
        self.returncode: int | None = None
        calls.send(self.sockets[0], calls.Answer(text="host:1"))

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, _timeout: float | None = None) -> int:
        return self.returncode or 0

    def kill(self) -> None:
        self.returncode = -9

    def is_left(self, number: int) -> bool:
        """Whether the node closed its end of a socket."""
        self.sockets[number].settimeout(5)
        try:
            while self.sockets[number].recv(4096):
                continue
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        for one in self.sockets:
            one.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Agent]]:
    made: list[Agent] = []

    def popen(*args: Any, **options: Any) -> Agent:
        made.append(Agent(*args, **options))
        return made[-1]

    monkeypatch.setattr("ems.pool.tiers.cluster.agent_process.subprocess.Popen", popen)
    monkeypatch.setattr(agent_process, "reach", lambda _master: None)
    yield made
    for agent in made:
        agent.close()


def test_who_lends_memory_and_ended_is_started_again_and_nothing_of_it_stays_open(started: list[Agent]) -> None:
    config = MooncakeConfig(master_server_address="127.0.0.1:1", global_segment_size=1 << 30)
    agents = Agents(config, secrets={}, own_place=True, replicas=1, lanes=2)
    agents.keep()
    gave, moved = started
    gave.returncode = -11
    agents.keep()
    assert len(started) == 4
    assert gave.is_left(0)
    assert [moved.is_left(number) for number in range(3)] == [True] * 3
    agents.close()


def test_a_call_beside_one_that_has_its_agent_ended_is_made_again(started: list[Agent]) -> None:
    config = MooncakeConfig(master_server_address="127.0.0.1:1", global_segment_size=0)
    agents = Agents(config, secrets={}, own_place=True, replicas=1, lanes=2)
    silent, other = (calls.Exist(name, [bytes(16)]) for name in ("silent", "other"))
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(agents.call, other, 60.0)
        until(lambda: len(started) == 1, "the agent is there")
        assert calls.receive(started[0].sockets[1], calls.calls)[0] == other
        with pytest.raises(TierFailed, match="did not answer within 0 s"):
            agents.call(silent, 0.05)
        until(lambda: len(started) == 2, "there is another agent")
        assert calls.receive(started[1].sockets[1], calls.calls)[0] == other
        calls.send(started[1].sockets[1], calls.Answer([1]))
        assert waiting.result().codes == [1]
    agents.close()


CONFIG = MooncakeConfig(master_server_address="127.0.0.1:1", global_segment_size=0)
FETCH = calls.Fetch("default/model/0", 4096, [])


def asked(agent: Agent, answer: calls.Answer) -> calls.Call:
    """What ``agent`` is asked next on its only lane, which gets ``answer``."""
    agent.sockets[1].settimeout(60.0)
    call, descriptors = calls.receive(agent.sockets[1], calls.calls)
    for one in descriptors:
        os.close(one)
    calls.send(agent.sockets[1], answer)
    return call


@pytest.mark.parametrize(
    ("master", "said"),
    [
        (
            "127.0.0.1:{free}",
            r"no Mooncake master answers at 127\.0\.0\.1:{free} \(Connection refused\); start mooncake",
        ),
        ("etcd://127.0.0.1:{free}", r"no etcd answers at 127\.0\.0\.1:{free} \(Connection refused\); start etcd"),
        ("etcd://127.0.0.1:{free};127.0.0.1:99999", "no etcd answers at"),
    ],
)
def test_who_does_not_answer_is_named(master: str, said: str) -> None:
    free = free_port()
    with pytest.raises(TierFailed, match=said.format(free=free)):
        agent_process.reach(master.format(free=free))


def test_one_server_of_an_etcd_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        agent_process.reach(f"etcd://127.0.0.1:{free_port()},127.0.0.1:{server.getsockname()[1]}")
    agent_process.reach("redis://127.0.0.1:1")  # of these its client knows more


@pytest.mark.parametrize("what", ["socket.socketpair", "subprocess.Popen"])
def test_without_a_descriptor_left_an_agent_is_not_there(
    started: list[Agent], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(f"ems.pool.tiers.cluster.agent_process.{what}", refuse)
    agents = Agents(CONFIG, secrets={}, own_place=True, replicas=1, lanes=1)
    with pytest.raises(TierFailed, match="no process can be started for Mooncake's client: Too many open files"):
        agents.call(FETCH, 60.0)
    assert not started
    agents.close()


def test_an_agent_is_told_of_segments_that_come_and_go(started: list[Agent]) -> None:
    agents = Agents(CONFIG, secrets={}, own_place=True, replicas=1, lanes=1)
    agents.keep()

    def told(places: list[FileRange]) -> list[calls.Call]:
        """What the agent is asked until the fetch has its answer."""
        heard = list[calls.Call]()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(agents.call, FETCH, 60.0, places)
            while not heard or heard[-1] != FETCH:
                heard.append(asked(started[0], calls.Answer()))
            waiting.result()
        return heard

    segments = [SegmentFile(os.memfd_create("ems-told"), 4096)]
    places = [FileRange(segments[0], 0, 4096, mapped=True)]
    assert told(places) == [calls.Attach(1, 4096, mapped=True), FETCH]
    assert told(places) == [FETCH]
    segments.clear()
    places.clear()
    assert told([]) == [calls.Detach(1), FETCH]
    assert told([]) == [FETCH]
    agents.close()


LENDS = MooncakeConfig(master_server_address="127.0.0.1:1", global_segment_size=1 << 30)
STORE = calls.Store("default/model/0", 4096, [])


def next_on(agent: Agent, lane: int) -> calls.Call:
    agent.sockets[lane].settimeout(60.0)
    return calls.receive(agent.sockets[lane], calls.calls)[0]


@pytest.mark.parametrize(("protocol", "own_place", "stores"), [("tcp", True, 0), ("tcp", False, 1), ("rdma", True, 1)])
def test_who_lends_memory_stores_where_nothing_has_to_be_sent(
    started: list[Agent], protocol: str, own_place: bool, stores: int
) -> None:
    config = msgspec.structs.replace(LENDS, protocol=protocol)
    agents = Agents(config, secrets={}, own_place=own_place, replicas=1, lanes=2)
    agents.keep()
    with ThreadPoolExecutor(1) as threads:
        for call, agent in ((STORE, started[stores]), (calls.Probe(), started[1])):
            # Who is asked second takes the next lane.
            lane = 2 if agent is started[stores] and call is not STORE else 1
            waiting = threads.submit(agents.call, call, 60.0)
            assert next_on(agent, lane) == call
            calls.send(agent.sockets[lane], calls.Answer([1]))
            assert waiting.result().codes == [1]
    agents.close()


def test_a_store_that_hangs_costs_no_memory_that_is_lent(started: list[Agent]) -> None:
    agents = Agents(LENDS, secrets={}, own_place=True, replicas=1, lanes=2)
    agents.keep()
    gives, moves = started
    with pytest.raises(TierFailed, match="did not answer within 0 s"):
        agents.call(STORE, 0.05)
    assert next_on(gives, 1) == STORE
    assert next_on(gives, 1) == calls.Cancel()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(agents.call, STORE, 60.0)
        assert next_on(moves, 1) == STORE  # the other one stores as long as it hangs
        calls.send(moves.sockets[1], calls.Answer([1]))
        assert waiting.result().codes == [1]
        calls.send(gives.sockets[1], calls.Answer([2]))  # to the first one, which nobody waits for
        waiting = threads.submit(agents.call, STORE, 60.0)
        assert next_on(gives, 2) == STORE
        calls.send(gives.sockets[2], calls.Answer([3]))
        assert waiting.result().codes == [3]
    assert [one.returncode for one in started] == [None, None]
    agents.close()


def test_a_store_that_would_wait_for_who_lends_memory_goes_by_the_other_one(started: list[Agent]) -> None:
    agents = Agents(LENDS, secrets={}, own_place=True, replicas=1, lanes=1)
    agents.keep()
    gives, moves = started
    with ThreadPoolExecutor(STORE_LANES + 1) as threads:
        storing = []
        for lane in range(1, STORE_LANES + 1):
            storing.append(threads.submit(agents.call, STORE, 60.0))
            assert next_on(gives, lane) == STORE
        storing.append(threads.submit(agents.call, STORE, 60.0))
        assert next_on(moves, 1) == STORE
        for agent, lane in ((moves, 1), *((gives, lane) for lane in range(1, STORE_LANES + 1))):
            calls.send(agent.sockets[lane], calls.Answer([lane]))
        assert [one.result().codes for one in storing] == [[1], [2], [3], [4], [1]]
    agents.close()


def test_who_lends_memory_leaves_when_what_it_stores_is_stored(started: list[Agent]) -> None:
    agents = Agents(LENDS, secrets={}, own_place=True, replicas=1, lanes=1)
    agents.keep()
    gives, moves = started
    with ThreadPoolExecutor(2) as threads:
        storing = threads.submit(agents.call, STORE, 60.0)
        assert next_on(gives, 1) == STORE
        agents.leaving = True
        leaving = threads.submit(agents.keep)
        with ThreadPoolExecutor(1) as more:
            waiting = more.submit(agents.call, STORE, 60.0)
            assert next_on(moves, 1) == STORE  # no more comes to who leaves
            calls.send(moves.sockets[1], calls.Answer([2]))
            assert waiting.result().codes == [2]
        calls.send(gives.sockets[1], calls.Answer([1]))
        assert storing.result().codes == [1]
        leaving.result(60)
    assert gives.is_left(0)
    assert not agents.gives
    agents.close()


def test_who_leaves_while_a_store_hangs_is_not_ended_for_it(
    started: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still has to take its leave of the master."""
    monkeypatch.setattr(agent_process, "LEAVE_SECONDS", 0.05)
    agents = Agents(LENDS, secrets={}, own_place=True, replicas=1, lanes=1)
    agents.keep()
    gives, waits, over = started[0], threading.Event(), threading.Event()

    def wait(_timeout: float | None = None) -> int:
        waits.set()
        over.wait(60)
        return 0

    monkeypatch.setattr(gives, "wait", wait)
    with ThreadPoolExecutor(2) as threads:
        storing = threads.submit(agents.call, STORE, 60.0)
        assert next_on(gives, 1) == STORE
        agents.leaving = True
        leaving = threads.submit(agents.keep)
        assert waits.wait(60)
        assert gives.returncode is None, "it leaves"
        assert not storing.done()
        calls.send(gives.sockets[1], calls.Answer([1]))
        assert storing.result().codes == [1]
        over.set()
        leaving.result(60)
    agents.close()


def test_a_call_that_waited_for_an_agent_ends_no_other(started: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time went by while the agent started, which is none of the agent's."""
    agents = Agents(CONFIG, secrets={}, own_place=True, replicas=1, lanes=1)
    agents.keep()
    times = itertools.chain([0.0], itertools.repeat(100.0))
    monkeypatch.setattr("ems.pool.tiers.cluster.agent_process.time.monotonic", lambda: next(times))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(agents.call, FETCH, 60.0)
        assert asked(started[0], calls.Answer([1])) == FETCH
        assert waiting.result().codes == [1]
    assert started[0].returncode is None
    agents.close()


def test_without_a_descriptor_left_nothing_is_ended(started: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    segment = SegmentFile(os.memfd_create("ems-shown"), 4096)
    monkeypatch.setattr(segment, "opened", opened)
    agents = Agents(LENDS, secrets={}, own_place=True, replicas=1, lanes=1)
    agents.keep()
    for call in (STORE, FETCH):
        with pytest.raises(TierFailed, match="Too many open files"):
            agents.call(call, 60.0, [FileRange(segment, 0, 4096, mapped=True)])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(agents.call, calls.Probe(), 60.0)
        assert next_on(started[1], 1) == calls.Probe()  # its only lane is free
        calls.send(started[1].sockets[1], calls.Answer([1]))
        assert waiting.result().codes == [1]
    assert [one.returncode for one in started] == [None, None]
    agents.close()


def test_who_lends_memory_looks_at_no_segment_through_a_mapping(started: list[Agent]) -> None:
    """A client that cuts the file of one would end it, and all that it lends."""
    agents = Agents(LENDS, secrets={}, own_place=True, replicas=1, lanes=1)
    agents.keep()
    segment = SegmentFile(os.memfd_create("ems-shown"), 4096)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(agents.call, STORE, 60.0, [FileRange(segment, 0, 4096, mapped=True)])
        assert next_on(started[0], 1) == calls.Attach(1, 4096, mapped=False)
        calls.send(started[0].sockets[1], calls.Answer())
        assert next_on(started[0], 1) == STORE
        calls.send(started[0].sockets[1], calls.Answer([1]))
        assert waiting.result().codes == [1]
    agents.close()


CLIENT = """
class MooncakeDistributedStore:
    def setup(self, *_, **__):
        return 0

    def get_hostname(self):
        return "host:1"

    def register_buffer(self, *_):
        return 0

    def batch_is_exist(self, names):
        raise KeyError("what nobody thought of")


class ReplicateConfig:
    pass
"""


@pytest.mark.process
def test_an_agent_that_fails_ends_at_once_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(CLIENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(agent_process, "reach", lambda _master: None)
    config = MooncakeConfig(master_server_address="127.0.0.1:1", global_segment_size=0)
    agents = Agents(config, secrets={}, own_place=True, replicas=1, lanes=1)
    with pytest.raises(TierFailed, match="ended in the middle of a call: KeyError: 'what nobody thought of'"):
        agents.call(calls.Exist("default/model/0", [bytes(16)]), 20.0)
    agents.close()
