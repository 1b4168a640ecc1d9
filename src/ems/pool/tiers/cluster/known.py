"""What a node knows of the cluster's keys, for as long as it believes it.

A brain.  Who asks for keys of which nothing is known has them asked for, once whoever else wants them.  What always
holds: what is believed grows old; a question that got no answer in time counts as a no; memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TypeVar

import msgspec

from ems.pool.keys import NO_DIRECTORY, Tail
from ems.pool.tiers.answers import StoredTail, Unknown

PRESENT_SECONDS = 5.0
"""How long a key that was there is believed to be; shorter than the lease that looking gave it."""
ABSENT_SECONDS = 1.0
WRITTEN_SECONDS = 60.0
"""How long what this node stored itself is not offered again."""
ASKED_SECONDS = 1.0
"""How long an answer is waited for."""
MOST_ASKED = 4096
"""Keys of one question."""
MOST_KEYS = 1 << 17
MOST_PLACES = 1 << 14


class _State(IntEnum):
    ABSENT = 0
    PRESENT = 1
    ASKED = 2


class _Belief(msgspec.Struct):
    state: _State
    until: float


class _Place(msgspec.Struct):
    """Tails of one directory; being asked for while ``tails`` is None."""

    tails: list[StoredTail] | None
    until: float


_Name = tuple[str, bytes]
_T = TypeVar("_T")


class KnownKeys:
    """Keys, and tails by their directories, of all namespaces."""

    def __init__(self) -> None:
        self._keys: OrderedDict[_Name, _Belief] = OrderedDict()
        self._written: OrderedDict[_Name, float] = OrderedDict()
        self._places: OrderedDict[_Name, _Place] = OrderedDict()
        self._tails: OrderedDict[_Name, Tail] = OrderedDict()
        """Of keys that a list of tails named."""

    # Keys

    def holds(self, namespace: str, keys: Sequence[bytes], now: float) -> int:
        """How many leading ``keys`` are there as far as is known."""
        count = 0
        for key in keys:
            belief = self._keys.get((namespace, key))
            if belief is None or belief.state is not _State.PRESENT or now >= belief.until:
                break
            count += 1
        return count

    def written(self, namespace: str, key: bytes, now: float) -> bool:
        """Whether this node stored it a short time ago."""
        return now < self._written.get((namespace, key), now)

    def unknown(self, namespace: str, keys: Sequence[bytes], now: float, directories: Sequence[bytes] = ()) -> Unknown:
        """What of ``keys`` is to be asked for; ``directories`` are those of each, and last the one behind all."""
        count, asked, near = 0, list[bytes](), list[bytes]()
        for at, key in enumerate(keys[:MOST_ASKED]):
            belief = self._keys.get((namespace, key))
            fresh = belief is not None and now < belief.until
            if belief is not None and (fresh or belief.state is _State.ASKED):
                if not fresh:  # the answer did not come
                    belief.state, belief.until = _State.ABSENT, now + ABSENT_SECONDS
                if belief.state is _State.ABSENT:
                    break
            else:
                asked.append(key)
                near += directories[at : at + 1]
            count += 1
        for key in asked:
            self._believe(namespace, key, _State.ASKED, now + ASKED_SECONDS)
        near += directories[count : count + 1] if asked else []
        for directory in near:
            if directory != NO_DIRECTORY:
                self.unknown_place(namespace, directory, now)
        return Unknown(count, asked, near)

    def answered(self, namespace: str, keys: Iterable[bytes], present: Iterable[bool], now: float) -> None:
        for key, there in zip(keys, present, strict=True):
            state, seconds = (_State.PRESENT, PRESENT_SECONDS) if there else (_State.ABSENT, ABSENT_SECONDS)
            self._believe(namespace, key, state, now + seconds)

    def stored(self, namespace: str, keys: Iterable[bytes], now: float) -> None:
        """The node stored ``keys``, or found them there when it was about to."""
        for key in keys:
            self._believe(namespace, key, _State.PRESENT, now + PRESENT_SECONDS)
            _put(self._written, (namespace, key), now + WRITTEN_SECONDS, MOST_KEYS)

    def lost(self, namespace: str, keys: Iterable[bytes], now: float) -> None:
        """``keys`` turned out not to be there, or to be damaged."""
        for key in keys:
            self._believe(namespace, key, _State.ABSENT, now + ABSENT_SECONDS)
            self._written.pop((namespace, key), None)

    def _believe(self, namespace: str, key: bytes, state: _State, until: float) -> None:
        _put(self._keys, (namespace, key), _Belief(state, until), MOST_KEYS)

    # Tails

    def find_tail(self, namespace: str, tail: Tail, now: float) -> StoredTail | None:
        """The listed tail that shares most leading tokens with ``tail``."""
        place = self._places.get((namespace, tail.directory))
        if place is None or now >= place.until:
            return None
        there = [one for one in place.tails or () if not self._is_absent(namespace, one.tail.key, now)]
        best = max(there, key=lambda one: one.tail.common(tail.tokens), default=None)
        return best if best is not None and best.tail.common(tail.tokens) else None

    def _is_absent(self, namespace: str, key: bytes, now: float) -> bool:
        belief = self._keys.get((namespace, key))
        return belief is not None and belief.state is _State.ABSENT and now < belief.until

    def unknown_place(self, namespace: str, directory: bytes, now: float) -> tuple[bool, bool]:
        """Whether tails of ``directory`` may turn up, and whether they are to be asked for, from now on under way."""
        place = self._places.get((namespace, directory))
        if place is not None and now < place.until:
            return place.tails is None, False
        if place is not None and place.tails is None:  # the answer did not come
            self.listed(namespace, directory, [], now)
            return False, False
        _put(self._places, (namespace, directory), _Place(None, now + ASKED_SECONDS), MOST_PLACES)
        return True, True

    def answered_places(self, namespace: str, directories: Iterable[bytes], lists: Iterable[bool], now: float) -> None:
        """Whether each of ``directories`` lists tails; which ones, who wants to know has to ask."""
        for directory, there in zip(directories, lists, strict=True):
            place = self._places.get((namespace, directory))
            if place is None or place.tails is not None:  # it was asked for in more than one way
                continue
            if there:
                del self._places[namespace, directory]
            else:
                self.listed(namespace, directory, [], now)

    def listed(self, namespace: str, directory: bytes, tails: list[StoredTail], now: float) -> None:
        until = now + (PRESENT_SECONDS if tails else ABSENT_SECONDS)
        _put(self._places, (namespace, directory), _Place(tails, until), MOST_PLACES)
        for one in tails:
            self.know_tail(namespace, one.tail)

    def know_tail(self, namespace: str, tail: Tail) -> None:
        _put(self._tails, (namespace, bytes(tail.key)), tail, MOST_PLACES * 4)

    def tail(self, namespace: str, key: bytes) -> Tail | None:
        return self._tails.get((namespace, key))

    def drop(self, namespace: str | None = None) -> None:
        """Nothing is known any more, of ``namespace`` or at all."""
        for table in (self._keys, self._written, self._places, self._tails):
            for name in [name for name in list(table) if namespace is None or name[0] == namespace]:
                table.pop(name, None)


def _put(table: OrderedDict[_Name, _T], name: _Name, value: _T, most: int) -> None:
    table[name] = value
    table.move_to_end(name)
    while len(table) > most:
        table.popitem(last=False)
