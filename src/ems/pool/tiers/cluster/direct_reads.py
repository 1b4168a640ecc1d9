"""Reads objects from the memory of the hosts that have them, without a core that waits.

Mooncake's own calls ask again and again whether a transfer has ended, which keeps a core busy that transfers need.
Here transfers are begun one by one, and who waits sleeps between two questions.  What always holds: a host is read
directly only after a call of Mooncake's own has reached it, because the first contact with one that hangs holds up all
others; nothing that is read is proven, for the memory may be another object's by then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ems.errors import EmsError
from ems.pool.tiers.cluster.mooncake_config import PEER_TO_PEER, MooncakeConfig

LEAST_SLEEP_SECONDS = 0.0002
SLEEP_SHARE = 0.03
"""Of the time that was waited already: so late, at most, is the end of a transfer seen."""


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

    Sizes are bytes, addresses are those of this process and, in :class:`Source`, of the other host's.
    """

    def __init__(self, store: Any, engine: Any) -> None:
        self._store = store
        self._engine = engine
        self._reached: set[str] = set()

    def find(self, names: Sequence[str]) -> dict[str, Source]:
        """Where those of ``names`` are that lie in the memory of a host."""
        return self._find(names) if self._reached else {}

    def _find(self, names: Sequence[str]) -> dict[str, Source]:
        found = {}
        for name, replicas in self._store.batch_get_replica_desc(list(names)).items():
            if (source := _source(replicas)) is not None:
                found[name] = source
        return found

    def reached(self, names: Sequence[str]) -> None:
        """A call of Mooncake's own has read the objects ``names``: their hosts may be read from now on."""
        if self._engine is not None and names:
            self._reached.update(source.endpoint for source in self._find(names).values() if source.only)

    def read(self, names: Sequence[str], address: int, view: memoryview) -> list[bytes | None]:
        """The small objects ``names``, one after the other through ``view``, which is at ``address``.

        Empty where the master knows of none; None where it can't be read directly, and from the first on that failed:
        each read of a host that is gone costs a second.
        """
        described, found, good = self._store.batch_get_replica_desc(list(names)), list[bytes | None](), True
        for name in names:
            source = _source(described.get(name, []))
            fits = good and source is not None and source.size <= len(view)
            transfers = self.begin(source, [address], [source.size]) if fits and source is not None else []
            good = good and (not transfers or self.ended(transfers))
            there = bytes(view[: source.size]) if transfers and good and source is not None else None
            found.append(there if described.get(name) else b"")
        return found

    def begin(self, source: Source, addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Read all of ``source`` into as many places; the transfers that :meth:`ended` takes, none where that can't be.

        What one place gets is in one transfer of its own: only of such ones the engine says without waiting whether
        they have ended.
        """
        if source.endpoint not in self._reached or source.size != sum(sizes):
            return []
        transfers, at = [], source.address
        for address, size in zip(addresses, sizes, strict=True):
            transfers.append(self._engine.batch_transfer_async_read(source.endpoint, [address], [at], [size]))
            at += size
        return transfers

    def ended(self, transfers: Sequence[int]) -> bool:
        """Wait for the end of all ``transfers``; whether they brought what they were to bring.

        After False bytes may still arrive.
        """
        began = time.monotonic()
        good = True
        for transfer in transfers:
            while transfer and not (code := self._engine.transfer_check_status(transfer)):
                waited = time.monotonic() - began
                time.sleep(max(LEAST_SLEEP_SECONDS, SLEEP_SHARE * waited))  # Mooncake tells nobody when it has ended
            good = good and bool(transfer) and code == 1
        return good


def _source(replicas: Sequence[Any]) -> Source | None:
    whole = [one for one in replicas if one.is_memory_replica() and one.status.name == "COMPLETE"]
    if not whole:
        return None
    there = whole[0].get_memory_descriptor().buffer_descriptor
    return Source(there.transport_endpoint, there.buffer_address, there.size, len(replicas) == 1)
