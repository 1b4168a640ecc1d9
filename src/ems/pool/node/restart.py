"""How a node becomes the installed release: it restarts in its own process, with its sockets and its folder kept open.

What always holds: the new release said before that it can start with the node's own arguments and understands its
segments; clients that hold something get a bounded time to finish; nobody else can have the folder or the sockets in
between, and whoever connects meanwhile waits in the queue of the socket.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
import structlog

from ems.errors import PoolRefused
from ems.pool.layout import FORMAT_VERSION

CHECK_SECONDS = 60.0
"""How long the new release may take to say that it can start: a busy machine is no reason to stay behind."""
PATIENCE_SECONDS = 1.0
"""How long clients may take to finish what they have begun; a load of a request takes milliseconds."""
LOOK_SECONDS = 0.005
"""Between two looks whether they have."""
_VARIABLE = "EMS_KEPT_OPEN"

_log = structlog.get_logger("ems.node")


class Check(msgspec.Struct, frozen=True):
    """What a release says that could start (``ems node --check``): its name, the format of its segments."""

    release: str
    format: int


class KeptOpen(msgspec.Struct, frozen=True):
    """What the process ``pid`` keeps open for the release that it becomes, and what no file says of its pool."""

    pid: int
    lock: int
    listener: int
    http: int | None
    directory: str
    socket: str
    size: int
    """Bytes of the pool: it may have been resized since it started."""
    draining: bool
    segment_size: int = 0

    @property
    def descriptors(self) -> list[int]:
        """The lock of the folder, the socket of clients, the HTTP server's if there is one."""
        return [one for one in (self.lock, self.listener, self.http) if one is not None]


def kept_open() -> KeptOpen | None:
    """What an earlier release in this very process kept open; None in a process that was started as usual."""
    raw = os.environ.pop(_VARIABLE, "")
    if not raw:
        return None
    try:
        kept = msgspec.json.decode(raw, type=KeptOpen)
    except msgspec.MsgspecError:
        return None
    if kept.pid != os.getpid():
        return None  # the environment was passed on to another process
    for descriptor in kept.descriptors:
        os.set_inheritable(descriptor, False)
    return kept


def _command() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]


def become(kept: KeptOpen) -> NoReturn:
    """Start again in this process, with the same arguments and whatever release is installed by now.

    Raises OSError: the interpreter cannot be run any more.
    """
    for descriptor in kept.descriptors:
        os.set_inheritable(descriptor, True)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the new release listens to it
    command = _command()
    environment = {**os.environ, _VARIABLE: msgspec.json.encode(kept).decode()}
    os.execve(command[0], command, environment)  # noqa: S606 - no shell: it is this very process


def check(command: Sequence[str] | None = None) -> Check:
    """Ask the installed release whether it could start as this process was started.

    Raises PoolRefused: it could not, and why.
    """
    try:
        done = subprocess.run(
            [*(command or _command()), "--check"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=CHECK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _goes_on(str(error)) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if any(map(str.isalnum, line))]
        raise _goes_on(lines[-1].removeprefix("error: ") if lines else f"it ended with status {done.returncode}")
    try:
        said = msgspec.json.decode(done.stdout, type=Check)
    except msgspec.MsgspecError as error:
        raise _goes_on(f"it does not say what it is: {error}") from error
    if said.format != FORMAT_VERSION:
        raise PoolRefused(
            f"release {said.release} has segments of format {said.format}, this node's have {FORMAT_VERSION}; stop the "
            "node with 'ems stop' and start the new one, which begins with an empty pool"
        )
    return said


def _goes_on(reason: str) -> PoolRefused:
    return PoolRefused(f"the installed release cannot start, so the node goes on as it is: {reason}")


class Restart:
    """A node's way from the wish to restart to the moment in which it may: :attr:`due` is set then.

    ``held`` tells whether clients hold anything; ``refuse`` raises PoolRefused where the node must not restart now.
    """

    def __init__(self, held: Callable[[], bool], refuse: Callable[[], None]) -> None:
        self._held = held
        self._refuse = refuse
        self._task: asyncio.Task[None] | None = None
        self.due = asyncio.Event()
        self.waits = False
        """Whether nothing new is taken in any more."""
        self.failure = ""
        """Why the last restart did not come about."""

    @property
    def wished(self) -> bool:
        return self._task is not None

    def wish(self) -> None:
        """Restart as soon as the installed release has said that it can start.  Raises PoolRefused: not now."""
        if self.wished:
            return
        self._refuse()
        self.failure = ""
        self._task = asyncio.create_task(self._go())

    async def _go(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            said = await loop.run_in_executor(None, check)
            self._refuse()
        except PoolRefused as error:
            self._task, self.failure = None, str(error)
            _log.warning("the node does not restart", reason=self.failure)
            return
        self.waits = True
        until = loop.time() + PATIENCE_SECONDS
        while self._held() and loop.time() < until:  # noqa: ASYNC110 - the core is a brain and knows no events
            await asyncio.sleep(LOOK_SECONDS)
        _log.info("restarting", release=said.release, in_time=not self._held())
        self.due.set()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def figures(self) -> dict[str, object]:
        return {"wished": self.wished, "failure": self.failure}
