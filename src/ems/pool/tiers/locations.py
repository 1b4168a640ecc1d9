"""What tiers below memory add to the reasons for a miss: a page that one of them has is not simply gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ems.pool.reasons.words import Reason


class Known(Protocol):
    """What is to be known of a tier."""

    @property
    def reads(self) -> bool: ...

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` it has, as far as it knows at this moment; never waits."""


def why(tiers: Sequence[Known], namespace: str, key: bytes, *, promoting: bool) -> Reason | None:
    """Why ``key``, which memory lacks, is missing, as far as tiers know; None when none of them has it.

    With ``promoting`` it is on its way up.
    """
    if promoting:
        return Reason.LOWER_TIER
    holders = [tier for tier in tiers if tier.holds(namespace, [key])]
    if not holders:
        return None
    # A tier that works and has it was not asked, because computing is quicker.
    return Reason.DEAR if any(tier.reads for tier in holders) else Reason.TIER_OFFLINE


def revised(tiers: Sequence[Known], namespace: str, keys: Sequence[bytes], codes: bytes) -> bytes:
    """``codes`` of ``keys`` (0: in memory), with what tiers have in place of what only memory knows."""
    revised_codes = bytearray(codes)
    kept = {0, Reason.GAP.code, Reason.BEING_WRITTEN.code}
    for tier in reversed(tiers):
        code = (Reason.LOWER_TIER if tier.reads else Reason.TIER_OFFLINE).code
        at = 0
        while at < len(keys):
            if codes[at] in kept:
                at += 1
                continue
            count = tier.holds(namespace, keys[at:])
            for position in range(at, at + count):
                if codes[position] not in kept:
                    revised_codes[position] = code
            at += max(count, 1)
    return bytes(revised_codes)
