"""Hosts as network namespaces on one switch: with addresses of their own, and links that can be cut, slowed and healed.

What always holds: a namespace has no name and no process of its own, only a descriptor here.  When this process ends,
however it ends, the kernel takes namespaces, links and addresses away as soon as the last server in them is gone.
Nothing outside the namespaces is touched, so no route of the machine changes.  Files are shared: each host needs
folders of its own.  Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from ems.errors import EmsError

CLONE_NEWNET = 0x40000000
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_LIBC = ctypes.CDLL(None, use_errno=True)


class HostsError(EmsError):
    """This machine makes no hosts, or a link does not do what it is told."""


class Namespace:
    """A network namespace that lives as long as its descriptor, or a process in it."""

    def __init__(self) -> None:
        made: list[int] = []
        failed: list[OSError] = []

        def make() -> None:  # a thread that ends then, so that no other one moves
            if _LIBC.unshare(CLONE_NEWNET):
                number = ctypes.get_errno()
                failed.append(OSError(number, os.strerror(number)))
            else:
                made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if failed:
            raise HostsError(f"no network namespace can be made, which takes root: {failed[0]}")
        self._descriptor = made[0]
        self.run("ip", "link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """What ``ip`` takes for this namespace."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run what this thread does here, with the sockets, processes and threads that it makes meanwhile."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(self._descriptor)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)

    def run(self, *command: str) -> None:
        with self.entered():
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _PATH}
            )
        if done.returncode:
            raise HostsError(f"{' '.join(command)} failed: {done.stderr.strip()}")

    def processes(self) -> list[psutil.Process]:
        """What runs here now, but for this process, a thread of which may have entered."""
        here = os.fstat(self._descriptor).st_ino
        return [one for one in psutil.process_iter() if one.pid != os.getpid() and _namespace(one.pid) == here]

    def close(self) -> None:
        os.close(self._descriptor)


def _namespace(pid: int) -> int:
    """The number of the namespace that a process is in, 0 when it has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def _enter(descriptor: int) -> None:
    if _LIBC.setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Host(Namespace):
    """A host on the switch, reached at ``address``."""

    def __init__(self, switch: Namespace, number: int) -> None:
        super().__init__()
        self.address = f"10.77.0.{number}"
        self._switch = switch
        self._port = f"host{number}"
        try:
            switch.run("ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self.path)
            switch.run("ip", "link", "set", self._port, "master", "bridge", "up")
            self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
            self.run("ip", "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """Let nothing pass; connections notice only by their own clocks, for this side of the link stays up."""
        self._switch.run("ip", "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Let everything pass again, as fast as the machine can."""
        self._switch.run("ip", "link", "set", self._port, "master", "bridge")
        for namespace, link in self._ends():
            namespace.run("tc", "qdisc", "replace", "dev", link, "root", "noqueue")

    def slow(self, mbit: float) -> None:
        """Let no more than ``mbit`` Mbit/s pass in each direction."""
        shape = ["tbf", "rate", f"{mbit:g}mbit", "burst", "64kb", "latency", "50ms"]
        for namespace, link in self._ends():
            namespace.run("tc", "qdisc", "replace", "dev", link, "root", *shape)

    def _ends(self) -> list[tuple[Namespace, str]]:
        return [(self, "eth0"), (self._switch, self._port)]


class Hosts:
    """``count`` hosts, all linked to each other; use it as a context manager."""

    def __init__(self, count: int) -> None:
        self._stack = ExitStack()
        with self._stack:
            self._switch = Namespace()
            self._stack.callback(self._switch.close)
            self._switch.run("ip", "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
            self._switch.run("ip", "link", "set", "bridge", "up")
            self.hosts: list[Host] = []
            for number in range(1, count + 1):
                host = Host(self._switch, number)
                self._stack.callback(host.close)
                self.hosts.append(host)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
