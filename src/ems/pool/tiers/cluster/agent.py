"""A process that is a client of Mooncake for a node: it gives the cluster memory and stores there, or moves pages.

Run by :mod:`ems.pool.tiers.cluster.agent_process` with the descriptors of its sockets; one thread serves each.  What
always holds: it ends with its node, whose end it sees on its first socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from ems.errors import EmsError
from ems.pool.tiers.cluster import calls
from ems.pool.tiers.cluster.direct_reads import DirectReads
from ems.pool.tiers.cluster.lent_memory import LentMemory
from ems.pool.tiers.cluster.mooncake_client import start
from ems.pool.tiers.cluster.mover import Lane, Mover
from ems.pool.tiers.cluster.objects import Objects
from ems.pool.tiers.pack_seal import SealKeys

STORED_SECONDS, LEAVE_SECONDS = 1.0, 2.0
RAMP_PARTS, RAMP_SECONDS = 8, 5.0
"""How many parts a host lends at most, and how long after one the next."""
RAMP_LEAST = 256 << 20
"""Bytes of a part; what is smaller is lent at once."""
NO_SECRET = b"ems-cluster-without-a-secret"


def ramp(size: int) -> list[int]:
    """The parts in which ``size`` bytes are lent, one after the other: a host that joins does not draw all writes."""
    count = max(min(size // RAMP_LEAST, RAMP_PARTS), 1)
    part = size // count >> 21 << 21  # whole 2 MiB, a huge page
    return [part] * (count - 1) + [size - part * (count - 1)]


def _mover(call: calls.Start, own: str, store: Any, engine: Any) -> Mover:
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    config.replica_num = call.replicas
    if call.own_place and own:
        config.preferred_segments = [own]
    mark_config = ReplicateConfig()
    mark_config.preferred_segments = [own]
    mark_config.with_hard_pin = True
    objects = Objects(SealKeys.of(call.secrets or {"": NO_SECRET}, encrypts=False))
    return Mover(store, DirectReads(store, engine, call.silent), objects, config, mark_config)


def serve(sock: socket.socket, mover: Mover, ends_with_it: bool) -> None:
    """Answer what comes on ``sock`` until nobody is there any more; a defect ends all if ``ends_with_it``."""
    lane = Lane(mover, lambda: calls.readable(sock, 0.0))
    while True:
        try:
            call, descriptors = calls.receive(sock, calls.calls)
        except (EOFError, OSError):
            return
        if isinstance(call, calls.Cancel):  # its answer was sent
            continue
        try:
            answer = lane.answer(call, descriptors)
        except EmsError as error:
            answer = calls.Answer(error=str(error))
        except Exception as error:
            if ends_with_it:
                raise
            answer = calls.Answer(error=f"a defect of EMS: {type(error).__name__}: {error}")
        for one in descriptors:
            os.close(one)
        with contextlib.suppress(OSError):  # nobody waits for it any more
            calls.send(sock, answer)


def end_with(sock: socket.socket) -> None:
    """The kernel ends this process at once when the other end of ``sock`` closes, or sends something, or did so.

    Python need not run.  What still moved pages would write into slots that a successor of the node gives to others.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
    if calls.readable(sock, 0.0):
        os._exit(1)


def outlive(sock: socket.socket) -> None:
    """End :func:`end_with`: this process sees by itself that the other end of ``sock`` closes, and takes its leave."""
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) & ~os.O_ASYNC)


def lend(sock: socket.socket, store: Any, sizes: list[int], protocol: str, memory: LentMemory) -> threading.Thread:
    """Answer each byte on ``sock`` until the node is gone; the thread that is returned lends ``sizes`` meanwhile."""
    ended = threading.Event()

    def lend_all() -> None:
        while sizes and not ended.wait(RAMP_SECONDS):  # where it failed the master may be lost, and come back
            with memory.allocated(sizes[0]):
                failed = store.allocate_and_mount_segment(sizes[0], protocol)["ret"]
            if not failed:
                del sizes[0]

    lending = threading.Thread(target=lend_all, daemon=True)
    lending.start()
    while beat := sock.recv(1):
        sock.send(beat)
    ended.set()
    return lending


def leave(store: Any, storing: Iterable[threading.Thread] = ()) -> None:
    """Tell the master that the memory goes, or others would ask for it until it noticed; but nothing waits for that.

    What ``storing`` is at ends first, if it does: Mooncake's client may fail where it is closed in a call.  The kernel
    ends this process in time: that client may hang while no thread of Python can run.
    """
    ends = time.monotonic() + STORED_SECONDS
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, STORED_SECONDS + LEAVE_SECONDS)
    for thread in storing:
        thread.join(max(ends - time.monotonic(), 0.0))
    signal.setitimer(signal.ITIMER_REAL, LEAVE_SECONDS)
    store.close()
    os._exit(0)


def _end(failure: threading.ExceptHookArgs) -> None:
    """End this process where a thread of it fails: the node sees that at once, and would wait for its answer."""
    threading.__excepthook__(failure)
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    threading.excepthook = _end
    control, *lanes = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    call, _ = calls.receive(control, calls.calls)
    assert isinstance(call, calls.Start)
    try:
        end_with(control)  # Mooncake may hang in its start, and lend memory when nobody is left to take it back
        parts = ramp(call.config.global_segment_size) if call.gives else [0]
        memory = LentMemory()
        with memory.allocated(parts[0]):
            store, engine, hostname = start(call.config, parts[0])
        if call.gives:
            outlive(control)
        mover = _mover(call, hostname if call.gives else call.own, store, engine)
        serving = [threading.Thread(target=serve, args=(sock, mover, not call.gives), daemon=True) for sock in lanes]
        for thread in serving:
            thread.start()
    except EmsError as error:
        calls.send(control, calls.Answer(error=str(error)))
        os._exit(1)
    calls.send(control, calls.Answer(text=hostname))
    lending = lend(control, store, parts[1:], call.config.protocol, memory)
    leave(store, [lending, *serving])


if __name__ == "__main__":
    main()
