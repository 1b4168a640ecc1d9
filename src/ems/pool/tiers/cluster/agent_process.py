"""The agents of one tier as the node sees them: started, asked, killed when they do not answer, started again.

What always holds: every call ends, in time; after a call that failed, or after which bytes might still arrive, the
agent is dead before anybody may use that memory again.  Only who lends memory lives on, or all that lies there would go
with it: it never writes into segments, and stores what it copied only when it is told that it copied in time.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import re
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import msgspec
import structlog

from ems.errors import ProtocolError, TierFailed
from ems.pool.segments.segment_file import FileRange, SegmentFile
from ems.pool.tiers.cluster import calls
from ems.pool.tiers.cluster.mooncake_config import MooncakeConfig

START_SECONDS = 15.0
LEAVE_SECONDS = 2.5
BEAT_SECONDS = 10.0
"""How long an agent that lends memory may be silent: so long the master waits for it, too."""
REACH_SECONDS = 2.0
"""How long a master may take to take a connection."""
STORING_LANES = 6
"""Of who lends memory: as many as a tier has writers at most, and two in place of those that are late."""
_LEAST_SECONDS = 0.001
_LOG_LINES = 40
_GLOG = re.compile(r"[EF]\d{4} \S+\s+\d+ \S+\] (.*)")
_VERSIONS = re.compile(r"version", re.IGNORECASE)

_log = structlog.get_logger("ems.tier")


def reach(master: str) -> None:
    """Raises TierFailed: nobody answers at ``master``; with a standby its client finds out itself."""
    if "://" in master:
        return
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise TierFailed(
            f"no Mooncake master answers at {master} ({error.strerror or 'it took too long'}); start mooncake_master "
            "there or correct master_server_address"
        ) from error


class AgentProcess:
    """One agent, which becomes what ``start`` says; ``lanes`` threads of it answer.  Raises TierFailed: it did not."""

    def __init__(self, start: calls.Start, lanes: int) -> None:
        pairs = [socket.socketpair() for _ in range(lanes + 1)]
        self._control, *self._lanes = [ours for ours, _ in pairs]
        theirs = [their for _, their in pairs]
        self.free: queue.LifoQueue[socket.socket] = queue.LifoQueue()
        """The one that was used last comes first: each has memory that it copies to."""
        for lane in self._lanes:
            self.free.put(lane)
        self._late: list[socket.socket] = []
        """Lanes whose answers nobody waits for any more."""
        self.attached: set[int] = set()
        self.maps = not start.gives
        """Whether it looks at segments through a mapping, where it may."""
        self.lock = threading.Lock()
        """Around what is attached."""
        self._late_lock = threading.Lock()
        numbers = [one.fileno() for one in theirs]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ems.pool.tiers.cluster.agent", *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "GLOG_minloglevel": "1"},
            start_new_session=True,
        )
        for their in theirs:
            their.close()
        self._said: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self._reader = threading.Thread(target=self._listen, name="ems-cluster-log", daemon=True)
        self._reader.start()
        try:
            self.hostname = self._begin(start)
        except BaseException:
            self.kill()
            raise

    def _begin(self, start: calls.Start) -> str:
        self._control.settimeout(START_SECONDS)
        try:
            calls.send(self._control, start)
            answer, _ = calls.receive(self._control, calls.answers)
        except TimeoutError as error:
            raise TierFailed(f"Mooncake's client did not start within {START_SECONDS:.0f} s{self._why()}") from error
        except (EOFError, OSError, ProtocolError) as error:
            self._process.wait()
            self._reader.join(1.0)
            raise TierFailed(f"Mooncake's client ended when it started{self._why()}") from error
        if answer.error:
            raise TierFailed(answer.error + self._why())
        return answer.text

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.decode(errors="replace").rstrip())

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

    def give_up(self, lane: socket.socket) -> None:
        """Nobody waits for the answer that comes on ``lane``; for a call that writes into no memory of segments."""
        with self._late_lock:
            if lane.fileno() >= 0:
                self._late.append(lane)

    def is_late(self) -> bool:
        """Whether an answer of a call that was given up has not come; the lanes of those that have are free again."""
        with self._late_lock:
            for lane in select.select(self._late, [], [], 0)[0]:
                self._late.remove(lane)
                with contextlib.suppress(EOFError, OSError, ProtocolError):
                    calls.receive(lane, calls.answers)
                    self.free.put(lane)
            return bool(self._late)

    def take_lane(self) -> socket.socket | None:
        """One that is free now."""
        self.is_late()
        try:
            return self.free.get_nowait()
        except queue.Empty:
            return None

    def kill(self) -> None:
        """End it now; when this returns it touches nothing any more."""
        self._process.kill()
        self._process.wait()
        self._close()

    def leave(self, seconds: float) -> None:
        """Have it take leave of the cluster, for so long at most."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()

    def _close(self) -> None:
        with self._late_lock:
            self._late.clear()
            for one in (self._control, *self._lanes):
                # Whoever waits for an answer there sees the end at once.
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()


class Agents:
    """The agents of a tier: one that gives memory where ``config`` says so, and one that moves pages.

    Calls from several threads; each may start an agent that is not there.
    """

    def __init__(self, config: MooncakeConfig, *, key_path: str, own_place: bool, replicas: int, lanes: int) -> None:
        self._start = calls.Start(config, gives=False, key_path=key_path, replicas=replicas, own_place=own_place)
        # Mooncake copies within a process only where all is TCP; other transports read memory by themselves.
        self._giver_lanes = STORING_LANES if own_place and config.protocol == "tcp" else 0
        self._lane_count = lanes
        self._lock = threading.Lock()
        self._giver: AgentProcess | None = None
        self._mover: AgentProcess | None = None
        self._closed = False
        self._numbers: weakref.WeakKeyDictionary[SegmentFile, int] = weakref.WeakKeyDictionary()
        self._last_number = 0
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
            giver.leave(LEAVE_SECONDS)
            with self._lock:
                self._giver = None
        elif giver is not None and giver.alive and not giver.beats():
            _log.warning("Mooncake's client that lends memory hangs and is started again")
            giver.kill()
        self._running()

    def _running(self) -> AgentProcess:
        with self._lock:
            if self._closed:
                raise TierFailed("the node stops")
            config = self._start.config
            if config.global_segment_size and not self.leaving and (self._giver is None or not self._giver.alive):
                reach(config.master_server_address)
                if self._giver is not None:
                    self._giver.kill()
                    self._giver = None
                self._giver = AgentProcess(msgspec.structs.replace(self._start, gives=True), self._giver_lanes)
                self._end_mover()  # it prefers memory that is gone
            if self._mover is None or not self._mover.alive:
                self._end_mover()
                reach(config.master_server_address)
                own = self._giver.hostname if self._giver is not None else ""
                self._mover = AgentProcess(msgspec.structs.replace(self._start, own=own), self._lane_count)
                self.starts += 1
            return self._mover

    def _end_mover(self) -> None:
        if self._mover is not None:
            self._mover.kill()
            self._mover = None

    def call(self, call: calls.Call, seconds: float, places: Sequence[FileRange] = ()) -> calls.Answer:
        """What came of ``call``, which names the segments of ``places`` as :meth:`number` does.

        Raises TierFailed: it did not work; what it did is undone or has ended.
        """
        mover = self._running()
        spares = isinstance(call, calls.ShareHot)
        if spares and mover.is_late():
            raise TierFailed("the host with the list of hot pages does not answer")
        try:
            lane = mover.free.get(timeout=seconds)
        except queue.Empty:
            raise TierFailed(f"all of the cluster's lanes were busy for {seconds:.0f} s") from None

        def ask() -> calls.Answer:
            lane.settimeout(seconds)
            self._settle(mover, lane, places)
            return _exchange(lane, call)

        return self._asked(mover, lane, ask, seconds, survives=spares)

    def store(self, call: calls.Store, seconds: float, places: Sequence[FileRange]) -> calls.Answer:
        """Have pages stored: by who lends memory, for whom that is a copy, or where it cannot by who moves pages.

        Raises TierFailed: it did not work; what was copied in time may still be stored, nothing else.
        """
        self._running()
        giver = None if self.leaving else self._giver
        lane = None if giver is None else giver.take_lane()
        if giver is None or lane is None:
            return self.call(call, seconds, places)
        until = time.monotonic() + seconds
        codes: list[int] = []

        def exchange(one: calls.Call) -> calls.Answer:
            lane.settimeout(max(until - time.monotonic(), _LEAST_SECONDS))
            return _exchange(lane, one)

        def ask() -> calls.Answer:
            lane.settimeout(seconds)
            self._settle(giver, lane, places)
            most = calls.copied_at_once(call.size)
            for start in range(0, len(call.pages), most):
                answer = exchange(calls.Copy(call.namespace, call.size, call.pages[start : start + most]))
                if not answer.error:
                    answer = exchange(calls.StoreCopied())
                if answer.error:
                    return answer
                codes.extend(answer.codes)
            return calls.Answer(codes)

        return self._asked(giver, lane, ask, seconds, survives=True)

    def _asked(
        self,
        agent: AgentProcess,
        lane: socket.socket,
        ask: Callable[[], calls.Answer],
        seconds: float,
        *,
        survives: bool,
    ) -> calls.Answer:
        """What ``ask`` hears on ``lane``; an agent that ``survives`` is not ended for what did not come."""
        try:
            answer = ask()
        except (EOFError, OSError, ProtocolError) as error:
            if survives:
                agent.give_up(lane)
            else:
                self._fail(agent)
            if isinstance(error, TimeoutError):
                raise TierFailed(f"the cluster did not answer within {seconds:.0f} s") from error
            raise TierFailed("Mooncake's client ended in the middle of a call") from error
        if answer.unsafe:
            self._fail(agent)
        else:
            agent.free.put(lane)
        if answer.error:
            raise TierFailed(answer.error)
        return answer

    def _fail(self, mover: AgentProcess) -> None:
        mover.kill()
        with self._lock:
            if self._mover is mover:
                self._mover = None

    def number(self, file: SegmentFile) -> int:
        """What agents call the segment of ``file``."""
        with self._lock:
            if (number := self._numbers.get(file)) is None:
                self._last_number = number = self._last_number + 1
                self._numbers[file] = number
            return number

    def _settle(self, agent: AgentProcess, lane: socket.socket, places: Iterable[FileRange]) -> None:
        """Have the agent know the segments of ``places``, and no longer those whose files nobody needs any more."""
        with agent.lock:
            with self._lock:
                needed = set(self._numbers.values())
            for number in agent.attached - needed:
                _exchange(lane, calls.Detach(number))
                agent.attached.discard(number)
            for place in {id(one.file): one for one in places}.values():
                number = self.number(place.file)
                if number not in agent.attached:
                    descriptor = place.file.opened()
                    try:
                        attach = calls.Attach(number, place.file.size, place.mapped and agent.maps)
                        answer = _exchange(lane, attach, descriptor)
                    finally:
                        os.close(descriptor)
                    if answer.error:
                        raise ProtocolError(answer.error)
                    agent.attached.add(number)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            mover, giver = self._mover, self._giver
            self._mover = self._giver = None
        if mover is not None:
            mover.kill()
        if giver is not None:
            giver.leave(LEAVE_SECONDS)


def _exchange(lane: socket.socket, call: calls.Call, descriptor: int | None = None) -> calls.Answer:
    calls.send(lane, call, descriptor)
    answer, _ = calls.receive(lane, calls.answers)
    return answer
