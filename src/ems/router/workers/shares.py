"""Which loads and prefixes a worker tells the others, and what theirs make of its fleet and its chooser.  A brain.

What always holds: figures are told whole, never as differences, so that a message that was missed is made up for by the
next one; an instance's load is this worker's own and the sum of what each other worker told last; a worker that is gone
has nothing anywhere.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Final

from ems.http.address import Address
from ems.router.choosing.chooser import Chooser
from ems.router.choosing.prefix_index import Place
from ems.router.choosing.prompt import Prompt
from ems.router.fleet import Fleet, Hold, Instance, Load, Role
from ems.router.workers.messages import Learned, State

MOST_LEARNED: Final = 32
"""Requests of which a message tells."""

Key = tuple[Role, Address]


class SharedFleet(Fleet):
    """A fleet on which others send requests, too."""

    def __init__(self, lost: Callable[[Instance], None], wake: Callable[[], None]) -> None:
        super().__init__(lost)
        self._wake = wake
        """Called when there is something to tell; not again before it was told."""
        self.changed: set[Instance] = set()
        self._elsewhere: dict[Key, Load] = {}

    def hold(self, instance: Instance, cost: int, queued: int = 0) -> Hold:
        if instance not in self.changed:
            self._change(instance)
        return super().hold(instance, cost, queued)

    def release(self, hold: Hold) -> None:
        if hold.instance not in self.changed:
            self._change(hold.instance)
        super().release(hold)

    def _change(self, instance: Instance) -> None:
        self.changed.add(instance)
        self._wake()

    def add(self, role: Role, address: Address, now: float, *, trusted: bool) -> bool:
        added = super().add(role, address, now, trusted=trusted)
        self._listed[role][address].count_elsewhere(self._elsewhere.get((role, address), Load()))
        return added

    def count(self, key: Key, before: Load, after: Load) -> None:
        """Another worker had ``before`` on an instance, and now has ``after``."""
        load = self._elsewhere.pop(key, Load()).changed(before, after)
        if any(load):
            self._elsewhere[key] = load
        if (instance := self.find(*key)) is not None:
            instance.count_elsewhere(load)
            if after.running > before.running:
                self._turn += 1
                instance.turn = self._turn


class SharedChooser(Chooser):
    """A chooser that notes what it sends where, for the others; what it told them before only once a generation."""

    def __init__(self, session_lifetime: float) -> None:
        super().__init__(session_lifetime=session_lifetime)
        self.learned: deque[Learned] = deque(maxlen=32 * MOST_LEARNED)

    def sent(self, instance: Instance, prompt: Prompt, now: float) -> None:
        bit, session = self._bit(instance, Place.ENGINE), prompt.session
        named = [self._index.unlearned(hashes, bit) for hashes in (prompt.hashes, prompt.text_hashes)]
        super().sent(instance, prompt, now)
        for hashes in named:
            if hashes or session:
                self.learned.append(Learned(instance.role, instance.address, array("I", hashes).tobytes(), session))
            session = b""

    def learn(self, instance: Instance, learned: Learned, now: float) -> None:
        super().sent(instance, Prompt(0, 0, array("I", learned.hashes), learned.session), now)


class Shares:
    """One worker's; times are seconds on one monotonic clock."""

    def __init__(self, session_lifetime: float, wake: Callable[[], None] = lambda: None) -> None:
        self.chooser = SharedChooser(session_lifetime)
        self.fleet = SharedFleet(self.chooser.forget, wake)
        self.others: dict[int, dict[Key, Load]] = {}
        """What each other worker told last."""
        self._told: dict[Key, Load] = {}

    def state(self, *, full: bool = False) -> State | None:
        """Return what the others have to be told next; None when it is nothing."""
        fleet, learned = self.fleet, self.chooser.learned
        loads = []
        changed = {(one.role, one.address) for one in fleet.changed}
        for key in changed | self._told.keys() if full else changed:
            instance = fleet.find(*key)
            own = Load() if instance is None else instance.own
            if own != self._told.pop(key, Load()) or (full and any(own)):
                loads.append((*key, own))
            if any(own):
                self._told[key] = own
        # A prompt is computed without a word of the fleet: what queues is looked at again.
        fleet.changed = {one for one in fleet.changed if one.own.queued}
        told = [learned.popleft() for _ in range(min(len(learned), MOST_LEARNED))]
        return State(full, loads, told) if full or loads or told else None

    def take(self, worker: int, state: State, now: float) -> bool:
        """Take in what another worker told; return whether it was unknown."""
        unknown = worker not in self.others
        had = self.others.setdefault(worker, {})
        told = {(role, address): load for role, address, load in state.loads}
        for key, load in (dict.fromkeys(had, Load()) | told if state.full else told).items():
            self.fleet.count(key, had.pop(key, Load()), load)
            if any(load):
                had[key] = load
        for one in state.learned:
            if (instance := self.fleet.find(one.role, one.address)) is not None:
                self.chooser.learn(instance, one, now)
        return unknown

    def forget(self, worker: int) -> None:
        """A worker is gone."""
        for key, load in self.others.pop(worker, {}).items():
            self.fleet.count(key, load, Load())
