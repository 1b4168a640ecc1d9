"""What the SDK did lately, as one line for the log every 30 seconds.

A brain: it gets samples and the time, and answers with the line when one is due.  An interval in which
nothing happened has no line, so an idle engine's log stays quiet.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Kind(Enum):
    """What was done."""

    LOOKUP = "lookup"
    LOAD = "load"
    SAVE = "save"


class Sample(msgspec.Struct, frozen=True):
    """One operation that ended: ``done`` of ``total`` blocks in ``seconds``."""

    kind: Kind
    done: int
    total: int
    seconds: float


class Spread:
    """Average, least and most of a series of numbers."""

    __slots__ = ("_high", "_low", "_sum", "count")

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._low = 0.0
        self._high = 0.0

    def add(self, value: float) -> None:
        self._low = value if self.count == 0 else min(self._low, value)
        self._high = value if self.count == 0 else max(self._high, value)
        self._sum += value
        self.count += 1

    def show(self, digits: int) -> str:
        """``average/least/most`` with ``digits`` decimals, the average with at least one."""
        average = self._sum / self.count if self.count else 0.0
        return f"{average:.{max(digits, 1)}f}/{self._low:.{digits}f}/{self._high:.{digits}f}"


class _Transfers:
    def __init__(self) -> None:
        self.blocks = Spread()
        self.milliseconds = Spread()

    def add(self, sample: Sample) -> None:
        self.blocks.add(sample.done)
        self.milliseconds.add(sample.seconds * 1000)

    def show(self, name: str) -> str:
        if not self.blocks.count:
            return f"{name}s 0"
        return f"{name}s {self.blocks.count} (blocks {self.blocks.show(0)}, ms {self.milliseconds.show(1)})"


class Summary:
    """Collects samples from ``now`` on; :meth:`due` says when the next line is."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self.next_line = now + seconds
        self._reset()

    def _reset(self) -> None:
        self._loads = _Transfers()
        self._saves = _Transfers()
        self._lookups = 0
        self._asked = 0
        self._found = 0

    def add(self, sample: Sample) -> None:
        match sample.kind:
            case Kind.LOAD:
                self._loads.add(sample)
            case Kind.SAVE:
                self._saves.add(sample)
            case Kind.LOOKUP:
                self._lookups += 1
                self._asked += sample.total
                self._found += sample.done

    def line(self, now: float) -> str | None:
        """The line for the interval that ended, None when none is due or nothing happened."""
        if now < self.next_line:
            return None
        self.next_line = now + self._seconds
        idle = not (self._lookups or self._loads.blocks.count or self._saves.blocks.count)
        text = f"{self._loads.show('load')}, {self._saves.show('save')}, {self._hit_rate()}"
        self._reset()
        return None if idle else text

    def _hit_rate(self) -> str:
        if not self._asked:
            return f"lookups {self._lookups}"
        share = 100 * self._found / self._asked
        return f"lookups {self._lookups}, hit rate {share:.1f}% ({self._found} of {self._asked} blocks)"
