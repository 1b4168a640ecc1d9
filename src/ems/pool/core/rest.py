"""Slots that nobody is handed though no page is known in them.

A writer that was cut off but lives may still be copying into its slots, so these rest until its process ends, or for a
time.  A slot whose bytes were wrong is not used again at all.  What always holds: such a slot is given back once, or
never; a clock that was set back lets nothing rest for longer than from now on, unless that is for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

from ems.pool.segments.layout import PageRef

if TYPE_CHECKING:
    from ems.pool.core.space import Space

LIMBO_SECONDS = 30.0
"""How long a slot stays unused whose writer was cut off but lives: it may still be copying into it."""
EARLIER_WRITERS = 0
"""The owner that stands for whoever was writing when an earlier node ended."""


class Rest:
    """Slots of ``space`` that rest, by their writer, and those that are in quarantine; by where they lie (packed)."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._limbo: dict[int, tuple[float, list[bytes]]] = {}
        self._quarantined: set[bytes] = set()

    @property
    def resting(self) -> int:
        """How many slots rest."""
        return sum(len(refs) for _, refs in self._limbo.values())

    @property
    def quarantined(self) -> int:
        """How many slots are not used again."""
        return len(self._quarantined)

    def begin(self, owner: int, refs: list[bytes], until: float) -> None:
        """The slots of ``owner`` rest until then, or until :meth:`end`."""
        if refs:
            self._limbo[owner] = (until, refs)

    def rests(self, owner: int) -> bool:
        """Whether slots of ``owner`` rest."""
        return owner in self._limbo

    def end(self, owner: int) -> None:
        """Nobody writes into the slots of ``owner`` any more."""
        _, refs = self._limbo.pop(owner, (0.0, []))
        self._give_back(refs)

    def tick(self, now: float) -> None:
        """Free the slots whose rest is over."""
        for owner, (until, refs) in list(self._limbo.items()):
            if until <= now:
                self.end(owner)
            elif now + LIMBO_SECONDS < until < inf:  # the clock was set back
                self._limbo[owner] = (now + LIMBO_SECONDS, refs)

    def quarantine(self, ref: bytes) -> None:
        """The bytes in a slot were wrong: it is not used again."""
        self._quarantined.add(ref)

    def forgive(self, segment: int) -> None:
        """The quarantined slots of ``segment`` may go with it, once no other of its slots is out."""
        inside = [ref for ref in self._quarantined if PageRef.unpack(ref).segment == segment]
        if len(inside) == self._space.segments[segment].used:
            self._quarantined.difference_update(inside)
            self._give_back(inside)

    def forfeit(self, begin: bytes) -> None:
        """Slots of a segment that is not what it was need not rest any longer: those that lie where ``begin`` says."""
        gone = [ref for ref in self._quarantined if ref.startswith(begin)]
        self._quarantined.difference_update(gone)
        for owner, (until, refs) in list(self._limbo.items()):
            gone += [ref for ref in refs if ref.startswith(begin)]
            self._limbo[owner] = (until, [ref for ref in refs if not ref.startswith(begin)])
        self._give_back(gone)

    def _give_back(self, refs: Iterable[bytes]) -> None:
        for ref in refs:
            self._space.give_back(PageRef.unpack(ref))

    def segments(self) -> set[int]:
        """The segments with such slots."""
        resting = {PageRef.unpack(ref).segment for _, refs in self._limbo.values() for ref in refs}
        return resting | {PageRef.unpack(ref).segment for ref in self._quarantined}

    def snapshot(self) -> tuple[dict[int, tuple[float, list[bytes]]], list[bytes]]:
        """Slots that rest, by owner and with the time until which; slots that are not used again."""
        return dict(self._limbo), list(self._quarantined)

    def resume(self, limbo: Mapping[int, tuple[float, list[bytes]]], quarantined: Iterable[bytes]) -> None:
        """Go on from a :meth:`snapshot`."""
        self._limbo, self._quarantined = dict(limbo), set(quarantined)
