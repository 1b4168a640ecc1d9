"""Which pages others copy before they are asked for them, and which of theirs this host copies ahead.

The hosts of a cluster keep one list of hot pages for each namespace: runs of pages that one of them saved or used, the
newest last.  A host puts its own runs there, and copies those of others that its memory lacks.

A brain; times are seconds on one monotonic clock.  What always holds: what was told or copied here is copied back only
when somebody used it once more; what cannot be copied is tried :data:`TRIES` times, and once more each time that it is
used; what was used long ago is not copied; memory is bounded.
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
OLD_PERIODS: Final = 20
"""What was used so many periods ago is not copied, nor what is said to be used that much later."""

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
    # A clock that is wrong says nothing.
    latest = max(run.period for run in added) + OLD_PERIODS
    for run in (run for run in listed if run.period <= latest):
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
    """The hot pages of one node."""

    def __init__(self) -> None:
        self._runs: OrderedDict[_Name, _Run] = OrderedDict()
        self._waiting: dict[str, OrderedDict[bytes, tuple[HotRun, int]]] = {}
        """What is to be told, and in how many rounds."""

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
        for (namespace, _), run in self._runs.items():
            if matches(namespace):
                run.told_until, run.tries = 0.0, TRIES

    def _remember(self, namespace: str, run: HotRun, what: _Run) -> None:
        self._runs[namespace, run.last] = what
        self._runs.move_to_end((namespace, run.last))
        if len(self._runs) > MOST_RUNS:
            self._runs.popitem(last=False)

    # What others told

    def heard(self, namespace: str, runs: Sequence[HotRun], now: float, most: int, period: int) -> list[HotRun]:
        """Which of the listed ``runs``, of about ``most`` keys, are to be copied in ``period``, if they are not here.

        What was told last comes first, but what it hangs on before it.
        """

        def is_due(run: HotRun) -> bool:
            known = self._known(namespace, run)
            return abs(run.period - period) <= OLD_PERIODS and known.tries < TRIES and now >= known.due

        newest = [run for run in reversed(runs) if is_due(run)] if most > 0 else []
        by_key = {key: run for run in reversed(newest) for key in run.keys}
        due: dict[HotRun, None] = {}
        for last in newest:
            if most <= 0:
                break
            line: dict[HotRun, None] = {}
            run: HotRun | None = last
            while run is not None and run not in due and run not in line:
                line[run] = None
                run = by_key.get(run.parent)
            for run in reversed(line):
                if most > 0:
                    most -= run.pages
                    due[run] = None
        for run in due:
            known = self._known(namespace, run)
            pause = TRY_SECONDS * 2.0**known.tries
            self._remember(namespace, run, _Run(known.told_until, known.tries + 1, now + pause, known.period))
        return list(due)

    def _known(self, namespace: str, run: HotRun) -> _Run:
        known = self._runs.get((namespace, run.last)) or _Run()
        if run.period > known.period:  # it was used once more, and may have left this host's memory meanwhile
            return _Run(known.told_until, min(known.tries, TRIES - 1), period=run.period)
        return known

    def settled(self, namespace: str, run: HotRun) -> None:
        """All of ``run`` is here."""
        if (known := self._runs.get((namespace, run.last))) is not None:
            known.tries = TRIES

    def postponed(self, namespace: str, run: HotRun, now: float) -> None:
        """``run`` was not asked for: that was no try."""
        if (known := self._runs.get((namespace, run.last))) is not None:
            known.tries, known.due = max(known.tries - 1, 0), now
