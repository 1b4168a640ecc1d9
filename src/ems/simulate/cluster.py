"""Many hosts behind one master, and what one request does there.

A host has the brain of its node (:class:`~ems.pool.core.pool_core.PoolCore`, driven as ``ems bench trace`` drives it)
and that of its tiers' speed (:class:`~ems.pool.movement.speed.TierSpeed`), which says what is not worth fetching.
What a request does to pages is done at once when it is scheduled; how long that takes is computed beside.  What
always holds: each block that is asked for is counted once, where it came from; bytes are those of pages that moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum

import msgspec

from ems.bench.trace.replay import pool_of, serve
from ems.pool.core.changes import ChangeLog
from ems.pool.movement.speed import TierSpeed
from ems.simulate.master import Master, Replicas
from ems.simulate.network import Load
from ems.simulate.plan import Plan

NOTES = 64
"""Evictions of which a host remembers why: nobody asks here."""


class Source(IntEnum):
    """Where a block came from; the name of each is what reports call it."""

    OWN_MEMORY = 0
    OWN_PART = 1
    OTHER_HOSTS = 2
    PERSISTENT = 3
    COMPUTED = 4


class Served(msgspec.Struct):
    """What one request did: blocks by where they came from, and what they set off."""

    blocks: list[int]
    seconds: float = 0.0
    """Until the prompt is there: fetched and computed."""
    computed_seconds: float = 0.0
    calls: int = 0
    """Of the master, and the keys that they named."""
    keys: int = 0
    fetched: int = 0
    """Bytes from other hosts; written to other hosts; read from and written to the persistent tier."""
    written: int = 0
    read: int = 0
    persisted: int = 0
    lost_memory: int = 0
    """Computed blocks that a lost host had in memory; that lost hosts alone had for the cluster."""
    lost_part: int = 0
    failed: int = 0
    """Blocks whose host was gone when they were to be fetched or written."""


class _Evicted(ChangeLog):
    """Hears which keys leave a host's memory."""

    def __init__(self, evicted: Callable[[bytes], None]) -> None:
        super().__init__()
        self._evicted = evicted

    def recording(self) -> bool:
        return True

    def stored(self, namespace: str, keys: Iterable[bytes]) -> None:
        pass

    def removed(self, namespace: str, key: bytes) -> None:  # noqa: ARG002 - what the log is told
        self._evicted(key)


class Host:
    """One host: what it has in memory, and how busy its link is in each direction."""

    def __init__(self, plan: Plan) -> None:
        self.alive = True
        self.evicted: list[bytes] = []
        changes = _Evicted(self.evicted.append) if plan.write == "on-eviction" else None
        self.core, self.namespace = pool_of(plan.memory_blocks, plan.policy, changes, NOTES)
        self.cluster_speed, self.persistent_speed = TierSpeed(1), TierSpeed(1)
        self.sends, self.receives = Load(1 / plan.sample), Load(1 / plan.sample)


class Cluster:
    """All hosts, the master, and the persistent tier that they share, which keeps everything."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._network = plan.network
        self.hosts = [Host(plan) for _ in range(plan.hosts)]
        self.master = Master(plan.hosts, plan.cluster_blocks, plan.placement, plan.replicas, plan.seed)
        self.master_load = Load(1 / plan.sample)
        self.persistent: set[bytes] = set()
        self.missed: dict[bytes, Source] = {}
        """What was on hosts that were lost and was not computed again so far, by where it was."""

    def lose(self, hosts: Collection[int]) -> None:
        """``hosts`` end together; the master learns of it later (:meth:`Master.unmount`)."""
        for key, replicas in self.master.blocks.items():
            if all(one in hosts for one in replicas):
                self.missed[key] = Source.OTHER_HOSTS
        for host in hosts:
            lost = self.hosts[host]
            self.missed.update((page.key, Source.OWN_MEMORY) for page in lost.core.namespaces[lost.namespace].index)
            self.hosts[host] = Host(self._plan)
            self.hosts[host].alive = False

    def back(self, host: int) -> None:
        self.hosts[host].alive = True
        self.master.mount(host)

    def request(self, number: int, keys: list[bytes], now: float) -> Served:
        """A request for ``keys`` is scheduled on host ``number``."""
        host, done = self.hosts[number], Served([0] * len(Source))
        host.core.tick(now)
        own = done.blocks[Source.OWN_MEMORY] = serve(host.core, host.namespace, keys)
        found = own + (self._fetch(number, keys[own:], now, done) if own < len(keys) else 0)
        computed = done.blocks[Source.COMPUTED] = len(keys) - found
        done.computed_seconds = computed * self._network.compute
        done.seconds += done.computed_seconds
        if self.missed and computed:
            for key in keys[found:]:
                source = self.missed.pop(key, None)
                done.lost_memory += source is Source.OWN_MEMORY
                done.lost_part += source is Source.OTHER_HOSTS
        if self._plan.persistent:
            new = [key for key in keys[found:] if key not in self.persistent]
            self.persistent.update(new)
            done.persisted = len(new) * self._plan.block_bytes
        if self._plan.cluster_blocks:
            self._write(number, self._to_write(host, keys, own, found), now, done)
        return done

    def _fetch(self, number: int, keys: list[bytes], now: float, done: Served) -> int:
        """How many of ``keys``, which are not in memory, come from elsewhere without a gap."""
        persistent = self.persistent
        replicas: list[Replicas] = [()] * len(keys)
        if self._plan.cluster_blocks:
            done.seconds += self._call(len(keys), now, done)
            replicas = self.master.lookup(keys, now)
        count = next((at for at, key in enumerate(keys) if not replicas[at] and key not in persistent), len(keys))
        in_cluster = sum(map(bool, replicas[:count]))
        if in_cluster and not self._worth(self.hosts[number].cluster_speed, in_cluster, now):
            replicas = [()] * len(keys)
            count = next((at for at in range(count) if keys[at] not in persistent), count)
            in_cluster = 0
        slow = count - in_cluster
        if slow and not self._worth(self.hosts[number].persistent_speed, slow, now):
            count = next(at for at in range(count) if not replicas[at])
        if any(replicas[:count]):
            count = self._fetch_from_hosts(number, replicas[:count], now, done)
        slow = sum(not one for one in replicas[:count])
        if slow:
            done.blocks[Source.PERSISTENT] = slow
            done.read = slow * self._plan.block_bytes
            seconds = self._network.persistent_latency + done.read / self._network.persistent_bandwidth
            self.hosts[number].persistent_speed.fetched.add(done.read, seconds, self._learning(now))
            done.seconds += seconds
        return count

    def _worth(self, speed: TierSpeed, blocks: int, now: float) -> bool:
        size = blocks * self._plan.block_bytes
        return speed.worth(speed.expected(size, 0, size, self._learning(now)), blocks * self._network.compute)

    def _learning(self, now: float) -> float:
        """The time as brains that learn see it: what they know must last for as many fetches in a sample as in all."""
        return now * self._plan.sample

    def _fetch_from_hosts(self, number: int, wanted: Sequence[Replicas], now: float, done: Served) -> int:
        """Fetch those of ``wanted`` that are in the cluster; how many are there, up to the first one that failed."""
        network, host, size = self._network, self.hosts[number], self._plan.block_bytes
        seconds = self._call(sum(map(bool, wanted)), now, done)
        sources: dict[int, int] = {}
        count = len(wanted)
        for at, replicas in enumerate(wanted):
            if replicas:
                source = number if number in replicas else replicas[0]
                if not self.hosts[source].alive:
                    count = at
                    done.failed += 1
                    seconds += network.timeout
                    break
                sources[source] = sources.get(source, 0) + 1
        own = done.blocks[Source.OWN_PART] = sources.pop(number, 0)
        others = done.blocks[Source.OTHER_HOSTS] = sum(sources.values())
        transfers = [own * size / network.copy_bandwidth]
        if others:
            done.fetched = others * size
            transfers.append(network.latency + done.fetched / network.bandwidth * host.receives.stretch(now))
            host.receives.add(done.fetched / network.bandwidth, now)
        for source, blocks in sources.items():
            wire, sends = blocks * size / network.bandwidth, self.hosts[source].sends
            transfers.append(network.latency + wire * sends.stretch(now))
            sends.add(wire, now)
        seconds += max(transfers)
        host.cluster_speed.fetched.add(max(own + others, 1) * size, seconds, self._learning(now))
        done.seconds += seconds
        return count

    def _to_write(self, host: Host, keys: list[bytes], own: int, found: int) -> list[bytes]:
        """Which blocks the plan wants in the cluster now; those that are there are known to the host."""
        write = self._plan.write
        if write == "on-save":
            return keys[found:]
        if write == "second-use":
            return [key for key in keys[:own] if key not in self.master.blocks]
        evicted, host.evicted[:] = list(host.evicted), ()
        return [key for key in evicted if key not in self.master.blocks]

    def _write(self, number: int, keys: Sequence[bytes], now: float, done: Served) -> None:
        """Put ``keys``, beside the request: a put begins and ends with a call, and what is there is not written."""
        if not keys:
            return
        for _ in range(2):
            self._call(len(keys), now, done)
        network, size = self._network, self._plan.block_bytes
        sent: dict[int, int] = {}
        for key in keys:
            replicas = () if key in self.master.blocks else self.master.put(key, number, now)
            if not all(self.hosts[one].alive for one in replicas):
                self.master.revoke(key)
                done.failed += 1
                continue
            for one in replicas:
                sent[one] = sent.get(one, 0) + 1
        sent.pop(number, None)
        done.written = sum(sent.values()) * size
        self.hosts[number].sends.add(done.written / network.bandwidth, now)
        for one, blocks in sent.items():
            self.hosts[one].receives.add(blocks * size / network.bandwidth, now)

    def _call(self, keys: int, now: float, done: Served) -> float:
        """Seconds that a call of the master takes that names so many ``keys``."""
        cost = self._network.rpc_cost + keys * self._plan.pages_per_block * self._network.key_cost
        seconds = self._network.rpc_latency + cost * self.master_load.stretch(now)
        self.master_load.add(cost, now)
        done.calls += 1
        done.keys += keys * self._plan.pages_per_block
        return seconds
