"""Mooncake's master as a model: where the replicas of a block go, and which blocks leave.

It follows Mooncake's code.  A put takes one place a replica on different hosts, as many as there are; a lookup grants a
lease; above the high watermark, or when a put found no place, a share of all blocks leaves, those first whose lease
ended longest ago.  What always holds: a host never has more than its places; a block that is leased stays; replicas of
a block are on different hosts; places are drawn from key and seed alone, so two runs that differ a little stay alike.
Left out: soft and hard pins, disks, and that a lookup counts 10 s (the lease) later than a put.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from math import ceil

from ems.simulate.plan import Placement

HIGH_WATERMARK = 0.90
EVICTION_RATIO = 0.05
LEASE_SECONDS = 10.0
CLIENT_TTL = 10.0
"""Seconds after which a host that says nothing any more is unmounted, with all that lay there."""
EVICTION_PAUSE = 0.01
CANDIDATES = 6
"""Hosts that ``free-ratio`` looks at for each replica."""

Replicas = tuple[int, ...]


class Master:
    """Blocks by key, on ``hosts`` with ``places`` each."""

    def __init__(self, hosts: int, places: int, placement: Placement, replicas: int, seed: int = 0) -> None:
        self._places = places
        self._placement = placement
        self._replicas = replicas
        self._seed = seed
        self._free = [places] * hosts
        self._mounted = [True] * hosts
        self._alone: list[Replicas] = [(host,) for host in range(hosts)]
        """A tuple for each host, so that blocks with one replica share it."""
        self.blocks: dict[bytes, Replicas] = {}
        """In the order in which they would leave: when they were put or last looked up."""
        self._leases: dict[bytes, float] = {}
        self._room = hosts * places
        self._used = 0
        self._next_eviction = 0.0
        self.evicted = 0
        self.refused = 0
        """Puts that found no place."""

    def lookup(self, keys: Sequence[bytes], now: float) -> list[Replicas]:
        """The replicas of each of ``keys``, none where it is not there; what is there is leased."""
        blocks, leases = self.blocks, self._leases
        found: list[Replicas] = []
        for key in keys:
            replicas = blocks.pop(key, ())
            if replicas:
                blocks[key] = replicas
                leases.pop(key, None)
                leases[key] = now + LEASE_SECONDS
            found.append(replicas)
        return found

    def put(self, key: bytes, host: int, now: float) -> Replicas:
        """Where the replicas of a block that is new go, which ``host`` writes; none where there is no place."""
        self._evict_above(HIGH_WATERMARK, now)
        replicas = self._take(key, host)
        if not replicas:
            self.refused += 1
            self._evict_above(0, now)
            return ()
        self._used += len(replicas)
        self.blocks[key] = replicas
        return replicas

    def revoke(self, key: bytes) -> None:
        """A put did not come to its end."""
        self._forget(key)

    def unmount(self, host: int) -> int:
        """``host`` is gone with all that lay there; returns how many blocks have no replica left."""
        if not self._mounted[host]:
            return 0
        self._mounted[host] = False
        gone = [(key, replicas) for key, replicas in self.blocks.items() if host in replicas]
        lost = 0
        for key, replicas in gone:
            left = tuple(one for one in replicas if one != host)
            if left:
                self.blocks[key] = left
                self._used -= 1
            else:
                self._forget(key)
                lost += 1
        self._free[host] = 0
        self._room -= self._places
        return lost

    def mount(self, host: int) -> None:
        """``host`` joins, empty."""
        self.unmount(host)
        self._mounted[host] = True
        self._free[host] = self._places
        self._room += self._places

    def used(self, host: int) -> int:
        return self._places - self._free[host] if self._mounted[host] else 0

    def _forget(self, key: bytes) -> None:
        replicas = self.blocks.pop(key)
        self._leases.pop(key, None)
        for host in replicas:
            self._free[host] += 1
        self._used -= len(replicas)

    def _take(self, key: bytes, host: int) -> Replicas:
        taken: list[int] = []
        draws = self._draws(key)
        if self._placement == "own-host" and self._free[host]:
            self._take_from(host, taken)
        while len(taken) < self._replicas:
            place = self._freest(draws, taken) if self._placement == "free-ratio" else self._random(draws, taken)
            if place is None:
                break
            self._take_from(place, taken)
        return self._alone[taken[0]] if len(taken) == 1 else tuple(taken)

    def _take_from(self, host: int, taken: list[int]) -> None:
        self._free[host] -= 1
        taken.append(host)

    def _draws(self, key: bytes) -> Iterator[int]:
        """Hosts as they are drawn for ``key``."""
        state = zlib.crc32(key, self._seed)
        while True:
            state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
            yield (state >> 33) % len(self._free)

    def _random(self, draws: Iterator[int], taken: Sequence[int]) -> int | None:
        """The first host with a free place, from a random one on."""
        start = next(draws)
        for host in chain(range(start, len(self._free)), range(start)):
            if self._free[host] and host not in taken:
                return host
        return None

    def _freest(self, draws: Iterator[int], taken: Sequence[int]) -> int | None:
        some = dict.fromkeys(islice(draws, CANDIDATES * self._replicas))
        fit = [host for host in some if self._free[host] and host not in taken]
        return max(fit, key=self._free.__getitem__) if fit else self._random(draws, taken)

    def _evict_above(self, watermark: float, now: float) -> None:
        if self._used <= watermark * self._room or now < self._next_eviction:
            return
        self._next_eviction = now + EVICTION_PAUSE
        while self._leases and (first := next(iter(self._leases.items())))[1] <= now:
            del self._leases[first[0]]
        above = self._used / self._room - HIGH_WATERMARK if self._room else 0.0
        count = ceil(max(EVICTION_RATIO, above + EVICTION_RATIO) * len(self.blocks))
        for key in list(islice((key for key in self.blocks if key not in self._leases), count)):
            self._forget(key)
            self.evicted += 1
