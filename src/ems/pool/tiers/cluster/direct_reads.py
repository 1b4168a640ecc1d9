"""Reads objects from the memory of the hosts that have them, without a core that waits.

Mooncake's own calls ask again and again whether a transfer has ended, which keeps a core busy that transfers need.
Here transfers are begun one by one, and who waits sleeps between two questions.  What always holds: a host is read
directly only after a call of Mooncake's own has reached it, because the first contact with one that hangs holds up all
others; one that does not answer is left alone for a while, and costs what lies there alone; nothing that is read is
proven, for the memory may be another object's by then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from enum import Enum
from typing import Any, NamedTuple

from ems.errors import EmsError
from ems.pool.tiers.cluster.mooncake_config import PEER_TO_PEER, MooncakeConfig
from ems.pool.tiers.cluster.silent_hosts import ANSWER_SECONDS, SilentHosts

LEAST_SLEEP_SECONDS = 0.0002
SLEEP_SHARE = 0.03
"""Of the time that was waited already: so late, at most, is the end of a transfer seen."""


class NotRead(Enum):
    """Why an object was not read that is there."""

    DIRECTLY = 0
    """It can be read by a call of Mooncake's own."""
    SILENT = 1
    """Its host does not answer."""


class HostSilent(EmsError):
    """A host does not answer a call of Mooncake's own, which cannot be called off."""


class Source(NamedTuple):
    """Where an object lies: ``size`` bytes at ``address`` of the host ``endpoint``, and ``only`` there."""

    endpoint: str
    address: int
    size: int
    only: bool


def make_engine(config: MooncakeConfig, hostname: str) -> Any:
    """Mooncake's transfer engine for a client at ``hostname``; None where it has to make its own.

    Raises EmsError: it does not start.
    """
    # Mooncake's next engine knows nothing of single transfers.
    if config.protocol != "tcp" or config.metadata_server != PEER_TO_PEER or "MC_USE_TENT" in os.environ:
        return None
    try:
        from mooncake.engine import TransferEngine
    except ImportError:  # its store works without
        return None
    os.environ["MC_FORCE_TCP"] = "1"  # without, it takes what hardware it finds
    engine = TransferEngine()
    if code := engine.initialize(hostname, config.metadata_server, config.protocol, config.device_name):
        raise EmsError(f"Mooncake's transfer engine does not start ({code})")
    return engine


class DirectReads:
    """Of objects that ``store`` knows, by its ``engine``; None does nothing.  Each lane waits in a thread of its own.

    Sizes are bytes, addresses are those of this process and, in :class:`Source`, of the other host's.  Hosts are
    ``silent`` until then, by this system's monotonic clock.
    """

    def __init__(self, store: Any, engine: Any, silent: Mapping[str, float]) -> None:
        self._store = store
        self._engine = engine
        self._reached: set[str] = set()
        self._hosts = SilentHosts(silent)
        self._lock = threading.Lock()
        """Around what is expected of hosts."""
        self._few = mmap.mmap(-1, mmap.PAGESIZE)
        """Where the bytes arrive that tell whether a host answers; nobody looks at them."""
        self._few_at = ctypes.addressof(ctypes.c_char.from_buffer(self._few))
        if engine is not None and store.register_buffer(self._few_at, len(self._few)):
            raise EmsError(f"Mooncake does not take {len(self._few)} bytes of memory to read into")

    def find(self, names: Sequence[str]) -> dict[str, Source]:
        """Where those of ``names`` are that lie in the memory of a host."""
        return self._find(names) if self._reached or self.silent() else {}

    def _find(self, names: Sequence[str]) -> dict[str, Source]:
        described = self._store.batch_get_replica_desc(list(names)).items()
        return {name: source for name, replicas in described if (source := self._source(replicas)) is not None}

    def _source(self, replicas: Sequence[Any]) -> Source | None:
        whole = [one for one in replicas if one.is_memory_replica() and one.status.name == "COMPLETE"]
        buffers = [one.get_memory_descriptor().buffer_descriptor for one in whole]
        if not buffers:
            return None
        best = min(buffers, key=lambda one: self.is_silent(one.transport_endpoint))
        return Source(best.transport_endpoint, best.buffer_address, best.size, len(replicas) == 1)

    def reached(self, names: Sequence[str]) -> None:
        """A call of Mooncake's own has read the objects ``names``: their hosts may be read from now on."""
        if self._engine is not None and names:
            self._reached.update(source.endpoint for source in self._find(names).values() if source.only)

    def is_silent(self, endpoint: str) -> bool:
        """Whether the host did not answer a short time ago."""
        return self._hosts.is_silent(endpoint, time.monotonic())

    def silent(self) -> dict[str, float]:
        """All hosts of which that is so, and until when they are left alone."""
        return self._hosts.silent(time.monotonic())

    def call(self, threads: Executor, seconds: float, work: Callable[..., Any], names: list[str], *rest: Any) -> Any:
        """What a call ``work`` of Mooncake's own brings, which reads the objects ``names`` and may take so long.

        Raises HostSilent: it does not come to an end.  The hosts that it may be the first to reach are left alone then,
        and bytes may still arrive.
        """
        began = time.monotonic()
        try:
            return threads.submit(work, names, *rest).result(seconds)
        except TimeoutError:
            hosts = {source.endpoint for source in self._find(names).values()} - self._reached
            self._hosts.found_silent(hosts, began, time.monotonic())
            raise HostSilent from None

    def read(self, names: Sequence[str], address: int, view: memoryview) -> list[bytes | NotRead]:
        """The small objects ``names``, one after the other through ``view``, which is at ``address``.

        Empty where the master knows of none.  From the first on that failed they are left to Mooncake: each read of a
        host that is gone costs a second.
        """
        described, found, good = self._store.batch_get_replica_desc(list(names)), list[bytes | NotRead](), True
        for name in names:
            source = self._source(described.get(name, []))
            if source is None or not good:
                found.append(NotRead.DIRECTLY if described.get(name) else b"")
                continue
            transfers = self.begin(source, [address], [source.size]) if source.size <= len(view) else []
            if transfers and self.ended(source, transfers):
                found.append(bytes(view[: source.size]))
            elif self.is_silent(source.endpoint):
                found.append(NotRead.SILENT)
            else:
                found.append(NotRead.DIRECTLY)
                good = not transfers
        return found

    def begin(self, source: Source, addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Read all of ``source`` into as many places; the transfers that :meth:`ended` takes, none where that can't be.

        What one place gets is in one transfer of its own: only of such ones the engine says without waiting whether
        they have ended.
        """
        endpoint = source.endpoint
        if endpoint not in self._reached or self.is_silent(endpoint) or source.size != sum(sizes):
            return []
        transfers, at = [], source.address
        for address, size in zip(addresses, sizes, strict=True):
            transfers.append(self._engine.batch_transfer_async_read(endpoint, [address], [at], [size]))
            at += size
        with self._lock:
            self._hosts.expect(endpoint, source.size)
        return transfers

    def ended(self, source: Source, transfers: Sequence[int]) -> bool:
        """Wait for the end of all ``transfers``, which read ``source``; whether they brought what they were to bring.

        After False bytes may still arrive.
        """
        began, good = time.monotonic(), True
        for transfer in transfers:
            code = -1
            while transfer and not (code := self._engine.transfer_check_status(transfer)):
                if self._keeps_silent(source, began):
                    break
                pause = SLEEP_SHARE * (time.monotonic() - began)
                time.sleep(max(LEAST_SLEEP_SECONDS, pause))  # until it ends or the node ends this agent: nobody is told
            if code == 1:
                self._hosts.heard(source.endpoint, time.monotonic())
            good = good and code == 1
        with self._lock:
            self._hosts.expect(source.endpoint, -source.size)
        return good

    def _keeps_silent(self, source: Source, since: float) -> bool:
        """Whether the host is silent, which is asked for a few bytes where nothing comes from it since then."""
        if self._hosts.is_doubtful(source.endpoint, since, asked := time.monotonic()) and not self._answers(source):
            self._hosts.found_silent([source.endpoint], asked, time.monotonic())
        return self.is_silent(source.endpoint)

    def _answers(self, source: Source) -> bool:
        """Whether a few bytes come from a host, which has others to send."""
        place, size, code = [self._few_at], [min(source.size, 64)], 0
        transfer = self._engine.batch_transfer_async_read(source.endpoint, place, [source.address], size)
        until = time.monotonic() + ANSWER_SECONDS
        while transfer and not code and time.monotonic() < until:
            time.sleep(ANSWER_SECONDS / 100)  # bounded by ANSWER_SECONDS: Mooncake tells nobody when it has ended
            code = self._engine.transfer_check_status(transfer)
        if code == 1:
            self._hosts.heard(source.endpoint, time.monotonic())
        return code == 1
