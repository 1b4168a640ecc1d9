"""The process that moves pages for a node."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

BUSY = """
import ctypes, socket, sys
from ems.pool.tiers.cluster.agent import end_with
sock = socket.socket(fileno=int(sys.argv[1]))
end_with(sock)
sock.send(b"!")
ctypes.PyDLL(None).pause()  # as a call into Mooncake that hangs: no thread of Python runs from here on
"""


def test_it_ends_with_its_node_also_in_the_middle_of_a_call() -> None:
    ours, theirs = socket.socketpair()
    with subprocess.Popen([sys.executable, "-c", BUSY, str(theirs.fileno())], pass_fds=[theirs.fileno()]) as agent:
        theirs.close()
        assert ours.recv(1) == b"!"
        ours.close()
        assert agent.wait(60) == -signal.SIGIO
