"""The fleet: the instances of both roles, what runs on them, which may take a request, which are leaving.

What always holds: an instance's load is the sum of the holds on it, with those of the router's other workers, and never
negative; an instance that was removed
gets no new request and is forgotten when its last one has ended, no matter what the others do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ems.http.address import Address
from ems.router.breaker import Breaker
from ems.router.choosing.figures import Figures


class Role(StrEnum):
    """What an instance is for."""

    PREFILL = "prefill"
    DECODE = "decode"


class Load(NamedTuple):
    """What a part of the requests is to an instance; see there."""

    load: int = 0
    queued: int = 0
    running: int = 0

    def changed(self, before: Load, after: Load) -> Load:
        return Load(*(had - less + more for had, less, more in zip(self, before, after, strict=True)))


_NOTHING = Load()


@dataclass(slots=True, eq=False)
class Instance:
    """One engine in one role.  Changed by its fleet only."""

    role: Role
    address: Address
    breaker: Breaker
    load: int = 0
    """Estimated tokens of the requests that run here."""
    queued: int = 0
    """Estimated tokens of prompts that still have to be computed here."""
    running: int = 0
    served: int = 0
    """Requests ever sent here."""
    failures: int = 0
    """Failures ever seen here."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """The model servers that it is an instance of, and its group in each; empty where there are none."""
    figures: Figures = field(default_factory=Figures)
    """What the engine says of itself, as far as it is asked."""
    bootstrap_port: int = 0
    """Where the decodes of an SGLang prefill meet it."""
    pod: str = ""
    """What its pod is called, if it is one."""
    draining: bool = False
    turn: int = 0
    """Grows with each request sent here; the smallest one has waited longest."""

    elsewhere: Load = _NOTHING
    """What other workers of this router have here, which the figures above include."""

    @property
    def own(self) -> Load:
        """What this worker has here."""
        return Load(self.load, self.queued, self.running).changed(self.elsewhere, _NOTHING)

    def count_elsewhere(self, elsewhere: Load) -> None:
        self.load, self.queued, self.running = self.own.changed(_NOTHING, elsewhere)
        self.elsewhere = elsewhere

    @property
    def name(self) -> str:
        """Its pod's name, or its address."""
        return self.pod or str(self.address)


class Hold:
    """A request's share of an instance's load; releasing it twice is harmless."""

    __slots__ = ("_fleet", "cost", "instance", "queued")

    def __init__(self, fleet: Fleet, instance: Instance, cost: int, queued: int) -> None:
        self._fleet: Fleet | None = fleet
        self.instance = instance
        self.cost = cost
        self.queued = queued

    def computed(self) -> None:
        """The prompt is computed: it queues no longer."""
        self.instance.queued -= self.queued
        self.queued = 0

    def release(self) -> None:
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.release(self)


class Fleet:
    """All instances; times are seconds on one monotonic clock."""

    def __init__(self, lost: Callable[[Instance], None] = lambda _: None) -> None:
        self._lost = lost
        """Told of an instance that is gone or put aside: it does not have what it had."""
        self._listed: dict[Role, dict[Address, Instance]] = {role: {} for role in Role}
        self._leaving: dict[tuple[Role, Address], Instance] = {}
        self._turn = 0

    def add(self, role: Role, address: Address, now: float, *, trusted: bool) -> bool:
        """List an instance; one that was leaving stays instead.  Return False when it was listed already.

        A trusted instance may be used at once, another one after its first probe has passed.
        """
        if address in self._listed[role]:
            return False
        instance = self._leaving.pop((role, address), None)
        if instance is None:
            instance = Instance(role, address, Breaker(now, trusted=trusted))
        instance.draining = False
        self._listed[role][address] = instance
        return True

    def remove(self, role: Role, address: Address) -> bool:
        """Give an instance no new request and forget it after its last; return False when it is not listed."""
        instance = self._listed[role].pop(address, None)
        if instance is None:
            return False
        instance.draining = True
        if instance.own.running:
            self._leaving[role, address] = instance
        else:
            self._lost(instance)
        return True

    def listed(self, role: Role, server: str = "") -> list[Instance]:
        """Return those of one model server, or all."""
        instances = self._listed[role].values()
        return [instance for instance in instances if server in instance.groups] if server else list(instances)

    def find(self, role: Role, address: Address) -> Instance | None:
        return self._listed[role].get(address) or self._leaving.get((role, address))

    def leaving(self) -> list[Instance]:
        return list(self._leaving.values())

    def belongs(
        self, role: Role, address: Address, groups: Mapping[str, str], bootstrap_port: int = 0, pod: str = ""
    ) -> None:
        """Set which model servers a listed instance is of, its group in each, and what its pod is called."""
        instance = self._listed[role][address]
        instance.groups, instance.bootstrap_port, instance.pod = groups, bootstrap_port, pod

    def usable(self, role: Role, server: str = "") -> list[Instance]:
        """Return those that may get requests, of one model server or of all."""
        return [
            instance
            for instance in self._listed[role].values()
            if instance.breaker.usable and (not server or server in instance.groups)
        ]

    def ready(self) -> bool:
        return any(one.breaker.usable and one.breaker.proven for one in self._listed[Role.DECODE].values())

    def retry_after(self, role: Role, now: float) -> int:
        """Whole seconds, at least 1, after which an instance of this role may be back."""
        waits = [one.breaker.probe_at - now for one in self._listed[role].values() if one.breaker.probe_at is not None]
        return max(1, math.ceil(min(waits, default=1.0)))

    def hold(self, instance: Instance, cost: int, queued: int = 0) -> Hold:
        self._turn += 1
        instance.turn = self._turn
        instance.load += cost
        instance.queued += queued
        instance.running += 1
        instance.served += 1
        return Hold(self, instance, cost, queued)

    def release(self, hold: Hold) -> None:
        instance = hold.instance
        hold.computed()
        instance.load -= hold.cost
        instance.running -= 1
        if instance.draining and not instance.own.running:
            self._leaving.pop((instance.role, instance.address), None)
            self._lost(instance)

    def succeeded(self, instance: Instance) -> None:
        instance.breaker.succeeded()

    def failed(self, instance: Instance, now: float) -> bool:
        """Record a broken or impossible connection; return whether the instance is put aside by it."""
        instance.failures += 1
        aside = instance.breaker.failed(now)
        if aside:
            self._lost(instance)
        return aside

    def probe_failed(self, instance: Instance, now: float) -> bool:
        """Record that an instance is not healthy; return whether it is put aside by it."""
        aside = instance.breaker.probe_failed(now)
        if aside:
            self._lost(instance)
        return aside

    def suspect(self, instance: Instance, now: float) -> None:
        """Record an answer that is a server error: the instance is alive, its health is asked for."""
        instance.failures += 1
        instance.breaker.suspect(now)

    def due_probes(self, now: float) -> list[Instance]:
        due = [instance for instance in self._everyone() if instance.breaker.due(now)]
        for instance in due:
            instance.breaker.probe_started()
        return due

    def next_probe(self) -> float | None:
        due = (one.breaker.probe_at for one in self._everyone() if not one.breaker.probing)
        return min((at for at in due if at is not None), default=None)

    def _everyone(self) -> Iterator[Instance]:
        for instances in self._listed.values():
            yield from instances.values()
