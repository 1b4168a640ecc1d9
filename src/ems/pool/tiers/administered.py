"""What an administrator asks of the tiers of one node: from their catalogues at once, from their places in errands.

What always holds: nobody waits for a tier here; an errand ends, because a tier that hangs is cut out and its errands
with it; a tier that does not work is given none, and one that is only read is looked at only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from ems.pool.pages import Page
from ems.pool.tiers.manager import TierManager
from ems.pool.tiers.seam import ForgetRequest, ForgetResult, Holding, KeyRun, Tier
from ems.pool.tiers.threads import Job
from ems.pool.tiers.tier_state import TierState, error_text

HANGS = "it hangs and is left alone"


class Errand:
    """Something that a tier was asked to do: ``job``, or why it was not even asked."""

    def __init__(self, job: Job | None, refused: str = "") -> None:
        self._job = job
        self._refused = refused

    def outcome(self) -> ForgetResult | str | None:
        """What it did, or why it did not do it; None while it is under way."""
        job = self._job
        if job is None:
            return self._refused
        if job.abandoned:
            return HANGS
        if not job.done.is_set():
            return None
        done: ForgetResult | None = job.result
        return error_text(job.error) if done is None else done


class AdministeredTiers:
    """The tiers of ``tier_manager``, seen by an administrator; tiers have numbers, from the top."""

    def __init__(self, tier_manager: TierManager) -> None:
        self._tier_manager = tier_manager

    # What is known

    def page_size(self, name: str) -> int:
        """Bytes of a page of the namespace ``name`` in some tier, 0 when none knows it."""
        return self._tier_manager.page_size(name)

    def holdings(self) -> list[tuple[str, dict[str, Holding]]]:
        """The name of each tier, and what it has of each namespace."""
        return [(state.config.name, state.tier.namespaces()) for state in self._tier_manager.states]

    def left_alone(self, tier: int) -> set[str]:
        """The namespaces of which ``tier`` has packs that this node does not understand."""
        return self._tier_manager.states[tier].tier.left_alone()

    def holders(self, name: str, key: bytes) -> list[str]:
        """The names of the tiers that have the page ``key`` of the namespace ``name``."""
        return [state.config.name for state in self._tier_manager.states if state.holds(name, [key])]

    def prefetch(self, namespace: int, keys: list[bytes]) -> int:
        """``keys`` will be needed soon; returns how many are in memory or on their way there."""
        return self._tier_manager.prefetch(namespace, keys)

    # Warming

    def recent(self, tier: int, name: str) -> Iterator[KeyRun]:
        """What ``tier`` has of the namespace ``name``, what was used last first, a prefix before its suffix."""
        return self._tier_manager.states[tier].tier.recent(name)

    def bring(self, tier: int, namespace: int, run: KeyRun) -> bool:
        """Fetch ``run``; False when too much waits already."""
        return self._tier_manager.bring(self._tier_manager.states[tier], namespace, run)

    def comes(self, namespace: int, keys: Sequence[bytes]) -> bool:
        """Whether any of ``keys``, which were asked for in one go, is still on its way."""
        return self._tier_manager.comes(namespace, keys)

    def why_not_read(self, tier: int) -> str:
        """Why nothing comes from ``tier``, empty when it is read."""
        gate = self._tier_manager.states[tier].reading
        return "" if gate.open else f"it is left alone because it does not work: {gate.reason}"

    # Clearing

    def hold_back(self, matches: Callable[[str], bool]) -> Callable[[], None]:
        """Nothing of the namespaces that are ``matches`` goes up or down, until what is returned is called."""
        closed = cache(matches)
        self._tier_manager.held_back.append(closed)
        return partial(self._tier_manager.held_back.remove, closed)

    def take_back(self, namespace: int, wanted: Callable[[Page], bool]) -> None:
        """Let go of what waits to be written or fetched of ``namespace``."""
        self._tier_manager.take_back(namespace, wanted)

    def offer(self, namespace: int, pages: list[Page]) -> None:
        """Have ``pages`` written, which were stored while nothing went down."""
        self._tier_manager.offer(namespace, pages)

    def look(self, tier: int) -> Errand:
        """Have ``tier`` see what is there; with ``more`` it has not seen all yet."""
        state = self._tier_manager.states[tier]
        return self._errand(state, _left_alone(state), _look)

    def forget(self, tier: int, matches: ForgetRequest, *, dry_run: bool) -> Errand:
        """Have ``tier`` take out a portion of what is ``matches``, or count it."""
        state = self._tier_manager.states[tier]
        refused = "this node only reads it (write=never)" if state.config.write == "never" else _left_alone(state)
        return self._errand(state, refused, lambda one: one.forget(matches, dry_run=dry_run))

    def settle(self, tier: int) -> None:
        """What was done to ``tier`` is to be written down soon."""
        self._tier_manager.states[tier].look_soon()

    def _errand(self, state: TierState, refused: str, work: Callable[[Tier], ForgetResult]) -> Errand:
        return Errand(None, refused) if refused else Errand(state.have_done(partial(work, state.tier)))


def _left_alone(state: TierState) -> str:
    for gate in (state.writing, state.reading):
        if not gate.open:
            return f"it is left alone because it does not work: {gate.reason}"
    return ""


def _look(tier: Tier) -> ForgetResult:
    tier.maintain()
    return ForgetResult(more=not tier.figures().get("scanned", True))
