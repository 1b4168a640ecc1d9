"""Places for requests that run at once, and who gets the next one.

A request that finds a place free runs.  Otherwise it waits, and when a place is free again the next is chosen:

1. by priority, the lower number first;
2. a request whose session answered a short while ago before others, since its cache is still there, but only
   ``BOOSTS_IN_A_ROW`` times while others wait;
3. by user: who used fewer tokens lately goes first.  Use fades by half in ``half_life`` seconds;
4. of one user: the session that answered last first, then who waits longest.

When the queue is full, the user who waits with the most requests gives way to one who waits with fewer, so that no user
can keep others out.

All uses fade alike, so their order does not change with time and a heap can hold it: a use is kept multiplied by the
growth that the fading undoes.  What always holds: there are never more requests running than places were given; a
place is given back once; a request that left, ran out of time or was refused is nowhere in here.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

BOOSTS_IN_A_ROW: Final = 3
MOST_USERS: Final = 65536
MOST_SESSIONS: Final = 4096
_REBASE: Final = 60.0
"""Half-lives after which uses are written anew, long before a float overflows."""


class State(StrEnum):
    """Where a request is."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Place:
    """One request's turn; changed by its queue only."""

    user: str
    tokens: int
    """What it is expected to use, weighted."""
    deadline: float
    """When it has waited long enough; not before that of a request that came earlier."""
    priority: int = 0
    session: str = ""
    state: State = State.NEW
    boosted: float = -math.inf
    """When its session answered last; minus infinity when too long ago."""
    order: int = 0


_Lane = tuple[int, bool, str]
"""Priority, not boosted, user: requests that are alike but for their own order."""


@dataclass(slots=True)
class _User:
    use: float = 0.0
    waiting: int = 0
    lanes: set[_Lane] = field(default_factory=set)


class Queue:
    """One queue.  Times are seconds on one monotonic clock; ``capacity`` 0 is without bound."""

    def __init__(self, *, capacity: int, size: int, half_life: float = 300.0, boost_seconds: float = 0.0) -> None:
        self.capacity = capacity
        self.size = size
        self.running = 0
        self._growth = math.log(2) / half_life
        self._rebase_after = _REBASE * half_life
        self._boost_seconds = boost_seconds
        self._base = 0.0
        self._users: OrderedDict[str, _User] = OrderedDict()
        self._sessions: OrderedDict[str, float] = OrderedDict()
        self._lanes: dict[_Lane, list[tuple[float, int, Place]]] = {}
        self._heads: list[tuple[int, bool, float, int, _Lane]] = []
        """A heap with one true entry for each lane that is not empty, and old ones that are skipped."""
        self._entries: dict[_Lane, int] = {}
        self._waiting: OrderedDict[Place, None] = OrderedDict()
        """In the order in which they came, which is that of their deadlines."""
        self._order = 0
        self._boosts = 0

    def offer(self, place: Place, now: float) -> list[Place]:
        """Let a request in: it runs, waits, or is gone because the queue is full.  Return who is gone in its stead."""
        self._order += 1
        place.order = self._order
        if not self._waiting and self._free:
            self._run(place, now)
            return []
        if self.waiting < self.size:
            self._wait(place, now)
            return []
        victim = self._victim(place)
        if victim is None:
            place.state = State.GONE
            return []
        self._remove(victim)
        self._wait(place, now)
        return [victim]

    def leave(self, place: Place, now: float, used: int | None = None) -> list[Place]:
        """Take a request out, wherever it is; ``used`` says what it really used.  Return who runs now.

        ``used`` is None when it did not answer: it counts as nothing then.
        """
        if place.state is State.WAITING:
            self._remove(place)
            return []
        if place.state is not State.RUNNING:
            return []
        place.state = State.GONE
        self.running -= 1
        self._charge(place.user, (used or 0) - place.tokens, now)
        if used is not None and place.session and self._boost_seconds:
            self._sessions[place.session] = now
            self._sessions.move_to_end(place.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return self.grant(now) if self._waiting else []

    def grant(self, now: float) -> list[Place]:
        """Give free places to who is next; to be called when there may be more of them."""
        granted = []
        while self.waiting and self._free:
            place = self._next()
            self._remove(place)
            self._run(place, now)
            granted.append(place)
        return granted

    def expire(self, now: float) -> list[Place]:
        """Take out who has waited for too long."""
        late = []
        while (due := self.next_deadline()) is not None and due <= now:
            late.append(next(iter(self._waiting)))
            self._remove(late[-1])
        return late

    def next_deadline(self) -> float | None:
        return next(iter(self._waiting)).deadline if self._waiting else None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def use_of(self, user: str, now: float) -> float:
        """Weighted tokens that a user used lately."""
        known = self._users.get(user)
        return 0.0 if known is None else known.use * math.exp(-self._growth * (now - self._base))

    def waiting_of(self, user: str) -> int:
        known = self._users.get(user)
        return 0 if known is None else known.waiting

    @property
    def _free(self) -> bool:
        return not self.capacity or self.running < self.capacity

    def _run(self, place: Place, now: float) -> None:
        place.state = State.RUNNING
        self.running += 1
        self._charge(place.user, place.tokens, now)

    def _wait(self, place: Place, now: float) -> None:
        place.state = State.WAITING
        answered = self._sessions.get(place.session, -math.inf) if place.session else -math.inf
        place.boosted = answered if now - answered < self._boost_seconds else -math.inf
        lane = _lane(place)
        queue = self._lanes.setdefault(lane, [])
        heapq.heappush(queue, (-place.boosted, place.order, place))
        user = self._user(place.user)
        user.waiting += 1
        user.lanes.add(lane)
        self._waiting[place] = None
        self._enter(lane)

    def _remove(self, place: Place) -> None:
        place.state = State.GONE
        del self._waiting[place]
        user = self._users[place.user]
        user.waiting -= 1
        lane = _lane(place)
        queue = self._lanes[lane]
        while queue and queue[0][2].state is not State.WAITING:
            heapq.heappop(queue)
        if not queue:
            del self._lanes[lane]
            self._entries.pop(lane, None)
            user.lanes.discard(lane)
        elif len(queue) > 2 * user.waiting + 64:
            queue[:] = [entry for entry in queue if entry[2].state is State.WAITING]
            heapq.heapify(queue)

    def _next(self) -> Place:
        """The request whose turn it is; it stays where it is."""
        place = self._head(boosted=True)
        if place is None or place.boosted == -math.inf:
            self._boosts = 0
            assert place is not None
            return place
        if self._boosts >= BOOSTS_IN_A_ROW:
            other = self._head(boosted=False, priority=place.priority)
            if other is not None:
                self._boosts = 0
                return other
        self._boosts += 1
        return place

    def _head(self, *, boosted: bool, priority: int | None = None) -> Place | None:
        """Who is first; with ``boosted`` false, who is first of those of a priority that are not boosted."""
        skipped = []
        found = None
        while self._heads:
            entry = self._heads[0]
            lane = entry[4]
            if self._entries.get(lane) != entry[3]:
                heapq.heappop(self._heads)
                continue
            if boosted or lane[1]:
                found = None if priority is not None and lane[0] != priority else self._lanes[lane][0][2]
                break
            skipped.append(heapq.heappop(self._heads))
        for entry in skipped:
            heapq.heappush(self._heads, entry)
        return found

    def _enter(self, lane: _Lane) -> None:
        """Put a lane where its user's use puts it; its older entry is skipped from now on."""
        self._order += 1
        self._entries[lane] = self._order
        heapq.heappush(self._heads, (lane[0], lane[1], self._users[lane[2]].use, self._order, lane))
        if len(self._heads) > 2 * len(self._entries) + 64:
            self._heads = [entry for entry in self._heads if self._entries.get(entry[4]) == entry[3]]
            heapq.heapify(self._heads)

    def _victim(self, place: Place) -> Place | None:
        """Who gives way to a new request: the newest of the user who waits most, if that is more than its own."""
        own = self._users.get(place.user)
        waiters = (self._users[name] for _, _, name in self._lanes)  # all users are many more
        most = max(waiters, key=lambda user: user.waiting, default=None)
        if most is None or most.waiting <= (own.waiting if own else 0) + 1:
            return None
        waiting = (entry[2] for lane in most.lanes for entry in self._lanes[lane])
        return max(
            (one for one in waiting if one.state is State.WAITING),
            key=lambda one: (one.priority, one.order),
            default=None,
        )

    def _user(self, name: str) -> _User:
        user = self._users.get(name)
        if user is None:
            user = self._users[name] = _User()
            if len(self._users) > MOST_USERS:
                self._forget_idle()
        return user

    def _forget_idle(self) -> None:
        for name, user in self._users.items():
            if not user.waiting:
                del self._users[name]
                return

    def _charge(self, name: str, tokens: int, now: float) -> None:
        if now - self._base > self._rebase_after:
            self._rebase(now)
        user = self._user(name)
        user.use = max(0.0, user.use + tokens * math.exp(self._growth * (now - self._base)))
        self._users.move_to_end(name)
        for lane in user.lanes:
            self._enter(lane)

    def _rebase(self, now: float) -> None:
        """Count growth from now on."""
        shrink = math.exp(-self._growth * (now - self._base))
        self._base = now
        for user in self._users.values():
            user.use *= shrink
        for lane in self._lanes:
            self._enter(lane)


def _lane(place: Place) -> _Lane:
    return place.priority, place.boosted == -math.inf, place.user
