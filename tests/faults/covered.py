"""What a large run of histories must have gone through: a path that is never taken is not tested, whatever passes."""

from __future__ import annotations

from collections.abc import Mapping

from tests.faults.faulty_store import FAULTS
from tests.faults.steps import STEPS

ENOUGH = 2000
"""Histories after which everything has come about, as far as anybody has seen."""

EVENTS = (
    "crash", "stop", "restart", "restart refused", "ended while it started", "could not start",
    "page back after a restart", "page accepted", "page rejected", "mismatch found", "page quarantined", "late write",
    "slow writer", "a writer said where it stopped",
    "page evicted", "awaited page evicted", "refused for want of room", "the wall's clock was set",
    "page promoted", "waited for a tier", "tier: pages written", "tier: fetch corrupt", "tier: write corrupt",
    "tier: fetch misses", "tier: hung", "tier: cut out", "tier: not queued for want of room", "tier: packs evicted",
    "work of a tier that failed", "called off", "ended after it was given up", "another node stored pages",
    "a place damaged a blob", "a place lost a blob", "a stop that did not wait for a tier",
    *(f"a place {fault}" for fault in FAULTS if fault not in {"is slow", "hangs"}),
    "segment taken from another", "segment taken from another tenant", "shut out", "key revoked", "greeting refused",
    "greeted again", "a tenant was refused what is not its own",
    "clear", "page cleared", "page cleared in a tier", "tier could not be cleared", "drain", "resize", "pin",
    "page pinned", "warm", "list", "show", "follow",
)  # fmt: skip
"""What happens in histories, as :attr:`~tests.faults.history.Report.events` calls it."""

KILLED_AT = ("header", "description", "state", "file", "tail", "dir's blob", "s3's blob")
"""Writes at which nodes are killed."""


def uncovered(
    histories: int, steps: Mapping[str, int], events: Mapping[str, int], killed_at: Mapping[str, int]
) -> list[str]:
    """What did not come about, nothing where there were too few histories to expect it."""
    if histories < ENOUGH:
        return []
    never = [f"step: {kind}" for kind in STEPS if not steps.get(kind)]
    never += [event for event in EVENTS if not events.get(event)]
    return never + [f"killed at: {place}" for place in KILLED_AT if not killed_at.get(place)]
