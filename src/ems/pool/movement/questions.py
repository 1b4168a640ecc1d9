"""What a tier that does not know by itself what it has is asked next.

A brain.  A question is about some keys and belongs to a party: a tenant, or on an open node a user.  What always holds:
so many are under way at a time; between two turns of a party every other one that waits has its turn; what a party
asks about is bounded, whatever others ask.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

MOST_PARTY_KEYS = 1 << 14
"""Keys that the questions of one party are about; what else it looks up counts as missing meanwhile."""

_Question = TypeVar("_Question", bound=Hashable)


class Questions(Generic[_Question]):
    """The questions to one tier, of which ``at_once`` are under way at most."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._waiting: OrderedDict[str, deque[_Question]] = OrderedDict()
        """By party; the first is next."""
        self._asked: dict[_Question, tuple[str, int]] = {}
        """Whose each question is, and about how many keys."""
        self._keys: Counter[str] = Counter()
        self._under_way = 0

    def __len__(self) -> int:
        """How many wait or are under way."""
        return len(self._asked)

    def has_room(self, party: str) -> bool:
        """Whether ``party`` may have more asked."""
        return self._keys[party] < MOST_PARTY_KEYS

    def add(self, question: _Question, party: str, keys: int) -> None:
        self._asked[question] = party, keys
        self._keys[party] += keys
        self._waiting.setdefault(party, deque()).append(question)

    def next(self) -> _Question | None:
        """The question that is under way from now on; None while enough are, or none waits."""
        if self._under_way >= self._at_once or not self._waiting:
            return None
        party, waiting = next(iter(self._waiting.items()))
        question = waiting.popleft()
        self._waiting.move_to_end(party)
        if not waiting:
            del self._waiting[party]
        self._under_way += 1
        return question

    def ended(self, question: _Question) -> None:
        """A question that was under way has its answer, or none will come."""
        self._under_way -= 1
        self._forget(question)

    def drop(self) -> None:
        """What waits is not asked any more."""
        for waiting in self._waiting.values():
            for question in waiting:
                self._forget(question)
        self._waiting.clear()

    def _forget(self, question: _Question) -> None:
        party, keys = self._asked.pop(question)
        self._keys[party] -= keys
        if not self._keys[party]:
            del self._keys[party]
