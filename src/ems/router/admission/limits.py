"""Limits of tokens: for a route, a key or a user, of the prompt and of the answer, in buckets that refill with time.

A bucket holds at most what one unit of time allows and refills evenly, as Kthena's does.  What a prompt has is taken
before the request starts and given back when it fails.  What an answer will have is not known then: it takes that the
bucket is not empty, and the answer's tokens are taken at its end, below zero if need be.

What always holds: a bucket is never above its limit; a request takes from all of its buckets or from none; tokens are
given back at most once; a limit that is removed limits nothing from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ems.kthena.rate_limit import RateLimit

TOLERANCE: Final = 1e-6
"""Tokens by which sums of fractions may be off."""


class Kind(StrEnum):
    """What a bucket counts; the values are labels of Kthena's metrics."""

    INPUT = "input_tokens"
    OUTPUT = "output_tokens"


Name = tuple[str, Kind]
"""A scope and what is counted: the name of a bucket."""


class Exceeded(NamedTuple):
    """The bucket that has too little, and what it holds at most."""

    scope: str
    kind: Kind
    most: int
    retry_after: int | None
    """Whole seconds, at least 1, after which it has enough; None when it never has."""


class Bucket:
    """Tokens that are left of a limit."""

    __slots__ = ("at", "left", "limit", "seconds")

    def __init__(self, limit: int, seconds: int, now: float) -> None:
        self.limit = limit
        self.seconds = seconds
        self.left = float(limit)
        self.at = now

    def refill(self, now: float) -> None:
        if now > self.at:
            self.left = min(self.left + (now - self.at) * self.limit / self.seconds, float(self.limit))
            self.at = now

    def move(self, tokens: float, now: float) -> None:
        self.refill(now)
        self.left = min(self.left + tokens, float(self.limit))

    def resize(self, limit: int, seconds: int, now: float) -> None:
        """Keep the share that is left: a changed limit is no reason for a full bucket."""
        self.refill(now)
        self.left = self.left * limit / self.limit
        self.limit, self.seconds = limit, seconds

    def wait(self, wanted: float) -> int:
        """Whole seconds until ``wanted`` tokens, no more than the limit, are left."""
        return max(1, math.ceil((wanted - self.left) * self.seconds / self.limit - TOLERANCE))


class Taken:
    """What a request took of its buckets, to be settled or given back; only the first of these counts."""

    __slots__ = ("_buckets", "_move", "_tokens")

    def __init__(
        self, buckets: Sequence[tuple[Name, Any]], tokens: int, move: Callable[[list[Any], int, float], None]
    ) -> None:
        """Buckets by their names, the prompt's tokens, and what puts tokens into some of the buckets."""
        self._buckets = buckets
        self._tokens = tokens
        self._move = move

    def settle(self, output_tokens: int, now: float) -> None:
        """Take the answer's tokens; the prompt's stay taken."""
        self._end(Kind.OUTPUT, -output_tokens, now)

    def give_back(self, now: float) -> None:
        self._end(Kind.INPUT, self._tokens, now)

    def _end(self, kind: Kind, tokens: int, now: float) -> None:
        moved = [bucket for name, bucket in self._buckets if name[1] is kind]
        self._buckets = ()
        if moved and tokens:
            self._move(moved, tokens, now)


def _move(buckets: list[Bucket], tokens: int, now: float) -> None:
    for bucket in buckets:
        bucket.move(tokens, now)


Limited = tuple[str, RateLimit]
"""A scope (``route/NAME``, ``key/ID``, ``user/NAME``) and its limit."""


class Limits:
    """The buckets of one router.  A bucket whose scope has another limit than before changes with the next request."""

    MOST_BUCKETS: Final = 65536
    """Buckets that are kept; full ones are forgotten first, which changes nothing."""

    def __init__(self) -> None:
        self._buckets: dict[Name, Bucket] = {}

    def take(self, limited: Iterable[Limited], tokens: int, now: float) -> Taken | Exceeded:
        """Take a prompt's tokens."""
        limited = tuple(limited)
        if (never := never_fits(limited, tokens)) is not None:
            return never
        found: list[tuple[Name, Bucket]] = []
        for name, most, seconds in buckets_of(limited):
            bucket = self._bucket(name, most, seconds, now)
            wanted = tokens if name[1] is Kind.INPUT else 1
            if bucket.left + TOLERANCE < wanted:
                return Exceeded(*name, most, bucket.wait(wanted))
            found.append((name, bucket))
        _move([bucket for name, bucket in found if name[1] is Kind.INPUT], -tokens, now)
        return Taken(found, tokens, _move)

    def left(self, now: float) -> dict[Name, float]:
        for bucket in self._buckets.values():
            bucket.refill(now)
        return {name: bucket.left for name, bucket in self._buckets.items()}

    def _bucket(self, name: Name, limit: int, seconds: int, now: float) -> Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= self.MOST_BUCKETS:
                self._forget_full(now)
            bucket = self._buckets[name] = Bucket(limit, seconds, now)
        elif bucket.limit != limit or bucket.seconds != seconds:
            bucket.resize(limit, seconds, now)
        else:
            bucket.refill(now)
        return bucket

    def _forget_full(self, now: float) -> None:
        left = self.left(now)
        self._buckets = {name: one for name, one in self._buckets.items() if left[name] + TOLERANCE < one.limit}
        if len(self._buckets) >= self.MOST_BUCKETS:  # nobody is full: who was made first goes
            del self._buckets[next(iter(self._buckets))]


@lru_cache(4096)
def buckets_of(limited: tuple[Limited, ...]) -> tuple[tuple[Name, int, int], ...]:
    """Names of buckets, each with its tokens and seconds; most requests have the same limits as others."""
    return tuple(
        ((scope, kind), most, limit.unit.seconds)
        for scope, limit in limited
        for kind, most in ((Kind.INPUT, limit.input_tokens_per_unit), (Kind.OUTPUT, limit.output_tokens_per_unit))
        if most is not None
    )


def never_fits(limited: tuple[Limited, ...], tokens: int) -> Exceeded | None:
    """The smallest of the buckets that never have as many tokens as a prompt."""
    small = [(most, name) for name, most, _ in buckets_of(limited) if name[1] is Kind.INPUT and most < tokens]
    if not small:
        return None
    most, name = min(small)
    return Exceeded(*name, most, None)
