"""Which pages others copy before they are asked for them, and which of theirs this host copies ahead.

The hosts of a cluster keep one list of hot pages for each namespace: runs of pages that one of them saved or used, the
newest last.  A host puts its own runs there, and copies those of others that its memory lacks.

A brain; times are seconds on one monotonic clock.  What always holds: a host copies no more bytes a second than its
rate; what it told of or copied itself it copies back only when somebody used it once more; what cannot be copied is
tried :data:`TRIES` times; memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final, Protocol

import msgspec

from ems.pool.keys import KEY_BYTES, Tail, split_keys

TELL_AGAIN_SECONDS: Final = 30.0
"""How long what was told is not told again."""
TOLD_ROUNDS: Final = 3
"""In so many rounds a run is put onto the list if it is not there: of two hosts that write at the same moment one is
lost."""
TRIES: Final = 5
TRY_SECONDS: Final = 0.5
"""Until the second try, twice as long until the next: what was told may be written to the cluster a little later."""
MOST_RUN_KEYS: Final = 1024
"""Keys of a run that are told, from its beginning: that is what prompts share."""
MOST_WAITING: Final = 64 << 10
"""Bytes of the runs of a namespace that wait to be told, as many as a list has."""
MOST_WAITING_NAMESPACES: Final = 256
MOST_RUNS: Final = 8192
"""Runs that are remembered."""
MOST_COPIED: Final = 1 << 16
"""Pages that are remembered as copied until somebody uses them."""

LEARNED: Final = 4096
"""Pages that are copied before it is known what that is good for."""
USEFUL_SHARE: Final = 16
"""Where less than one in so many is used, a host copies that much slower."""

_Name = tuple[str, bytes]


class HotRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive pages behind the page ``parent``; ``tail`` is what the last one is found by beside its key."""

    parent: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    packed: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * MOST_RUN_KEYS)]
    """Their keys, joined."""
    tail: Tail | None = None
    period: int = 0
    """When it was used, in periods of :data:`TELL_AGAIN_SECONDS` of its teller's clock: only larger ones say something
    new of the same pages."""

    @property
    def keys(self) -> list[bytes]:
        return split_keys(self.packed)

    @property
    def last(self) -> bytes:
        return self.packed[-KEY_BYTES:]

    @property
    def pages(self) -> int:
        return len(self.packed) // KEY_BYTES

    @property
    def sound(self) -> bool:
        """Whether it is what an honest host tells; its types are proven."""
        if len(self.packed) % KEY_BYTES or len(set(self.keys)) < self.pages:
            return False
        return self.tail is None or (self.tail.sound and self.tail.key == self.last)

    @property
    def size(self) -> int:
        """Bytes that it takes on a list, about."""
        return len(self.packed) + (len(self.tail.tokens) if self.tail is not None else 0)


class StoredPage(Protocol):
    """What a run is made of."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def tail(self) -> Tail | None: ...


def runs_of(pages: Iterable[StoredPage], period: int = 0) -> list[HotRun]:
    """The runs that ``pages`` are, a prefix before its suffix; the pages of a chunk, one a shard, are of several.

    They were used in ``period``.  Only a page by itself is told with its tail, which is long: what was stored behind
    others is found by its key.
    """
    runs: list[tuple[bytes, list[bytes], Tail | None]] = []
    by_last: dict[bytes, int] = {}
    for page in pages:
        at = by_last.pop(page.parent, -1)
        if at < 0 or len(runs[at][1]) == MOST_RUN_KEYS:
            at = len(runs)
            runs.append((page.parent, [], page.tail))
        runs[at][1].append(page.key)
        by_last[page.key] = at
    return [HotRun(parent, b"".join(keys), None if len(keys) > 1 else tail, period) for parent, keys, tail in runs]


def merged(listed: list[HotRun], added: Sequence[HotRun]) -> list[HotRun]:
    """``listed`` and behind it those of ``added`` that say something new, without what these say as well."""
    if not added:
        return listed
    known: dict[bytes, int] = {}
    tails: dict[bytes, int] = {}
    for run in listed:
        known.update((key, max(run.period, known.get(key, -1))) for key in run.keys)
        if run.tail is not None:
            tails[run.last] = run.period
    new = dict.fromkeys(
        run
        for run in added
        if any(known.get(key, -1) < run.period for key in run.keys)
        or (run.tail is not None and tails.get(run.last, -1) < run.period)
    )
    told = {key for run in new for key in run.keys}
    again = {run.last for run in new if run.tail is not None}
    left = (run for run in listed if (run.last not in again if run.tail is not None else not told.issuperset(run.keys)))
    return [*left, *new]


class _Run(msgspec.Struct):
    told_until: float = 0.0
    tries: int = 0
    due: float = 0.0
    period: int = -1
    """In which it was used last as far as is known."""


class HotPages:
    """The hot pages of one node, which copies up to ``rate`` bytes a second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._room = rate
        self._filled_at = 0.0
        self._runs: OrderedDict[_Name, _Run] = OrderedDict()
        self._waiting: dict[str, OrderedDict[bytes, tuple[HotRun, int]]] = {}
        """What is to be told, and in how many rounds."""
        self._copied: OrderedDict[_Name, None] = OrderedDict()
        self._copied_count = self._used_count = 0

    # What others are told

    def tells(self, namespace: str, last: bytes, now: float) -> bool:
        """Whether the run that ends with ``last`` was not told of a short time ago."""
        run = self._runs.get((namespace, last))
        return run is None or now >= run.told_until

    def tell(self, namespace: str, runs: Iterable[HotRun], now: float) -> None:
        waiting = self._waiting.setdefault(namespace, OrderedDict())
        for run in runs:
            if self.tells(namespace, run.last, now):
                self._remember(namespace, run, _Run(now + TELL_AGAIN_SECONDS, TRIES, period=run.period))
                waiting[run.last] = (run, TOLD_ROUNDS)
        size = sum(run.size for run, _ in waiting.values())
        while size > MOST_WAITING:
            size -= waiting.popitem(last=False)[1][0].size
        if not waiting or len(self._waiting) > MOST_WAITING_NAMESPACES:
            del self._waiting[namespace]

    def waits(self, namespace: str) -> bool:
        """Whether anything of ``namespace`` is to be told."""
        return namespace in self._waiting

    def take(self, namespace: str) -> list[HotRun]:
        """What is to be on the list after this round."""
        waiting = self._waiting.pop(namespace, None) or OrderedDict()
        left = OrderedDict((last, (run, rounds - 1)) for last, (run, rounds) in waiting.items() if rounds > 1)
        if left:
            self._waiting[namespace] = left
        return [run for run, _ in waiting.values()]

    def clear(self, matches: Callable[[str], bool]) -> None:
        """The namespaces that are ``matches`` are being cleared: nothing of them is told or copied.

        What is saved or used there from now on is told anew, and copied where another host tells it anew.
        """
        for waiting in [namespace for namespace in self._waiting if matches(namespace)]:
            del self._waiting[waiting]
        for name in [name for name in self._copied if matches(name[0])]:
            del self._copied[name]
        for (namespace, _), run in self._runs.items():
            if matches(namespace):
                run.told_until, run.tries = 0.0, TRIES

    def _remember(self, namespace: str, run: HotRun, what: _Run) -> None:
        self._runs[namespace, run.last] = what
        self._runs.move_to_end((namespace, run.last))
        if len(self._runs) > MOST_RUNS:
            self._runs.popitem(last=False)

    # What others told

    def heard(self, namespace: str, runs: Sequence[HotRun], now: float, most: int) -> list[HotRun]:
        """Which of the listed ``runs``, of about ``most`` keys, are to be copied now, as far as they are not here."""
        due: list[HotRun] = []
        for run in runs:
            known = self._runs.get((namespace, run.last)) or _Run()
            if run.period > known.period:  # it was used once more, and may have left this host's memory meanwhile
                known = _Run(known.told_until, period=run.period)
            if known.tries >= TRIES or now < known.due:
                continue
            if most <= 0:
                break
            most -= run.pages
            pause = TRY_SECONDS * 2.0**known.tries
            self._remember(namespace, run, _Run(known.told_until, known.tries + 1, now + pause, known.period))
            due.append(run)
        return due

    def settled(self, namespace: str, run: HotRun) -> None:
        """All of ``run`` is here."""
        if (known := self._runs.get((namespace, run.last))) is not None:
            known.tries = TRIES

    def postponed(self, namespace: str, runs: Iterable[HotRun], now: float) -> None:
        """``runs`` were not looked at: that was no try."""
        for run in runs:
            if (known := self._runs.get((namespace, run.last))) is not None:
                known.tries, known.due = max(known.tries - 1, 0), now

    def may_copy(self, size: int, now: float) -> bool:
        """Whether ``size`` bytes may be copied now, which counts them; the last ones may be more than there is room."""
        useful = self._copied_count < LEARNED or self._used_count * USEFUL_SHARE >= self._copied_count
        rate = self._rate if useful else self._rate / USEFUL_SHARE
        self._room = min(self._room + max(now - self._filled_at, 0.0) * rate, rate)
        self._filled_at = now
        if self._room <= 0:
            return False
        self._room -= size
        return True

    # What it was good for

    def copied(self, namespace: str, keys: Iterable[bytes]) -> None:
        names = [(namespace, key) for key in keys]
        self._copied.update(dict.fromkeys(names))
        self._copied_count += len(names)
        if self._copied_count > 2 * LEARNED:  # what was long ago counts less
            self._copied_count, self._used_count = self._copied_count // 2, self._used_count // 2
        while len(self._copied) > MOST_COPIED:
            self._copied.popitem(last=False)

    def used(self, namespace: str, keys: Iterable[bytes]) -> int:
        """How many of ``keys``, which are used now, were copied and not used yet."""
        count = self.forget(namespace, keys)
        self._used_count += count
        return count

    def forget(self, namespace: str, keys: Iterable[bytes]) -> int:
        """``keys`` count as copied no longer; how many did."""
        if not self._copied:
            return 0
        here = [name for name in ((namespace, key) for key in keys) if name in self._copied]
        for name in here:
            del self._copied[name]
        return len(here)
