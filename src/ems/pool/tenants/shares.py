"""How much of the pool each tenant may have, and who gives way to whom.

What always holds: no tenant gets a segment that would bring it above its cap; no tenant loses one to another that
it needs for its guaranteed minimum.  Within that, memory goes to whoever asks first, and when there is none left, to
whoever has less than its fair share: first among tenants, then among the namespaces of one.  Memory moves in whole
segments, so quotas count whole segments too.

On a node without tenants all namespaces belong to one tenant, the nameless one, which may have everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from ems.config import format_size
from ems.errors import ConfigError, QuotaExceeded
from ems.pool.tenants.quota import Bounds, Quota

if TYPE_CHECKING:
    from ems.pool.core.space import Segment

IDLE_SECONDS = 10.0
"""How long a namespace must have rested before it can lose its last segment to a namespace that has none."""


class Party(Protocol):
    """A namespace, as far as it matters here."""

    number: int
    tenant: str
    last_used: float


_Party = TypeVar("_Party", bound=Party)


class Shares:
    """The quotas of a node's tenants; without any, every tenant may have everything."""

    def __init__(self) -> None:
        self._quotas: Mapping[str, Quota] = {}
        self._bounds: Mapping[str, Bounds] = {}
        self._strangers: Bounds | None = None

    def set(self, quotas: Mapping[str, Quota], segments: Sequence[int]) -> None:
        """From now on tenants have ``quotas`` in a pool of segments of these sizes, and nobody else has anything.

        Raises:
            ConfigError: the guaranteed minima do not fit in the pool together; nothing has changed then.
        """
        self._bounds = self._fitting(quotas, segments)
        self._quotas = quotas
        self._strangers = Bounds(0, 0)

    def must_fit(self, segments: Sequence[int]) -> None:
        """Refuse a pool of segments of these sizes.

        Raises:
            ConfigError: the guaranteed minima would not fit in it together.
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
        """Whether there are tenants with quotas."""
        return self._strangers is not None

    def bounds(self, tenant: str) -> Bounds | None:
        """The bounds of ``tenant``; None where it may have everything."""
        return self._bounds.get(tenant, self._strangers)

    def refuse_if_too_small(self, tenant: str, segment: int) -> None:
        """Refuse a tenant whose cap is below one segment.

        Raises:
            QuotaExceeded: it can never have a page.
        """
        bounds = self.bounds(tenant)
        if bounds is not None and bounds.cap < segment:
            raise QuotaExceeded(
                f"this tenant may have {format_size(bounds.cap)}, which is less than a segment of "
                f"{format_size(segment)}; ask the administrator for a larger cap or a smaller --segment-size"
            )

    def may_grow(self, tenant: str, held: int, size: int) -> bool:
        """Whether a tenant that has ``held`` bytes may have another segment of ``size``."""
        bounds = self.bounds(tenant)
        return bounds is None or held + size <= bounds.cap

    def spares(self, tenant: str, held: int, size: int) -> bool:
        """Whether a tenant that has ``held`` bytes can be made to give a segment of ``size`` to another."""
        bounds = self.bounds(tenant)
        return bounds is None or held - size >= bounds.minimum

    def promised_more(self, tenant: str, held: int) -> bool:
        """Whether a tenant that has ``held`` bytes is below its guaranteed minimum."""
        bounds = self.bounds(tenant)
        return bounds is not None and held < bounds.minimum

    def excess(self, tenant: str, held: int) -> bool:
        """Whether ``held`` bytes are more than the tenant may have."""
        bounds = self.bounds(tenant)
        return bounds is not None and held > bounds.cap

    def who_gives_way(
        self, namespace: _Party, namespaces: Sequence[_Party], segments: Sequence[Segment], now: float
    ) -> _Party | None:
        """The namespace that loses a segment to ``namespace``; None when nobody has to."""
        held = Held(namespaces, segments)
        size = max((segment.size for segment in segments), default=0)
        other = self._tenant_that_gives_way(namespace, held, size, namespaces, now)
        tenant = namespace.tenant if other is None else other
        rest = [one for one in namespaces if one is not namespace and one.tenant == tenant and held.counts[one.number]]
        richest = max(rest, key=lambda one: (held.counts[one.number], -one.last_used), default=None)
        if richest is None or other is not None:
            return richest
        own = held.counts[namespace.number]
        owners = len(rest) + 1
        if own == 0:
            gives_way = held.counts[richest.number] > 1 or now - richest.last_used >= IDLE_SECONDS
        else:
            gives_way = (own + 1) * owners <= held.tenant_counts[tenant] + held.unowned
        return richest if gives_way else None

    def _tenant_that_gives_way(
        self, namespace: Party, held: Held, size: int, namespaces: Sequence[Party], now: float
    ) -> str | None:
        """The other tenant that loses a segment to this one's; None when it has to do with what it has."""
        tenant = namespace.tenant
        if not self.may_grow(tenant, held.bytes[tenant], size):
            return None
        donors = [
            other for other, has in held.bytes.items() if other != tenant and has and self.spares(other, has, size)
        ]
        if not donors:
            return None
        if self.promised_more(tenant, held.bytes[tenant]):
            return max(donors, key=lambda other: held.bytes[other] - self._minimum(other))
        richest = max(donors, key=lambda other: (held.tenant_counts[other], other))
        own = held.tenant_counts[tenant]
        if own:
            owners = sum(1 for count in held.tenant_counts.values() if count)
            return richest if (own + 1) * owners <= held.total else None
        used = max((one.last_used for one in namespaces if one.tenant == richest), default=now)
        return richest if held.tenant_counts[richest] > 1 or now - used >= IDLE_SECONDS else None

    def _minimum(self, tenant: str) -> int:
        bounds = self.bounds(tenant)
        return 0 if bounds is None else bounds.minimum


class Held:
    """Who has how many segments, and how many bytes of them, at one moment."""

    def __init__(self, namespaces: Iterable[Party], segments: Sequence[Segment]) -> None:
        tenants = {namespace.number: namespace.tenant for namespace in namespaces}
        self.total = sum(1 for segment in segments if segment.size)
        self.unowned = 0
        self.counts: Counter[int] = Counter()
        """Segments of each namespace."""
        self.tenant_counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        """Bytes of the segments of each tenant."""
        for segment in segments:
            if segment.owner is None:
                self.unowned += bool(segment.size)
                continue
            tenant = tenants[segment.owner]
            self.counts[segment.owner] += 1
            self.tenant_counts[tenant] += 1
            self.bytes[tenant] += segment.size
