"""What a node says to its agents, and what it does when one does not answer; the agents are the test's."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from io import BytesIO
from typing import Any

import pytest

from ems.errors import TierFailed
from ems.pool.segments.segment_file import FileRange, SegmentFile
from ems.pool.tiers.answers import Outcome
from ems.pool.tiers.cluster import agent_process, calls
from ems.pool.tiers.cluster.agent_process import STORING_LANES, Agents
from ems.pool.tiers.cluster.mooncake_config import MooncakeConfig
from tests.kit.tiers import key
from tests.kit.waiting import until

PAGE = 1 << 20
PAGES_AT_ONCE = calls.COPIED_BYTES // PAGE
SOON = 0.05
LONG = 60.0


class Agent:
    """An agent's process whose sockets the test has."""

    def __init__(self, _command: list[str], *, pass_fds: list[int], **_others: object) -> None:
        self.control, *self.lanes = (socket.socket(fileno=os.dup(number)) for number in pass_fds)
        self.stderr = BytesIO()
        self.returncode: int | None = None

    def hears(self, lane: int) -> calls.Call:
        """What comes next on ``lane``, with segments taken."""
        self.lanes[lane].settimeout(LONG)
        call, descriptors = calls.receive(self.lanes[lane], calls.calls)
        for one in descriptors:
            os.close(one)
        if isinstance(call, calls.Attach):
            self.says(lane)
            return self.hears(lane)
        return call

    def says(self, lane: int, *codes: int, error: str = "") -> None:
        calls.send(self.lanes[lane], calls.Answer(list(codes), error=error))

    def is_silent(self, lane: int) -> bool:
        """Whether nothing more was said to it."""
        self.lanes[lane].settimeout(SOON)
        try:
            calls.receive(self.lanes[lane], calls.calls)
        except TimeoutError:
            return True
        return False

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, _timeout: float | None = None) -> int:
        return self.returncode or 0

    def kill(self) -> None:
        self.returncode = -9
        for one in (self.control, *self.lanes):
            one.close()


class Scene:
    """The agents of a tier that lends memory, beside a segment of forty pages."""

    def __init__(self, file: SegmentFile, threads: ThreadPoolExecutor) -> None:
        self.started: list[Agent] = []
        self._file = file
        self._threads = threads
        config = MooncakeConfig(master_server_address="127.0.0.1:1", global_segment_size=1 << 30)
        self.agents = Agents(config, key_path="", own_place=True, replicas=1, lanes=2)

    @property
    def giver(self) -> Agent:
        until(lambda: self.started, "an agent is started", LONG)
        return self.started[0]

    @property
    def mover(self) -> Agent:
        return self.started[1]

    def store(self, count: int, seconds: float = LONG) -> Future[calls.Answer]:
        number = self.agents.number(self._file)
        pages = [calls.Place(key(str(at)), number, at * PAGE) for at in range(count)]
        places = [FileRange(self._file, at * PAGE, PAGE, mapped=True) for at in range(count)]
        return self._threads.submit(self.agents.store, calls.Store("n", PAGE, pages), seconds, places)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    def popen(*args: Any, **options: Any) -> Agent:
        agent = Agent(*args, **options)
        made.started.append(agent)
        calls.send(agent.control, calls.Answer(text="host:1"))
        return agent

    monkeypatch.setattr("ems.pool.tiers.cluster.agent_process.subprocess.Popen", popen)
    monkeypatch.setattr(agent_process, "reach", lambda _master: None)
    with ExitStack() as stack:
        descriptor = os.memfd_create("ems-segment")
        os.truncate(descriptor, 40 * PAGE)
        threads = stack.enter_context(ThreadPoolExecutor(STORING_LANES))
        made = Scene(SegmentFile(descriptor, 40 * PAGE), threads)
        stack.callback(made.agents.close)
        yield made


LAST = STORING_LANES - 1
"""The lane that is used first."""


def test_pages_are_stored_when_they_were_copied(scene: Scene) -> None:
    storing = scene.store(PAGES_AT_ONCE + 1)
    for count in (PAGES_AT_ONCE, 1):
        copy = scene.giver.hears(LAST)
        assert isinstance(copy, calls.Copy)
        assert len(copy.pages) == count
        scene.giver.says(LAST)
        assert isinstance(scene.giver.hears(LAST), calls.StoreCopied)
        scene.giver.says(LAST, *[Outcome.DONE] * count)
    assert storing.result(LONG).codes == [Outcome.DONE] * (PAGES_AT_ONCE + 1)


def test_what_was_copied_too_late_is_not_stored(scene: Scene) -> None:
    storing = scene.store(1, SOON)
    assert isinstance(scene.giver.hears(LAST), calls.Copy)
    with pytest.raises(TierFailed, match="did not answer"):
        storing.result(LONG)
    scene.giver.says(LAST)
    assert scene.giver.is_silent(LAST)
    assert scene.giver.returncode is None


def test_a_lane_that_was_late_is_used_again(scene: Scene) -> None:
    late = scene.store(1, SOON)
    scene.giver.hears(LAST)
    assert late.exception(LONG) is not None
    other = scene.store(1)
    assert isinstance(scene.giver.hears(LAST - 1), calls.Copy)
    scene.giver.says(LAST)
    again = scene.store(1)
    copy_and_store(scene, LAST)
    copy_and_store(scene, LAST - 1, copied=True)
    assert again.result(LONG).codes == other.result(LONG).codes == [Outcome.DONE]


def copy_and_store(scene: Scene, lane: int, *, copied: bool = False) -> None:
    if not copied:
        assert isinstance(scene.giver.hears(lane), calls.Copy)
    scene.giver.says(lane)
    assert isinstance(scene.giver.hears(lane), calls.StoreCopied)
    scene.giver.says(lane, Outcome.DONE)


def test_where_all_who_copy_are_late_the_other_agent_stores(scene: Scene) -> None:
    for lane in reversed(range(STORING_LANES)):
        late = scene.store(1, SOON)
        scene.giver.hears(lane)
        assert late.exception(LONG) is not None
    storing = scene.store(1)
    lane = len(scene.mover.lanes) - 1
    assert isinstance(scene.mover.hears(lane), calls.Store)
    scene.mover.says(lane, Outcome.DONE)
    assert storing.result(LONG).codes == [Outcome.DONE]


def test_a_host_that_leaves_stores_by_the_other_agent(scene: Scene) -> None:
    scene.agents.leaving = True
    storing = scene.store(1)
    until(lambda: scene.started, "the agent that moves is started", LONG)
    (mover,) = scene.started
    assert isinstance(mover.hears(len(mover.lanes) - 1), calls.Store)
    mover.says(len(mover.lanes) - 1, Outcome.DONE)
    assert storing.result(LONG).codes == [Outcome.DONE]


@pytest.mark.parametrize("copied", [False, True])
def test_who_lends_says_why_and_stays(scene: Scene, *, copied: bool) -> None:
    storing = scene.store(1)
    assert isinstance(scene.giver.hears(LAST), calls.Copy)
    if copied:
        scene.giver.says(LAST)
        scene.giver.hears(LAST)
    scene.giver.says(LAST, error="Mooncake did not take pages (-900)")
    with pytest.raises(TierFailed, match="-900"):
        storing.result(LONG)
    again = scene.store(1)
    copy_and_store(scene, LAST)
    assert again.result(LONG).codes == [Outcome.DONE]


def test_who_lends_and_ends_meanwhile_is_started_again(scene: Scene) -> None:
    storing = scene.store(1)
    assert isinstance(scene.giver.hears(LAST), calls.Copy)
    scene.giver.kill()
    with pytest.raises(TierFailed, match="ended in the middle"):
        storing.result(LONG)
    again = scene.store(1)
    until(lambda: len(scene.started) == 4, "both are started again", LONG)
    del scene.started[:2]
    copy_and_store(scene, LAST)
    assert again.result(LONG).codes == [Outcome.DONE]
