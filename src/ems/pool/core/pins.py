"""Pages that stay by request: pinned for a time, or awaited by requests that were announced.

Two strengths.  A pinned page does not leave before its time; pins cover at most half of a namespace.  An awaited page
leaves only when nothing else can, because whoever waits for it can compute it as well.  What always holds: a key is
awaited as often as announcements name it, once what was put off is settled; an announcement ends with a word, with its
owner, or by itself after :data:`ANNOUNCED_SECONDS`; what announcements name is bounded for one owner, for one tenant
and for all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ANNOUNCED_SECONDS = 120.0
"""How long an announcement lasts at most: a request that waits longer is looked up by then, or gone."""
MAX_ANNOUNCED = 1 << 18
"""Keys that all announcements may name together; the oldest one of the tenant that has most gives way."""
MAX_ANNOUNCED_TENANT = 1 << 17
"""Keys that the announcements of one tenant may name; on an open node there is one tenant."""
MAX_ANNOUNCED_EACH = 1 << 16
"""Keys that the announcements of one owner may name."""
ANNOUNCEMENT_WEIGHT = 16
"""Keys that an announcement counts for beside those that it names."""
SETTLED_AT_ONCE = 1024
"""Keys that become awaited, or are not any more, in one go."""
PINNED_SHARE = 0.5
"""Share of a namespace that pins may cover."""
MAX_PIN_SECONDS = 24 * 3600.0
"""How long a pin lasts at most."""


class PinSet:
    """What of one namespace stays by request, by key."""

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant
        self.pinned: dict[bytes, float] = {}
        """Until when."""
        self.awaited: Counter[bytes] = Counter()
        """By how many announcements."""

    def pin(self, keys: Iterable[bytes], until: float, most: int) -> int:
        """Pin those of ``keys`` for which there is room among ``most`` pins; a later end counts.  Returns how many."""
        count = 0
        for key in keys:
            before = self.pinned.get(key)
            if before is None and len(self.pinned) >= most:
                continue
            self.pinned[key] = until if before is None else max(before, until)
            count += 1
        return count

    def unpin(self, keys: Iterable[bytes]) -> int:
        """End the pins of ``keys``; returns how many there were."""
        return sum(self.pinned.pop(key, None) is not None for key in keys)

    def tick(self, now: float) -> None:
        for key in [key for key, until in self.pinned.items() if until <= now]:
            del self.pinned[key]


@dataclass(slots=True, eq=False)
class Announcement:
    """One request of ``client_id`` that waits for ``keys`` of the namespace of ``pins``, until then at the latest."""

    client_id: int
    pins: PinSet
    keys: Sequence[bytes]
    until: float

    @property
    def weight(self) -> int:
        return len(self.keys) + ANNOUNCEMENT_WEIGHT


class Announcements:
    """Requests that wait, of all owners."""

    def __init__(self) -> None:
        self._all: dict[int, Announcement] = {}
        self._of: dict[int | str | None, OrderedDict[int, None]] = {}
        """The numbers of each owner's, of each tenant's and of all announcements (None), the oldest first."""
        self._weight: Counter[int | str | None] = Counter()
        self._unsettled: deque[tuple[Counter[bytes], Sequence[bytes], int]] = deque()
        """Keys that become awaited (1), or are not any more (-1)."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Announcement]:
        return iter(self._all.values())

    def announce(self, number: int, client_id: int, pins: PinSet, keys: Sequence[bytes], now: float) -> None:
        """A request of ``client_id`` waits for ``keys`` of the namespace of ``pins``: announcement ``number``."""
        keys = keys[: MAX_ANNOUNCED_EACH - ANNOUNCEMENT_WEIGHT]
        one, tenant = Announcement(client_id, pins, keys, now + ANNOUNCED_SECONDS), pins.tenant
        self._all[number] = one
        for name in (client_id, tenant, None):
            self._of.setdefault(name, OrderedDict())[number] = None
            self._weight[name] += one.weight
        self._put_off(one, 1)
        while self._weight[client_id] > MAX_ANNOUNCED_EACH:
            self._end(next(iter(self._of[client_id])))
        while self._weight[tenant] > MAX_ANNOUNCED_TENANT:
            self._end(next(iter(self._of[tenant])))
        while self._weight[None] > MAX_ANNOUNCED:
            most = max((name for name in self._of if isinstance(name, str)), key=self._weight.__getitem__)
            self._end(next(iter(self._of[most])))

    def withdraw(self, client_id: int, number: int) -> bool:
        """The request waits no longer; False when ``client_id`` has no such announcement any more."""
        held = self._all.get(number)
        if held is None or held.client_id != client_id:
            return False
        self._end(number)
        return True

    def leave(self, client_id: int) -> None:
        for number in list(self._of.get(client_id, ())):
            self._end(number)

    def tick(self, now: float) -> None:
        while None in self._of:
            number = next(iter(self._of[None]))
            if self._all[number].until > now:
                return
            self._end(number)

    def _end(self, number: int) -> None:
        held = self._all.pop(number)
        self._put_off(held, -1)
        for name in (held.client_id, held.pins.tenant, None):
            self._weight[name] -= held.weight
            del self._of[name][number]
            if not self._of[name]:
                del self._of[name], self._weight[name]

    def _put_off(self, one: Announcement, change: int) -> None:
        for start in range(0, len(one.keys), SETTLED_AT_ONCE):
            self._unsettled.append((one.pins.awaited, one.keys[start : start + SETTLED_AT_ONCE], change))
        self.settle_some()

    @property
    def unsettled(self) -> bool:
        return bool(self._unsettled)

    def settle_some(self) -> None:
        """Let :data:`SETTLED_AT_ONCE` keys become awaited, or not be so any more."""
        if self._unsettled:
            awaited, keys, change = self._unsettled.popleft()
            if change > 0:
                awaited.update(keys)
                return
            for key in keys:
                left = awaited[key] - 1
                if left:
                    awaited[key] = left
                else:
                    del awaited[key]
