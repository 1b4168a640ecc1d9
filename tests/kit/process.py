"""Server processes for tests, demonstrations and benchmarks: started, waited for, and stopped without a trace.

What always holds: a server has a session of its own, so that stopping it ends its children too, also those whose
parent died first; it dies with the thread that started it, however that ends (so start it from a thread that lives as
long as it is needed); its output goes to a file, and what that says was wrong is part of the error when it does not
come up.
"""

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

import psutil
from prometheus_client.parser import text_string_to_metric_families

from ems.errors import EmsError

LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes the server after asking the kernel for SIGTERM (15) when the starter's thread ends (PR_SET_PDEATHSIG, 1).

A program of its own and not a ``preexec_fn``: with one, Python runs hooks after the fork in which the exception of a
signal handler, Ctrl-C for one, is lost.
"""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Whatever proxy the environment names, it is not the way to this machine."""


class ProcessError(EmsError):
    """A server did not come up, went away, or gave no metrics."""


_CAUSE = re.compile(r"(\b[A-Z]\w*(Error|Exception|Refused|Unavailable)|\berror): .+")

_handed_out: set[int] = set()
_LOWEST_PORT = 10_000
_OWN_ENDS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Says which ports Linux gives to its own ends of connections."""


def free_port() -> int:
    """Return a TCP port that nobody uses at this moment; never the same one twice.

    Until it is used no connection takes it for its own end, where the system leaves ports for that.
    """
    drawn = random.SystemRandom()
    while True:
        begin = int(_OWN_ENDS.read_text().split()[0]) if _OWN_ENDS.exists() else 0
        port = drawn.randrange(_LOWEST_PORT, begin) if begin > 2 * _LOWEST_PORT else 0
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            port = int(probe.getsockname()[1])
        if port not in _handed_out:
            _handed_out.add(port)
            return port


class Running(Protocol):
    """The process of a server's front end."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...


class ServerProcess:
    """A server at ``address`` that answers ``/health`` when it is ready.

    Use it as a context manager, or call :meth:`start`, :meth:`wait_ready` and :meth:`stop`.  ``environment`` is added
    to that of this process; ``name`` is what errors call it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        port: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.name = name
        self.port = port
        self.url = f"http://{address}:{port}"
        self.log = log
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}
        self._process: Running | None = None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log, deferred_signals():  # or a process could start that nobody knows of
            self._process = self._launch(log)

    def _launch(self, log: IO[bytes]) -> Running:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid()), *self._command],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_ready(self, timeout: float = 420.0, progress: Callable[[float], None] | None = None) -> None:
        """Return when ``/health`` answers; call ``progress`` with the seconds waited about four times a second.

        Raises:
            ProcessError: the server ended, or did not answer within ``timeout`` seconds; the log says why.
        """
        started = time.monotonic()
        while not self.is_healthy():
            waited = time.monotonic() - started
            if progress is not None:
                progress(waited)
            status = self._pause(0.25)
            if status is not None:
                raise ProcessError(f"{self.name} ended with status {status} while starting: {self._cause()}")
            if waited > timeout:
                raise ProcessError(f"{self.name} was not ready after {timeout:g} s: {self._cause()}")

    def is_healthy(self) -> bool:
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            return False

    def metrics(self) -> dict[str, float]:
        """Return each sample of ``/metrics``, added up over its labels; buckets and times of creation are left out.

        Raises:
            ProcessError: the server does not answer.
        """
        return fetch_metrics(f"{self.url}/metrics")

    def processes(self) -> list[psutil.Process]:
        """Return the server's living processes: the front end, the engine, its workers."""
        return _session(self._process.pid) if self._process is not None else []

    def kill(self) -> None:
        """End all processes at once, as a crash would (SIGKILL)."""
        if self._process is None:
            return
        semaphores = set[Path]()
        while processes := self.processes():
            semaphores |= mapped_semaphores(processes)
            for process in processes:
                _send(process, signal.SIGKILL)
            self._process.poll()
            psutil.wait_procs(processes, timeout=1)
        self._process.wait()
        # Their resource tracker, which would have removed them, was killed with them.
        for semaphore in semaphores and semaphores - mapped_semaphores(psutil.process_iter()):
            semaphore.unlink(missing_ok=True)

    def ask_to_stop(self) -> None:
        """Send SIGTERM and do not wait; several servers that are asked at once need not wait for each other."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self, grace: float = 20.0) -> None:
        """End all processes: ask first, and after ``grace`` seconds do not ask."""
        if self._process is None:
            return
        self.ask_to_stop()
        self._pause(grace)
        # What is left has lost its front end and can only be ended.
        self.kill()

    def _pause(self, seconds: float) -> int | None:
        """Wait so long, or until the front end has ended; return its exit status then."""
        assert self._process is not None, "start() comes first"
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _cause(self) -> str:
        """Return the last error in the log that says more than that there was one, or else the last line."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        causes = [
            match.group() for line in lines if "See root cause above" not in line for match in _CAUSE.finditer(line)
        ]
        last = (causes or [line for line in lines if line.strip()] or ["it said nothing"])[-1].strip()
        return f"{last} (more in {self.log})"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.stop)
            self.start()
            self.wait_ready()
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Keep SIGINT, SIGTERM and SIGHUP from cutting short what must be done whole; those that came are raised after it.

    Only the main thread is ever interrupted by them, so in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for pending in dict.fromkeys(came):
        signal.raise_signal(pending)


def fetch_metrics(url: str) -> dict[str, float]:
    """Return the samples of a Prometheus page, added up over labels, without buckets and times of creation.

    Raises:
        ProcessError: the page cannot be had.
    """
    try:
        with _DIRECT.open(url, timeout=10) as answer:
            page = answer.read().decode()
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise ProcessError(f"{url} gives no metrics: {error}") from error
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def _session(leader: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return members


def mapped_semaphores(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files of Python's named semaphores that ``processes`` have mapped; of those that are gone, none.

    Who made a semaphore has it mapped by another name, so that the inode tells.
    """
    inodes = set[int]()
    for process in processes:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        inodes.update(int(line.split()[4]) for line in maps.splitlines() if "/dev/shm/sem." in line)
    return {path for path in Path("/dev/shm").glob("sem.mp-*") if _inode(path) in inodes}


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:  # it went away meanwhile
        return None


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass
