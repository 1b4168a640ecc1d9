"""Pages that stay by request: pinned for a time, or awaited by requests that were announced.

Two strengths.  A pinned page does not leave before its time; pins cover at most half of a namespace.  An awaited page
leaves only when nothing else can, because whoever waits for it can compute it as well.  What always holds: a key is
awaited as often as announcements name it; an announcement ends with a word, with its owner, or by itself after
:data:`ANNOUNCED_SECONDS`; the keys of one owner's announcements are bounded, and those of all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

ANNOUNCED_SECONDS = 120.0
"""How long an announcement lasts at most: a request that waits longer is looked up by then, or gone."""
MAX_ANNOUNCED = 1 << 18
"""Keys that all announcements may name together; the oldest announcement gives way."""
MAX_ANNOUNCED_EACH = 1 << 16
"""Keys that the announcements of one owner may name."""
PINNED_SHARE = 0.5
"""Share of a namespace that pins may cover."""
MAX_PIN_SECONDS = 24 * 3600.0
"""How long a pin lasts at most."""


class Kept:
    """What of one namespace stays by request, by key."""

    __slots__ = ("awaited", "pinned")

    def __init__(self) -> None:
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
        """End the pins whose time is over."""
        for key in [key for key, until in self.pinned.items() if until <= now]:
            del self.pinned[key]


class Announcement:
    """One request of ``owner`` that waits for ``keys`` of the namespace of ``kept``, until then at the latest."""

    __slots__ = ("kept", "keys", "number", "owner", "until")

    def __init__(self, number: int, owner: int, kept: Kept, keys: Sequence[bytes], until: float) -> None:
        self.number = number
        self.owner = owner
        self.kept = kept
        self.keys = keys
        self.until = until


class Announcements:
    """Requests that wait, of all owners."""

    def __init__(self) -> None:
        self._all: OrderedDict[int, Announcement] = OrderedDict()
        self._of: dict[int, deque[int]] = {}
        self._keys: Counter[int] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Announcement]:
        """All that have not ended, the oldest first."""
        return iter(self._all.values())

    def announce(self, number: int, owner: int, kept: Kept, keys: Sequence[bytes], now: float) -> None:
        """A request of ``owner`` waits for ``keys`` of the namespace of ``kept``; its announcement is ``number``."""
        self.go_on(Announcement(number, owner, kept, keys[:MAX_ANNOUNCED_EACH], now + ANNOUNCED_SECONDS))

    def go_on(self, one: Announcement) -> None:
        """``one`` counts, which is younger than all others; it may be one that another process knew."""
        owner = one.owner
        self._all[one.number] = one
        self._of.setdefault(owner, deque()).append(one.number)
        self._keys[owner] += len(one.keys)
        self._total += len(one.keys)
        one.kept.awaited.update(one.keys)
        while self._keys[owner] > MAX_ANNOUNCED_EACH:
            self._end(self._of[owner][0])
        while self._total > MAX_ANNOUNCED:
            self._end(next(iter(self._all)))

    def withdraw(self, owner: int, number: int) -> bool:
        """The request waits no longer; False when ``owner`` has no such announcement any more."""
        held = self._all.get(number)
        if held is None or held.owner != owner:
            return False
        self._end(number)
        return True

    def leave(self, owner: int) -> None:
        """``owner`` is gone."""
        for number in list(self._of.get(owner, ())):
            self._end(number)

    def tick(self, now: float) -> None:
        """End what has lasted too long."""
        while self._all:
            number, oldest = next(iter(self._all.items()))
            if oldest.until > now:
                return
            self._end(number)

    def _end(self, number: int) -> None:
        held = self._all.pop(number)
        awaited = held.kept.awaited
        for key in held.keys:
            left = awaited[key] - 1
            if left:
                awaited[key] = left
            else:
                del awaited[key]
        own = self._of[held.owner]
        if own[0] == number:
            own.popleft()
        else:
            own.remove(number)
        self._keys[held.owner] -= len(held.keys)
        self._total -= len(held.keys)
        if not own:
            del self._of[held.owner], self._keys[held.owner]

    def check(self) -> list[str]:
        """What does not hold, one sentence each; empty when all is well."""
        broken = []
        awaited: dict[int, Counter[bytes]] = {}
        kept: dict[int, Kept] = {}
        for held in self._all.values():
            kept[id(held.kept)] = held.kept
            awaited.setdefault(id(held.kept), Counter()).update(held.keys)
        broken += [
            "a key is awaited by another number of announcements than there are"
            for one in kept
            if kept[one].awaited != awaited[one]
        ]
        if self._total != sum(len(held.keys) for held in self._all.values()):
            broken.append("the keys of announcements are miscounted")
        if sorted(self._all) != sorted(number for own in self._of.values() for number in own):
            broken.append("an announcement belongs to nobody")
        return broken
