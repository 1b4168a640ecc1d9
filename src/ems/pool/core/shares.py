"""How much of the pool each tenant may have, and who gives way to whom.

What always holds: no tenant gets a segment that would bring it above its cap; no tenant loses one to another that
it needs for its guaranteed minimum.  Within that, memory goes to whoever asks first, and when there is none left, to
whoever has less than its fair share: first among tenants, then among the namespaces of one.  Memory moves in whole
segments, so quotas count whole segments too.

On a node without tenants all namespaces belong to one tenant, the nameless one, which may have everything.  Quotas are
kept as people write them; what they come to depends on the size of the pool.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import msgspec

from ems.config import format_size, parse_size
from ems.errors import ConfigError, QuotaExceeded
from ems.pool.core.namespaces import NamespacePages
from ems.pool.core.slot_allocator import Segment

IDLE_SECONDS = 10.0
"""How long a namespace must have rested before it can lose its last segment to a namespace that has none."""


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one tenant, as people write them: bytes (``8GB``), a share of the pool (``25%``), or ``0``."""

    minimum: str = "0"
    cap: str = "100%"

    def __post_init__(self) -> None:
        for name, text in (("minimum", self.minimum), ("cap", self.cap)):
            parse_amount(text, 1 << 40, name)

    def within(self, total: int) -> Bounds:
        return Bounds(parse_amount(self.minimum, total, "minimum"), parse_amount(self.cap, total, "cap"))


class Bounds(msgspec.Struct, frozen=True):
    """Guaranteed and largest number of bytes of one tenant."""

    minimum: int
    cap: int


UNLIMITED = Bounds(0, sys.maxsize)


def parse_amount(text: str, total: int, name: str) -> int:
    """Bytes meant by ``text`` in a pool of ``total`` bytes.  Raises ConfigError: it is neither a size nor a share."""
    if text.strip() == "0":
        return 0
    if not text.endswith("%"):
        return parse_size(text, name=name)
    try:
        share = Fraction(text[:-1].strip()) if len(text) <= 16 else Fraction(-1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share <= 100:
        raise ConfigError(f"{name} is {text!r}, expected a size such as 8GB or a share of the pool from 0% to 100%")
    return int(share * total / 100)


class Shares:
    """The quotas of a node's tenants; without any, every tenant may have everything."""

    def __init__(self) -> None:
        self._quotas: Mapping[str, Quota] = {}
        self._bounds: Mapping[str, Bounds] = {}
        self._unknown_bounds = UNLIMITED

    def set(self, quotas: Mapping[str, Quota], segments: Sequence[int]) -> None:
        """From now on tenants have ``quotas`` in a pool of segments of these sizes, and nobody else has anything.

        Raises ConfigError: the guaranteed minima do not fit in the pool together; nothing has changed then.
        """
        self._bounds = self._fitting(quotas, segments)
        self._quotas = quotas
        self._unknown_bounds = Bounds(0, 0)

    def must_fit(self, segments: Sequence[int]) -> None:
        """Refuse a pool of segments of these sizes.

        Raises ConfigError: the guaranteed minima would not fit in it together.
        """
        self._fitting(self._quotas, segments)

    @staticmethod
    def _fitting(quotas: Mapping[str, Quota], segments: Sequence[int]) -> Mapping[str, Bounds]:
        total, largest = sum(segments), max(segments, default=1)
        bounds = {tenant: quota.within(total) for tenant, quota in quotas.items()}
        promised = sum(-(-one.minimum // largest) * largest for one in bounds.values())
        if promised > total:
            raise ConfigError(
                f"the tenants' guaranteed minima come to {format_size(promised)} in whole segments, but the pool has "
                f"{format_size(total)}; lower a minimum with 'ems tenant set' or give the node a larger --size"
            )
        return bounds

    @property
    def limited(self) -> bool:
        return self._unknown_bounds is not UNLIMITED

    def bounds(self, tenant: str) -> Bounds:
        return self._bounds.get(tenant, self._unknown_bounds)

    def refuse_if_too_small(self, tenant: str, segment: int) -> None:
        """Refuse a tenant whose cap is below one segment.  Raises QuotaExceeded: it can never have a page."""
        cap = self.bounds(tenant).cap
        if cap < segment:
            raise QuotaExceeded(
                f"this tenant may have {format_size(cap)}, which is less than a segment of "
                f"{format_size(segment)}; ask the administrator for a larger cap or a smaller --segment-size"
            )

    def may_grow(self, tenant: str, held: int, size: int) -> bool:
        """Whether a tenant that has ``held`` bytes may have another segment of ``size``."""
        return held + size <= self.bounds(tenant).cap

    def may_donate(self, tenant: str, held: int, size: int) -> bool:
        """Whether a tenant that has ``held`` bytes can be made to give a segment of ``size`` to another."""
        return held - size >= self.bounds(tenant).minimum

    def donor(
        self, namespace: NamespacePages, namespaces: Iterable[NamespacePages], segments: Sequence[Segment], now: float
    ) -> NamespacePages | None:
        """The namespace that loses a segment to ``namespace``; None when nobody has to."""
        usage = SegmentUsage(namespaces, segments)
        other = self._donor_tenant(namespace, usage, namespaces, now)
        tenant = namespace.tenant if other is None else other
        rest = [one for one in namespaces if one is not namespace and one.tenant == tenant and usage.counts[one.number]]
        richest = max(rest, key=lambda one: (usage.counts[one.number], -one.last_used), default=None)
        if richest is None or other is not None:
            return richest
        own, shared = usage.counts[namespace.number], usage.tenant_counts[tenant] + usage.unowned
        rested = now - richest.last_used >= IDLE_SECONDS
        return richest if _gives_way(usage.counts[richest.number], own, len(rest) + 1, shared, rested=rested) else None

    def _donor_tenant(
        self, namespace: NamespacePages, usage: SegmentUsage, namespaces: Iterable[NamespacePages], now: float
    ) -> str | None:
        """The other tenant that loses a segment to this one's; None when it has to do with what it has."""
        tenant, size = namespace.tenant, usage.largest
        if not self.may_grow(tenant, usage.bytes[tenant], size):
            return None
        donors = [
            other for other, has in usage.bytes.items() if other != tenant and has and self.may_donate(other, has, size)
        ]
        if not donors:
            return None
        if usage.bytes[tenant] < self.bounds(tenant).minimum:
            return max(donors, key=lambda other: usage.bytes[other] - self.bounds(other).minimum)
        counts = usage.tenant_counts
        richest = max(donors, key=lambda other: (counts[other], other))
        used = max((one.last_used for one in namespaces if one.tenant == richest), default=now)
        rested = now - used >= IDLE_SECONDS
        return richest if _gives_way(counts[richest], counts[tenant], len(counts), usage.total, rested=rested) else None


def _gives_way(richest: int, own: int, competing: int, segments: int, *, rested: bool) -> bool:
    """Whether who has the ``richest`` number of segments loses one to somebody who has ``own``.

    As long as one more is at most the fair share of ``segments``; to who has none, one of several, or the last one of
    who has ``rested``.
    """
    return (own + 1) * competing <= segments if own else richest > 1 or rested


class SegmentUsage:
    """Who has how many segments, and how many bytes of them, at one moment."""

    def __init__(self, namespaces: Iterable[NamespacePages], segments: Sequence[Segment]) -> None:
        tenants = {namespace.number: namespace.tenant for namespace in namespaces}
        self.total = sum(1 for segment in segments if segment.size)
        self.largest = max((segment.size for segment in segments), default=0)
        self.unowned = 0
        self.counts: Counter[int] = Counter()
        """Segments of each namespace."""
        self.tenant_counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        """Bytes of the segments of each tenant."""
        for segment in segments:
            if segment.namespace is None:
                self.unowned += bool(segment.size)
                continue
            tenant = tenants[segment.namespace]
            self.counts[segment.namespace] += 1
            self.tenant_counts[tenant] += 1
            self.bytes[tenant] += segment.size
