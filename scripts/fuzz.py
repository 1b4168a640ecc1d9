# ruff: noqa: SLF001 - looks behind the scenes of what it tests
"""Fuzzes the node's protocol, guided by coverage: ``python -m scripts.fuzz --minutes 5``.

A real node's shell and brain in this process, without its event loop: bytes go through real sockets into real
connections, so that thousands of histories a second are tried.  Each input is a history of up to four connections that
send raw bytes, mutated frames and valid messages in any order, some of them greeted, some tenants, some not.

After each history must hold: no exception came out, no request "brought up a defect", the brain's own check finds
nothing, nobody holds anything any more, and a page that was stored before is there.  An input that breaks this is kept
in the folder that is printed and is run again with ``--input FILE``.

Needs atheris (``pip install atheris``), which is no dependency of anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.pool.wrong_core import wrong_core

try:
    import atheris
except ImportError:
    sys.exit("error: atheris is not installed, install it with 'pip install atheris'")

with atheris.instrument_imports(include=["ems"]):
    from ems.config import NodeConfig
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.core.shares import Quota
    from ems.pool.keys import Tail
    from ems.pool.node import connection as connections
    from ems.pool.node import pool_node as nodes
    from ems.pool.node.connection import Connection
    from ems.pool.node.pool_node import Node
    from ems.pool.protocol import coding, messages
    from ems.pool.tenants import registry as tenancy
    from ems.pool.tenants import store
    from ems.pool.tenants.gate import Principal
    from ems.pool.tenants.registry import Registry

PAGE = 4096
TENANTS = ("ann", "bob")
KEPT = b"kept" * 4
MAX_STEPS = 24
SEATS = 4


class Defect(Exception):
    """A history broke a promise."""


class _Log:
    """Takes the place of the connections' log: a defect must not be swallowed."""

    def exception(self, *_: object, **__: object) -> None:
        raise Defect("a request brought up a defect")

    def warning(self, *_: object, **__: object) -> None:
        pass

    info = error = warning


class Target:
    """A node of four segments with two tenants, or an open one, whose loop never runs."""

    def __init__(self, folder: Path, disk: Path, *, tenants: bool) -> None:
        self.tenants = tenants
        self.now = 0.0
        path: Path | None = None
        if tenants:
            path = disk / "tenants.json"
            registry = Registry(secret=bytes(32))
            for name in TENANTS:
                registry = tenancy.add_tenant(registry, name, Quota(), bytes(16))
            with store.changing(path, create=True):
                store.write(path, registry)
        directory = folder / ("tenants" if tenants else "open")
        config = NodeConfig(
            directory=directory,
            socket=directory / "s",
            size=1 << 20,
            segment_size=1 << 18,
            http_port=None,
            tenants=path,
        )
        self.node = Node(config, clock=lambda: self.now)
        connections._log = nodes._log = _Log()

    def begin(self) -> None:
        """Forget all histories before."""
        node: Any = self.node
        node.core = PoolCore(node.arena.sizes, changes=node.tenancy.changes, ids=node.tenancy.ids)
        node.tenancy.apply_quotas(node.core)
        node.tenancy._request_filters.clear()
        for number, size in enumerate(node.arena.sizes):
            node.core.slots.touch(number, size)
        node.core.slots.touching_ended()
        node.clients.next_client_id = 1
        with SimulatedClient(self, Principal(TENANTS[0]) if self.tenants else Principal()) as client:
            client.send(coding.encode(messages.Open("kept", PAGE)))
            client.send(coding.encode(messages.Reserve(0, bytes(16), KEPT)))
            granted = [one for one in client.read() if isinstance(one, messages.Granted)]
            client.send(coding.encode(messages.Commit(granted[0].reservation)))

    def end(self) -> None:
        """Look at what is left."""
        node: Any = self.node
        self.now += 100.0
        node.core.tick(self.now)
        broken = wrong_core(node.core)
        figures = node.core.stats()
        held = {name: figures[name] for name in ("leases", "reservations", "slots_resting") if figures[name]}
        if broken or held or node.clients.connections or node.clients.principals:
            raise Defect(f"{broken} {held}")


class SimulatedClient:
    """One connection; ``principal`` is already let in, None has still to greet."""

    def __init__(self, target: Target, principal: Principal | None) -> None:
        self.mine, its = socket.socketpair()
        self.mine.setblocking(False)
        its.setblocking(False)
        node: Any = target.node
        client_id = node.clients.next_client_id
        node.clients.next_client_id += 1
        self.connection = Connection(node, its, client_id, target.now)
        node.clients.connections[client_id] = self.connection
        self._sock = its
        self._reader = coding.FrameReader()
        if principal is not None:
            self.connection._version = 1
            self.connection._let_in(principal, b"")
            self.read()

    @property
    def alive(self) -> bool:
        return self._sock.fileno() >= 0

    def send(self, data: bytes) -> None:
        """Send ``data`` and let the node see all of it."""
        view = memoryview(data)
        while view and self.alive:
            try:
                view = view[self.mine.send(view) :]
            except BlockingIOError:
                pass
            except OSError:
                return
            self.connection.on_readable()
        if self.alive:
            self.connection.on_readable()

    def read(self) -> list[messages.Answer]:
        """What the node answered until now."""
        answers = []
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.mine, 1 << 16, 8)
            except OSError:
                break
            for descriptor in descriptors:
                socket.close(descriptor)
            if not data:
                break
            self._reader.feed(data)
            answers += [coding.decode_answer(body) for body in self._reader.frames()]
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.mine.close()
        if self.alive:
            self.connection.close(None)


def key_of(fdp: Any) -> bytes:
    return bytes([fdp.ConsumeIntInRange(0, 7)]) * 16


def keys_of(fdp: Any) -> bytes:
    return b"".join(key_of(fdp) for _ in range(fdp.ConsumeIntInRange(0, 12)))


def tail_of(fdp: Any) -> Tail | None:
    if not fdp.ConsumeBool():
        return None
    return Tail(key_of(fdp), bytes(fdp.ConsumeBytes(fdp.ConsumeIntInRange(0, 16))))


def tails_of(fdp: Any) -> dict[int, Tail]:
    found = ((fdp.ConsumeIntInRange(-1, 12), tail_of(fdp)) for _ in range(fdp.ConsumeIntInRange(0, 2)))
    return {position: tail for position, tail in found if tail is not None}


def number_of(fdp: Any, known: list[int]) -> int:
    if known and fdp.ConsumeBool():
        return known[int(fdp.ConsumeIntInRange(0, len(known) - 1))]
    return int(fdp.ConsumeIntInRange(-1, 8))


def message_of(fdp: Any, known: dict[str, list[int]]) -> messages.Message:
    """A message that makes sense, more or less."""
    held, leases = known["reservations"], known["leases"]
    makers: list[Callable[[], messages.Message]] = [
        lambda: messages.Open("n" * fdp.ConsumeIntInRange(0, 3), (0, 64, PAGE, PAGE + 64)[fdp.ConsumeIntInRange(0, 3)]),
        lambda: messages.Reserve(fdp.ConsumeIntInRange(-1, 3), key_of(fdp), keys_of(fdp), tails_of(fdp)),
        lambda: messages.Commit(number_of(fdp, held), [number_of(fdp, [0])] if fdp.ConsumeBool() else None),
        lambda: messages.Abort(number_of(fdp, held)),
        lambda: messages.Lookup(fdp.ConsumeIntInRange(-1, 3), keys_of(fdp), fdp.ConsumeBool(), tail_of(fdp)),
        lambda: messages.Release(number_of(fdp, leases)),
        messages.Stats,
        lambda: messages.Attach(fdp.ConsumeIntInRange(-1, 6)),
        lambda: messages.Changes(fdp.ConsumeIntInRange(-1, 9), ["n" * fdp.ConsumeIntInRange(0, 3)]),
        lambda: messages.Hello(1, fdp.ConsumeIntInRange(0, 2), "f", 1, False, "ann", bytes(16)),
        lambda: messages.Prove(fdp.ConsumeBytes(32)),
    ]
    chosen = int(fdp.ConsumeIntInRange(0, len(makers) - 1))
    return makers[chosen]()


def taken(target: Target, clients: dict[int, SimulatedClient], number: int, fdp: Any) -> SimulatedClient:
    """The connection on a seat, a new one where the last has ended."""
    if number in clients and clients[number].alive:
        return clients[number]
    if number in clients:
        clients.pop(number).__exit__()
    principals: list[Principal | None] = [Principal(name) for name in TENANTS] if target.tenants else [Principal()]
    principals += [Principal(administers=True, stores=not target.tenants), None]
    clients[number] = SimulatedClient(target, principals[int(fdp.ConsumeIntInRange(0, len(principals) - 1))])
    return clients[number]


def words(deed: int, fdp: Any, known: dict[str, list[int]]) -> bytes:
    """What is sent: any bytes, any frame, a message with a bit flipped, or a message."""
    if deed == 2:
        return bytes(fdp.ConsumeBytes(64))
    if deed == 3:
        return coding.frame(fdp.ConsumeBytes(64))
    frame = bytearray(coding.encode(message_of(fdp, known)))
    if deed == 4:
        frame[4 + fdp.ConsumeIntInRange(0, len(frame) - 5)] ^= 1 << fdp.ConsumeIntInRange(0, 7)
    return bytes(frame)


def step(target: Target, clients: dict[int, SimulatedClient], fdp: Any, known: dict[str, list[int]]) -> None:
    """One thing that one client does, or that time does."""
    number = fdp.ConsumeIntInRange(0, SEATS - 1)
    deed = fdp.ConsumeIntInRange(0, 9)
    if deed == 0:
        target.now += fdp.ConsumeIntInRange(0, 40)
        target.node.core.tick(target.now)
        for segment in target.node.core.reclaimer.shrink():
            target.node.core.slots.touch(segment, 1 << 18)
        return
    if number in clients and deed == 1:
        clients.pop(number).__exit__()
        return
    client = taken(target, clients, number, fdp)
    client.send(words(deed, fdp, known))
    for answer in client.read():
        if isinstance(answer, messages.Granted) and answer.reservation:
            known["reservations"].append(answer.reservation)
        if isinstance(answer, messages.Hits) and answer.lease:
            known["leases"].append(answer.lease)


def history(target: Target, data: bytes) -> None:
    """Play the history that ``data`` stands for."""
    fdp = atheris.FuzzedDataProvider(data)
    target.begin()
    clients: dict[int, SimulatedClient] = {}
    known: dict[str, list[int]] = {"reservations": [], "leases": []}
    try:
        for _ in range(MAX_STEPS):
            if not fdp.remaining_bytes():
                break
            step(target, clients, fdp, known)
    finally:
        for client in clients.values():
            client.__exit__()
    target.end()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the node's protocol, guided by coverage.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input", type=Path, help="run one kept input again")
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="ems-fuzz-", dir="/dev/shm"))
    findings = Path(tempfile.mkdtemp(prefix="ems-fuzz-findings-"))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def make() -> list[Target]:
        return [Target(home, findings, tenants=False), Target(home, findings, tenants=True)]

    targets = loop.run_until_complete(make())
    begin, count = time.monotonic(), 0

    def play(data: bytes) -> None:
        nonlocal count
        count += 1
        history(targets[data[0] & 1 if data else 0], data[1:])

    if arguments.input is not None:
        play(arguments.input.read_bytes())
        print("the history broke nothing")
        shutil.rmtree(home)
        return
    corpus = findings / "corpus"
    corpus.mkdir()
    print(f"findings and corpus: {findings}", file=sys.stderr)
    flags = [f"-max_total_time={int(arguments.minutes * 60)}", "-timeout=5", "-max_len=1024", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, f"-seed={arguments.seed}", f"-artifact_prefix={findings}/", str(corpus)], play)
    try:
        atheris.Fuzz()
    finally:
        print(f"{count} histories in {time.monotonic() - begin:.0f} s", file=sys.stderr)
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
