"""Programs that are forked from a process in which what they import is imported already.

Three processes of a vLLM server import PyTorch and vLLM, which is most of the 30 seconds of processor time that its
start takes, and imports are most of the start of a pool node; a fork has them.  The program is the one that the command
would run, with its arguments and its environment, and what vLLM does when it starts is done by each server.  The one
difference is that its own processes are forks as well, which is vLLM's way with accelerators; on a CPU it starts them
anew.  What Python and PyTorch read of the environment when they start is that of the process that started the first of
these programs.

What always holds: a program has a session of its own, and dies with the thread that started the first program.

``python -m tests.kit.prepared DESCRIPTOR MODULE...`` is that process: it is told on a socket what to run, and tells the
status with which that ended.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from tests.kit.engine import ENVIRONMENT, VllmServer, on_accelerator
from tests.kit.process import LAUNCH, Running

MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
)
"""What all servers of vLLM import, with all that these do; no thread or parallel region of PyTorch starts in it."""

FRESH = ("PYTHON", "OMP_", "TORCH", "VLLM_LOGGING_")
"""Names of variables that are read when a process starts begin like this."""

START_SECONDS = 420.0
"""For the imports, on a machine that has other things to do."""

_NAMESPACE = "/proc/thread-self/ns/net"
_MOST = 1 << 20


class _Order(msgspec.Struct, frozen=True):
    """A module with its arguments; its output, the pipe for its status and its network come along as descriptors."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


class PreparedProgram:
    """``python -m module *arguments``, a fork of ``parent``; the part of :class:`subprocess.Popen` that is used."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        output: IO[bytes],
        environment: Mapping[str, str],
        parent: Parent,
    ) -> None:
        self.returncode: int | None = None
        self.pid, self._status = parent.fork(
            _Order(module, list(arguments), dict(environment), str(Path.cwd())), output
        )

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._status.read() or -signal.SIGTERM)
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PreparedServer(VllmServer):
    """A server whose front end is forked, except where there is an accelerator: its drivers do not survive a fork."""

    def _launch(self, log: IO[bytes]) -> Running:
        if on_accelerator():
            return super()._launch(log)
        _python, _module, module, *arguments = self._command
        return PreparedProgram(module, arguments, output=log, environment=self._environment, parent=vllm_parent())


class Parent:
    """The process that has imported ``modules`` and forks programs."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket, self._turn = ours, threading.Lock()
        self._environment = environment
        ours.settimeout(START_SECONDS)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid()), *command],
                cwd=Path(__file__).parents[2],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it, and with it its programs."""
        self._socket.close()
        self._process.wait()

    def fork(self, order: _Order, output: IO[bytes]) -> tuple[int, IO[bytes]]:
        """The process that carries out ``order``, and a file in which its status will be."""
        for name in {**self._environment, **order.environment}:
            if name.startswith(FRESH) and self._environment.get(name) != order.environment.get(name):
                raise ValueError(f"{name} means something to a process that starts anew only, run the command itself")
        status, told = os.pipe()
        network = os.open(_NAMESPACE, os.O_RDONLY)
        try:
            with self._turn:
                socket.send_fds(self._socket, [msgspec.msgpack.encode(order)], [output.fileno(), told, network])
                pid = int(self._socket.recv(_MOST))
        finally:
            os.close(told)
            os.close(network)
        return pid, os.fdopen(status, "rb")


_started: dict[tuple[str, ...], Parent] = {}


def parent_of(modules: tuple[str, ...], environment: Mapping[str, str]) -> Parent:
    """The one that has imported ``modules``; when there is none yet, it begins in ``environment``."""
    parent = _started.get(modules)
    if parent is None or not parent.alive:
        parent = _started[modules] = Parent(modules, environment)
        atexit.register(parent.close)
    return parent


def vllm_parent() -> Parent:
    return parent_of(MODULES, {**os.environ, **ENVIRONMENT})


def start_node(
    *arguments: str, output: IO[bytes], environment: Mapping[str, str], module: str = "ems.cli"
) -> PreparedProgram:
    """Fork ``ems node`` with ``arguments``; ``module`` is one that behaves like ``ems`` and does something besides."""
    parent = parent_of(("ems.cli.node",), environment)
    return PreparedProgram(module, ["node", *arguments], output=output, environment=environment, parent=parent)


def _serve(control: socket.socket) -> _Order:
    """Fork a child for each order; returns in a child, with what it is to do."""
    children: dict[int, tuple[int, int]] = {}
    while True:
        ready = select.select([control.fileno(), *children], [], [])[0]
        for ended in children.keys() & set(ready):
            pid, told = children.pop(ended)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(BrokenPipeError):
                os.write(told, b"%d" % status)
            os.close(told)
            os.close(ended)
        if control.fileno() not in ready:
            continue
        body, descriptors, _, _ = socket.recv_fds(control, _MOST, 3)
        if not body:
            sys.exit(0)
        output, told, network = descriptors
        order = msgspec.msgpack.decode(body, type=_Order)
        ours, child = os.getpid(), os.fork()
        if not child:
            for theirs in [control.detach(), told, *children, *(pipe for _, pipe in children.values())]:
                os.close(theirs)
            _settle(order, output, network, ours)
            return order
        children[os.pidfd_open(child)] = child, told
        os.close(output)
        os.close(network)
        control.send(b"%d" % child)


def _settle(order: _Order, output: int, network: int, parent: int) -> None:
    """Make this process what one that the command started would be."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(0)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    if not os.path.samestat(os.fstat(network), Path(_NAMESPACE).stat()) and libc.setns(network, 0):
        raise OSError(ctypes.get_errno(), "the program cannot be run in the network of its host")
    os.close(network)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)


def main(descriptor: str, *modules: str) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    order = _serve(socket.socket(fileno=int(descriptor)))
    gc.unfreeze()
    fork = multiprocessing.get_context("fork")
    setattr(multiprocessing, "get_context", lambda _method=None: fork)  # noqa: B010 - whoever asks for "spawn" too
    sys.argv = [order.module, *order.arguments]
    sys.orig_argv[1:] = ["-m", *sys.argv]  # a node that is upgraded starts this again
    sys.path[0] = order.folder
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
