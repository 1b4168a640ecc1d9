"""The agents of one tier as the node sees them: started, asked, killed when they do not answer, started again.

What always holds: every call ends, in time; after a call that failed, or after which bytes might still arrive, the
agent is dead before anybody may use that memory again, or reads only, and stores nothing it read after that.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import structlog

from ems.errors import ProtocolError, TierFailed
from ems.pool.segments.segment_file import FileRange, SegmentFile
from ems.pool.tiers.cluster import calls
from ems.pool.tiers.cluster.mooncake_config import MooncakeConfig

START_SECONDS = 15.0
LEND_RATE = 4e9  # bytes lent for which the start may take a second more: for RDMA the first part is touched before
LEAVE_SECONDS, CANCEL_SECONDS = 3.5, 1.0
DRAIN_SECONDS = 12.0  # where nothing hurries: longer than what is being stored may take
BEAT_SECONDS = 10.0
"""How long an agent that lends memory may be silent: so long the master waits for it, too."""
STORE_LANES = 4
"""Of an agent that lends memory: more stores at once go by the other one."""
PACE_SECONDS = 1.0
"""From the start of one agent that moves pages to the next: what ends them may come again at once."""
REACH_SECONDS = 2.0
"""How long a master may take to take a connection."""
_LOG_LINES = 40
_GLOG = re.compile(r"[EF]\d{4} \S+\s+\d+ \S+\] (.*)")
_VERSIONS = re.compile(r"version", re.IGNORECASE)

_log = structlog.get_logger("ems.tier")


def reach(master: str) -> None:
    """Raises TierFailed: nobody answers at ``master``, or none of the etcd that knows it."""
    kind, _, named = master.rpartition("://")
    reason = ""
    for server in named.replace(";", ",").split(",") if kind in {"", "etcd"} else ():
        host, _, port = server.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
        except (OSError, OverflowError) as error:  # the latter for a port that is none
            reason = getattr(error, "strerror", str(error)) or "it took too long"
        else:
            return
    if reason:
        who, start = ("etcd", "etcd") if kind else ("Mooncake master", "mooncake_master")
        raise TierFailed(
            f"no {who} answers at {named} ({reason}); start {start} there or correct master_server_address"
        )


class AgentProcess:
    """One agent, which becomes what ``start`` says; ``lanes`` threads of it answer.  Raises TierFailed: it did not."""

    def __init__(self, start: calls.Start, lanes: int) -> None:
        self.gives = start.gives
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            pairs += (socket.socketpair() for _ in range(lanes + 1))
            numbers = [their.fileno() for _, their in pairs]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ems.pool.tiers.cluster.agent", *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, "GLOG_minloglevel": "1"},
                start_new_session=True,
            )
        except OSError as error:
            for one in itertools.chain(*pairs):
                one.close()
            raise TierFailed(f"no process can be started for Mooncake's client: {error.strerror}") from error
        for _, their in pairs:
            their.close()
        self._control, *self._lanes = [ours for ours, _ in pairs]
        self.free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for lane in self._lanes:
            self.free.put(lane)
        self._late: list[socket.socket] = []
        """Lanes whose answers nobody waits for any more."""
        self.ended_by: calls.Call | None = None
        """The call that went wrong, for which it was ended."""
        self.attached: set[int] = set()
        self.lock = threading.Lock()
        """Around what is attached."""
        self._said: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self._reader = threading.Thread(target=self._listen, name="ems-cluster-log", daemon=True)
        self._reader.start()
        try:
            self.hostname = self._begin(start)
        except BaseException:
            self.kill()
            raise

    def _begin(self, start: calls.Start) -> str:
        self._control.settimeout(seconds := START_SECONDS + start.gives * start.config.global_segment_size / LEND_RATE)
        try:
            calls.send(self._control, start)
            answer, _ = calls.receive(self._control, calls.answers)
        except TimeoutError as error:
            raise TierFailed(
                f"Mooncake's client did not start within {seconds:.0f} s, does a master answer at "
                f"{start.config.master_server_address}?{self._why()}"
            ) from error
        except (EOFError, OSError, ProtocolError) as error:
            self._process.wait()
            self._reader.join(1.0)
            raise TierFailed(f"Mooncake's client ended when it started{self._why()}") from error
        if answer.error:  # some say what to do
            raise TierFailed(answer.error if "; " in answer.error else answer.error + self._why())
        return answer.text

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._said.append(line.decode(errors="replace").rstrip())

    def defect(self) -> str:
        """What a defect of the agent, which has ended, was, as the end of a sentence; nothing for other ends."""
        self._reader.join(1.0)
        last = self._said[-1] if self._said else ""
        return f": {last}" if "Error: " in last and not _GLOG.match(last) else ""

    def _why(self) -> str:
        """What Mooncake said last that tells why, as the end of a sentence."""
        said = [found[1] for line in list(self._said) if (found := _GLOG.match(line))]
        said = said or [line for line in self._said if "Error" in line]
        telling = [line for line in said if _VERSIONS.search(line)]
        if telling:
            return f": {telling[-1]}; install the same release of Mooncake on all hosts and the master"
        return f": {said[-1][:300]}" if said else ""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def beats(self) -> bool:
        """Whether it still does something: it sends back what it is sent, in time."""
        try:
            self._control.settimeout(BEAT_SECONDS)
            self._control.send(b"?")
            return self._control.recv(1) == b"?"
        except OSError:
            return False

    def cancel(self, lane: socket.socket, *, sent: bool) -> None:
        """Nobody waits for the answer that comes on ``lane``, of a call that writes into no segment.

        Where that was not ``sent`` whole, or this cannot be, the lane ends, which says the same.
        """
        with contextlib.suppress(OSError):
            lane.settimeout(CANCEL_SECONDS)
            if sent:
                calls.send(lane, calls.Cancel())
                self._late.append(lane)
                return
        self._lanes.remove(lane)
        lane.close()

    def is_late(self) -> bool:
        """Whether the answer of a call that was given up has not come; the lane is free again when it has."""
        for lane in list(self._late):
            # ValueError: another thread has seen the answer, too, or closed the lane.
            with contextlib.suppress(EOFError, OSError, ProtocolError, ValueError):
                if calls.readable(lane, 0.0):
                    self._late.remove(lane)
                    calls.receive(lane, calls.answers)
                    self.free.put(lane)
        return bool(self._late)

    def kill(self) -> None:
        """End it now; when this returns it touches nothing any more."""
        self._process.kill()
        self._process.wait()
        for one in (self._control, *self._lanes):
            # Whoever waits for an answer there sees the end at once.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def leave(self, seconds: float) -> None:
        """Have it take leave of the cluster, for so long at most, after as long at most for the calls under way."""
        ends = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            for _ in range(len(self._lanes) - len(self._late)):
                self.free.get(timeout=max(ends - time.monotonic(), 0.0))
        for one in (self._control, *self._lanes):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_WR)  # who still waits for an answer is not to take this for its death
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()


class Agents:
    """The agents of a tier: one that gives memory where ``config`` says so, and one that moves pages.

    The first one also stores where that is a copy, a third of the processor's work for the way by TCP from the second
    one to it.  Calls from several threads; each may start an agent that is not there.
    """

    def __init__(
        self, config: MooncakeConfig, *, secrets: Mapping[str, bytes], own_place: bool, replicas: int, lanes: int
    ) -> None:
        self._start = calls.Start(config, False, dict(secrets), own_place, replicas=replicas)
        self._lane_count = lanes
        self._store_lanes = STORE_LANES if own_place and config.protocol == "tcp" else 0
        self._lock = threading.Lock()
        self._giver: AgentProcess | None = None
        self._mover: AgentProcess | None = None
        self._closing = threading.Event()
        self._may_start = 0.0
        """When the next agent that moves pages may start."""
        self._numbers: weakref.WeakKeyDictionary[SegmentFile, int] = weakref.WeakKeyDictionary()
        self._next_number = itertools.count(1)
        self._silent: dict[str, float] = {}
        """Hosts that did not answer when the last agent that moved pages had to be ended for it."""
        self.starts = 0
        self.leaving = False
        """Whether this host is to lend nothing any more."""

    @property
    def gives(self) -> bool:
        return self._giver is not None

    def keep(self) -> None:
        """See to it that those agents are there that are to be.  Raises TierFailed: one cannot be started."""
        with self._lock:
            giver = self._giver
        # It may take long, and nobody waits for it.
        if giver is not None and self.leaving:
            giver.leave(DRAIN_SECONDS)
            with self._lock:
                self._giver = None
        elif giver is not None and giver.alive and not giver.beats():
            _log.warning("Mooncake's client that lends memory hangs and is started again")
            giver.kill()
        self._running()

    def _running(self) -> AgentProcess:
        with self._lock:
            if self._closing.is_set():
                raise TierFailed("the node stops")
            config = self._start.config
            if config.global_segment_size and not self.leaving and (self._giver is None or not self._giver.alive):
                reach(config.master_server_address)
                if self._giver is not None:
                    _log.warning("Mooncake's client that lends memory has ended and is started again")
                    self._giver.kill()  # its sockets are closed
                    self._giver = None
                self._giver = AgentProcess(msgspec.structs.replace(self._start, gives=True), self._store_lanes)
                self._end_mover()  # it prefers memory that is gone
            if self._mover is None or not self._mover.alive:
                self._end_mover()
                if self._closing.wait(max(self._may_start - time.monotonic(), 0.0)):
                    raise TierFailed("the node stops")
                self._may_start = time.monotonic() + PACE_SECONDS
                reach(config.master_server_address)
                own = self._giver.hostname if self._giver is not None else ""
                silent, self._silent = self._silent, {}
                start = msgspec.structs.replace(self._start, own=own, silent=silent)
                self._mover = AgentProcess(start, self._lane_count)
                self.starts += 1
            return self._mover

    def _end_mover(self) -> None:
        if self._mover is not None:
            self._mover.kill()
            self._mover = None

    def call(self, call: calls.Call, seconds: float, places: Sequence[FileRange] = ()) -> calls.Answer:
        """What came of ``call``, which names the segments of ``places`` as :meth:`number` does.

        Where another call had the agent ended meanwhile, it is made again while there is time: nothing is wrong with
        what it asks for then.

        Raises TierFailed: it did not work; what it did is undone or has ended.
        """
        ends = time.monotonic() + seconds
        while True:
            agent, lane = self._lane(call, seconds)
            try:
                return self._ask(agent, lane, call, seconds, places)
            except TierFailed:
                seconds = ends - time.monotonic()
                if agent.ended_by is None or agent.ended_by is call or seconds <= 0:
                    raise

    def _lane(self, call: calls.Call, seconds: float) -> tuple[AgentProcess, socket.socket]:
        """A lane for ``call``, of the agent that is to do it; a store that would wait for one goes by the other."""
        mover, giver = self._running(), self._giver
        if isinstance(call, calls.ShareHot) and mover.is_late():
            raise TierFailed("the host with the list of hot pages does not answer")
        try:
            if isinstance(call, calls.Store) and giver is not None and not self.leaving and not giver.is_late():
                with contextlib.suppress(queue.Empty):
                    return giver, giver.free.get_nowait()
            return mover, mover.free.get(timeout=seconds)
        except queue.Empty:
            raise TierFailed(f"all of the cluster's lanes were busy for {seconds:.0f} s") from None

    def _ask(
        self, agent: AgentProcess, lane: socket.socket, call: calls.Call, seconds: float, places: Sequence[FileRange]
    ) -> calls.Answer:
        sent = False
        try:
            lane.settimeout(seconds)
            self._settle(agent, lane, places)
            calls.send(lane, call)
            sent = True
            answer = calls.receive(lane, calls.answers)[0]
        except TierFailed:  # before anything was asked
            agent.free.put(lane)
            raise
        except TimeoutError as error:
            if agent.gives or (sent and isinstance(call, calls.ShareHot)):
                agent.cancel(lane, sent=sent)
            else:
                self._fail(agent, call)
            raise TierFailed(f"the cluster did not answer within {seconds:.0f} s") from error
        except (EOFError, OSError, ProtocolError) as error:
            self._fail(agent)
            raise TierFailed(f"Mooncake's client ended in the middle of a call{agent.defect()}") from error
        if answer.unsafe:
            self._silent = answer.silent
            self._fail(agent, call)
        else:
            agent.free.put(lane)
        if answer.error:
            reach(self._start.config.master_server_address)  # where nobody answers, that says more
            raise TierFailed(answer.error)
        return answer

    def _fail(self, agent: AgentProcess, call: calls.Call | None = None) -> None:
        agent.ended_by = agent.ended_by or call
        agent.kill()
        with self._lock:
            if self._mover is agent:
                self._mover = None

    def number(self, file: SegmentFile) -> int:
        """What agents call the segment of ``file``."""
        with self._lock:
            return self._numbers.setdefault(file, next(self._next_number))

    def _settle(self, agent: AgentProcess, lane: socket.socket, places: Iterable[FileRange]) -> None:
        """Have the agent know the segments of ``places``, and no longer those that are gone."""
        with agent.lock:
            with self._lock:
                gone = agent.attached.difference(self._numbers.values())
            for number in gone:
                _exchange(lane, calls.Detach(number))
                agent.attached.discard(number)
            for place in {id(one.file): one for one in places}.values():
                number = self.number(place.file)
                if number not in agent.attached:
                    try:
                        descriptor = place.file.opened()
                    except OSError as error:
                        raise TierFailed(f"a segment cannot be shown to Mooncake's client: {error.strerror}") from error
                    try:
                        mapped = place.mapped and not agent.gives  # what is cut would end it, and all that it lends
                        answer = _exchange(lane, calls.Attach(number, place.file.size, mapped), descriptor)
                    finally:
                        os.close(descriptor)
                    if answer.error:
                        raise (TierFailed if agent.gives else ProtocolError)(answer.error)
                    agent.attached.add(number)

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            giver, self._giver = self._giver, None
            self._end_mover()
        if giver is not None:
            giver.leave(LEAVE_SECONDS)


def _exchange(lane: socket.socket, call: calls.Call, descriptor: int | None = None) -> calls.Answer:
    calls.send(lane, call, descriptor)
    return calls.receive(lane, calls.answers)[0]
