"""Hosts reach each other, do not while a link is cut, are slow when told, and leave nothing behind."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.kit.hosts import Host, Hosts
from tests.kit.waiting import until

pytestmark = pytest.mark.process


def connects(source: Host, target: Host) -> bool:
    """Whether a connection of ``source`` reaches a port at which ``target`` listens."""
    with target.entered():
        listening = socket.create_server((target.address, 0))
    with listening, source.entered():
        try:
            socket.create_connection(listening.getsockname(), timeout=1).close()
        except OSError:
            return False
        return True


def test_hosts_reach_each_other_unless_the_link_is_cut() -> None:
    with Hosts(3) as network:
        first, second, third = network.hosts
        until(lambda: connects(first, second), "the first reaches the second")
        second.cut()
        assert not connects(first, second)
        assert connects(first, third)
        second.heal()
        until(lambda: connects(first, second), "the second is back")


def send_seconds(source: Host, target: Host, count: int) -> float:
    """How long it takes until ``target`` has ``count`` bytes from ``source``."""
    with target.entered():
        listening = socket.create_server((target.address, 0))
    with listening, source.entered(), socket.create_connection(listening.getsockname(), timeout=60) as sender:
        receiver = listening.accept()[0]
        with receiver:
            begin = time.monotonic()
            sending = threading.Thread(target=sender.sendall, args=(bytes(count),))
            sending.start()
            while count:
                count -= len(receiver.recv(1 << 20))
            sending.join()
            return time.monotonic() - begin


def test_a_slow_link_lets_no_more_pass_than_it_says() -> None:
    with Hosts(2) as network:
        first, second = network.hosts
        until(lambda: connects(first, second), "the first reaches the second")
        first.slow(mbit=10)
        assert send_seconds(first, second, 1 << 19) >= 0.25  # 4 Mbit, of which a burst of 0.5 goes at once
        first.heal()
        assert connects(first, second)


def test_processes_that_are_started_inside_live_there() -> None:
    with Hosts(1) as network:
        before = str(Path("/proc/thread-self/ns/net").readlink())
        with network.hosts[0].entered():
            inside = str(Path("/proc/thread-self/ns/net").readlink())
            seen = subprocess.run(["readlink", "/proc/self/ns/net"], capture_output=True, text=True, check=True)
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as cat:
                assert [one.pid for one in network.hosts[0].processes()] == [cat.pid]
                cat.communicate()
        assert seen.stdout.strip() == inside != before
        assert str(Path("/proc/thread-self/ns/net").readlink()) == before
