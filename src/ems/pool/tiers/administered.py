"""What an administrator asks of the tiers of one node: from their catalogues at once, from their places in errands.

What always holds: nobody waits for a tier here; an errand ends, because a tier that hangs is cut out and its errands
with it; a tier that does not work is given none, and one that is only read is looked at only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from ems.pool.core.index import Page
from ems.pool.tiers.carrier import Carrier
from ems.pool.tiers.crew import Job
from ems.pool.tiers.level import Level, told
from ems.pool.tiers.seam import Forgotten, Holding, Meant, Run, Tier

HANGS = "it hangs and is left alone"


class Errand:
    """Something that a tier was asked to do: ``job``, or why it was not even asked."""

    def __init__(self, job: Job | None, refused: str = "") -> None:
        self._job = job
        self._refused = refused

    def outcome(self) -> Forgotten | str | None:
        """What it did, or why it did not do it; None while it is under way."""
        job = self._job
        if job is None:
            return self._refused
        if job.abandoned:
            return HANGS
        if not job.done.is_set():
            return None
        done: Forgotten | None = job.result
        return told(job.error) if done is None else done


class AdministeredTiers:
    """The tiers of ``carrier``, seen by an administrator; tiers have numbers, from the top."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    # What is known

    def page_size(self, name: str) -> int:
        """Bytes of a page of the namespace ``name`` in some tier, 0 when none knows it."""
        return self._carrier.page_size(name)

    def holdings(self) -> list[tuple[str, dict[str, Holding]]]:
        """The name of each tier, and what it has of each namespace."""
        return [(level.config.name, level.tier.namespaces()) for level in self._carrier.levels]

    def holders(self, name: str, key: bytes) -> list[str]:
        """The names of the tiers that have the page ``key`` of the namespace ``name``."""
        return [level.config.name for level in self._carrier.levels if level.holds(name, [key])]

    def prefetch(self, namespace: int, keys: list[bytes]) -> int:
        """``keys`` will be needed soon; returns how many are in memory or on their way there."""
        return self._carrier.prefetch(namespace, keys)

    # Warming

    def recent(self, tier: int, name: str) -> Iterator[Run]:
        """What ``tier`` has of the namespace ``name``, what was used last first, a prefix before its suffix."""
        return self._carrier.levels[tier].tier.recent(name)

    def bring(self, tier: int, namespace: int, run: Run) -> bool:
        """Fetch ``run``; False when too much waits already."""
        return self._carrier.bring(self._carrier.levels[tier], namespace, run)

    def comes(self, namespace: int, keys: Sequence[bytes]) -> bool:
        """Whether any of ``keys``, which were asked for in one go, is still on its way."""
        return self._carrier.comes(namespace, keys)

    def why_not_read(self, tier: int) -> str:
        """Why nothing comes from ``tier``, empty when it is read."""
        gate = self._carrier.levels[tier].reading
        return "" if gate.open else f"it is left alone because it does not work: {gate.reason}"

    # Clearing

    def hold_back(self, meant: Callable[[str], bool]) -> Callable[[], None]:
        """Nothing of the namespaces that are ``meant`` goes up or down, until what is returned is called."""
        closed = cache(meant)
        self._carrier.held_back.append(closed)
        return partial(self._carrier.held_back.remove, closed)

    def take_back(self, namespace: int, wanted: Callable[[Page], bool]) -> list[bytes]:
        """Let go of what waits to be written or fetched of ``namespace``; returns the keys that are being fetched."""
        return self._carrier.take_back(namespace, wanted)

    def offer(self, namespace: int, pages: list[Page]) -> None:
        """Have ``pages`` written, which were stored while nothing went down."""
        self._carrier.offer(namespace, pages)

    def look(self, tier: int) -> Errand:
        """Have ``tier`` see what is there; with ``more`` it has not seen all yet."""
        level = self._carrier.levels[tier]
        return self._errand(level, _left_alone(level), _look)

    def forget(self, tier: int, meant: Meant, *, dry_run: bool) -> Errand:
        """Have ``tier`` take out a portion of what is ``meant``, or count it."""
        level = self._carrier.levels[tier]
        refused = "this node only reads it (write=never)" if level.config.write == "never" else _left_alone(level)
        return self._errand(level, refused, lambda one: one.forget(meant, dry_run=dry_run))

    def settle(self, tier: int) -> None:
        """What was done to ``tier`` is to be written down soon."""
        self._carrier.levels[tier].look_soon()

    def _errand(self, level: Level, refused: str, work: Callable[[Tier], Forgotten]) -> Errand:
        return Errand(None, refused) if refused else Errand(level.have_done(partial(work, level.tier)))


def _left_alone(level: Level) -> str:
    for gate in (level.writing, level.reading):
        if not gate.open:
            return f"it is left alone because it does not work: {gate.reason}"
    return ""


def _look(tier: Tier) -> Forgotten:
    tier.maintain()
    return Forgotten(more=not tier.figures().get("scanned", True))
