"""The process that users start: it forks workers, passes on what they say, and starts again those that end.

It forks because workers then have the socket that listens, the settings and all modules at once.  It has one thread and
never an event loop, so that a fork has all of it.

What always holds: a worker that ends is followed by another one within a bounded time (:mod:`.restarts`), until the
router is told to stop; no worker makes the parent wait.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ems.router.workers import messages
from ems.router.workers.messages import Change, decode
from ems.router.workers.restarts import Restarts

_NAMES = {one.value: one.name for one in signal.Signals}  # those of real time have none
_SIGNALS = (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_GRACE_SECONDS = 10.0  # beyond the time for draining
_BUFFER = 4 << 20  # the system may give less


class Post(NamedTuple):
    """What a worker begins with."""

    number: int
    socket: socket.socket
    changes: dict[str, Change]
    """The last change of each instance that came or went before, of that one alone."""


class _Worker(msgspec.Struct, eq=False):
    number: int
    pid: int
    socket: socket.socket
    started: float
    serves: bool = False
    kept: deque[bytes] = msgspec.field(default_factory=deque)
    """Packets that it must not miss, and has no room for."""


class Parent:
    """One for a router; ``tell`` writes a line to stderr."""

    def __init__(self, count: int, drain_timeout: float, tell: Callable[[str], None]) -> None:
        self._count = count
        self._drain_timeout = drain_timeout
        self._tell = tell
        self._workers: dict[int, _Worker] = {}
        self._due = {0: 0.0}
        """When workers that do not run are started; the others follow when the first one serves."""
        self._restarts = Restarts(count)
        self._changes: dict[str, Change] = {}
        self._selector = selectors.PollSelector()  # nothing of it is in the kernel, which a fork would share
        self._signals, self._signalling = socket.socketpair()
        self._arrived: list[int] = []
        """Signals; of bytes on the sockets for them some may be lost, when there is no room."""
        self._buffer = memoryview(bytearray(messages.LARGEST))
        self._began = self._announced = False
        self._kill_at = float("inf")
        """Set when the router is told to stop."""
        self._status = 0

    def run(self, listener: socket.socket) -> Post | int:
        """Return in each worker what it begins with; in the parent, when all have ended, the exit status."""
        for end in (self._signals, self._signalling):
            end.setblocking(False)
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: self._arrived.append(number))
        signal.set_wakeup_fd(self._signalling.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._signals, selectors.EVENT_READ)
        while self._workers or self._due:
            now = time.monotonic()
            for due in [due for due, at in self._due.items() if at <= now]:
                if (post := self._start(due, now)) is not None:
                    return post
            self._wait(min(self._kill_at, *self._due.values(), now + 60.0) - now, listener)
            if self._kill_at <= time.monotonic():
                self._kill_at += 1.0
                self._signal(signal.SIGKILL)
        return self._status

    def _wait(self, seconds: float, listener: socket.socket) -> None:
        for key, _ in self._selector.select(max(seconds, 0.0)):
            if key.data is None:
                self._signals.recv(4096)
                arrived, self._arrived = self._arrived, []
                for number in dict.fromkeys(arrived):
                    self._signalled(number, listener)
            elif key.data in self._workers.values():  # else a signal just said that it has ended
                self._pass_on(key.data)

    def _start(self, number: int, now: float) -> Post | None:
        del self._due[number]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        ends: tuple[socket.socket, ...] = ()
        try:
            ends = mine, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
            for end in ends:
                end.setblocking(False)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for end in ends:
                end.close()
            self._again(number, f"cannot be started: {error.strerror}")
            return None
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            its.close()
            self._workers[number] = _Worker(number, pid, mine, now)
            self._selector.register(mine, selectors.EVENT_READ, self._workers[number])
            return None
        signal.set_wakeup_fd(-1)
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN if one == signal.SIGHUP else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # With the parent's end of a socket a worker would not see that the parent is gone.
        for end in (mine, self._signals, self._signalling, *(worker.socket for worker in self._workers.values())):
            end.close()
        return Post(number, its, self._changes)

    def _signalled(self, number: int, listener: socket.socket) -> None:
        if number == signal.SIGCHLD:
            for worker in list(self._workers.values()):
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    self._ended(worker, os.waitstatus_to_exitcode(status))
        elif number == signal.SIGHUP:
            self._signal(signal.SIGHUP)
        elif self._kill_at == float("inf"):
            self._kill_at = time.monotonic() + self._drain_timeout + _GRACE_SECONDS
            self._due.clear()
            listener.close()
            self._signal(signal.SIGTERM)
        else:
            self._signal(signal.SIGUSR1)

    def _signal(self, number: int) -> None:
        for worker in self._workers.values():
            os.kill(worker.pid, number)

    def _ended(self, worker: _Worker, status: int) -> None:
        number = worker.number
        del self._workers[number]
        if worker.socket in self._selector.get_map():
            self._selector.unregister(worker.socket)
        worker.socket.close()
        for other in self._workers.values():
            self._send(other, bytes((number,)), keep=True)
        if self._kill_at < float("inf"):
            return
        if not self._began and status > 0:  # it has said why
            self._status = status
            return
        how = (
            f"was ended by {_NAMES.get(-status, f'signal {-status}')}" if status < 0 else f"ended with status {status}"
        )
        self._again(number, how, time.monotonic() - worker.started)

    def _again(self, number: int, how: str, lasted: float = 0.0) -> None:
        """Have another worker started, unless there never was one; later when those before did not last."""
        if not self._began:
            self._status = 1
            self._tell(f"error: Worker {number} {how}")
            return
        delay = self._restarts.delay(number, lasted)
        self._due[number] = time.monotonic() + delay
        self._tell(f"Worker {number} {how}; another one is started {f'in {delay:g} s' if delay else 'now'}")

    def _pass_on(self, worker: _Worker) -> None:
        try:
            size = worker.socket.recv_into(self._buffer)
        except ConnectionError:
            size = 0
        if not size:  # it ends, and a signal says when it has
            self._selector.unregister(worker.socket)
            return
        end, body = self._buffer[0], self._buffer[1:size]
        packet = bytes((worker.number,)) + body
        if end == messages.PARENT:
            self._serves(worker, bytes(body).decode())
        elif end == messages.EVERYONE:
            change = decode(body)
            assert isinstance(change, Change)
            for one in change.addresses:
                self._changes[f"{change.role} {one}"] = msgspec.structs.replace(change, addresses=[one])
        for other in list(self._workers.values()):
            if end in (other.number, messages.EVERYONE) or (end == messages.OTHERS and other is not worker):
                self._send(other, packet, keep=end == messages.EVERYONE)

    def _serves(self, worker: _Worker, words: str) -> None:
        worker.serves = True
        if not self._began and self._kill_at == float("inf"):
            self._began = True
            self._due |= dict.fromkeys(range(1, self._count), 0.0)
        if not self._announced and sum(one.serves for one in self._workers.values()) == self._count:
            self._announced = True
            self._tell(words)

    def _send(self, worker: _Worker, packet: bytes, *, keep: bool = False) -> None:
        worker.kept.append(packet)
        try:
            while worker.kept:
                worker.socket.send(worker.kept[0])
                worker.kept.popleft()
        except BlockingIOError:
            if not keep:
                worker.kept.pop()
        except OSError:  # it ends
            worker.kept.clear()
