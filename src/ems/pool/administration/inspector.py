"""What there is, told to an administrator: namespaces, pages and requests, in memory and in the tiers below.

A brain.  What always holds: nothing changes by looking, not even recency; no tier is waited for, because what is said
of tiers is what the node knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ems.errors import PoolRefused
from ems.pool.administration.selection import model_of, tenant_of
from ems.pool.core.namespaces import NamespacePages
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import KEY_BYTES
from ems.pool.layout import PageRef
from ems.pool.reasons.words import Reason
from ems.pool.tiers.answers import Holding

if TYPE_CHECKING:
    from ems.pool.tiers.manager import TierManager

Report = dict[str, Any]


class Inspector:
    """Looks into ``core`` and the tiers, where there are any."""

    def __init__(self, core: PoolCore, tiers: TierManager | None) -> None:
        self._core = core
        self._tiers = tiers

    def overview(self, now: float) -> Report:
        below = self._held_below()
        names = dict.fromkeys([*(namespace.name for namespace in self._core.namespaces), *below])
        readers = self._core.leases.by_namespace()
        return {"namespaces": [self._row(name, now, readers, below.get(name, [])) for name in names]}

    def _held_below(self) -> dict[str, list[tuple[str, Holding]]]:
        """What tiers have of each namespace: their names, and what each has."""
        below: dict[str, list[tuple[str, Holding]]] = {}
        for tier, held in self._tiers.holdings() if self._tiers is not None else ():
            for name, holding in held.items():
                below.setdefault(name, []).append((tier, holding))
        return below

    def _row(self, name: str, now: float, readers: Mapping[int, int], below: list[tuple[str, Holding]]) -> Report:
        """What there is of the namespace ``name``, of which memory or a tier knows."""
        ns = self._core.namespaces.named(name)
        idle = min(held.idle_seconds for _, held in below) if ns is None else now - ns.last_used
        page_size = below[0][1].page_size if ns is None else ns.page_size
        pages = 0 if ns is None else len(ns.index) - ns.writing
        return {
            "namespace": name,
            "tenant": tenant_of(name),
            "model": model_of(name),
            "pages": pages,
            "bytes": pages * page_size,
            "writing": 0 if ns is None else ns.writing,
            "page_size": page_size,
            "leases": 0 if ns is None else readers.get(ns.number, 0),
            "pinned": 0 if ns is None else len(ns.pins.pinned),
            "idle_seconds": round(max(idle, 0.0), 3),
            "tiers": [{"name": tier, "pages": held.pages, "bytes": held.bytes} for tier, held in below],
        }

    def show(self, what: str, now: float) -> Report:
        """All that is known of ``what``: a namespace's name, a key in hex, or (a part of) a request's id.

        Raises PoolRefused: nothing is called so, or several requests are.
        """
        below = self._held_below().get(what, [])
        if below or self._core.find_namespace(what) >= 0:
            return self._show_namespace(self._row(what, now, self._core.leases.by_namespace(), below))
        if len(what) == 2 * KEY_BYTES and all(digit in "0123456789abcdefABCDEF" for digit in what):
            return self._show_key(bytes.fromhex(what), now)
        requests = self._core.reasons.requests
        found = requests.find(what)
        if not found:
            raise PoolRefused(
                f"nothing here is called {what[:80]!r}: expected a namespace's name, a key of {2 * KEY_BYTES} hex "
                "digits, or the id of a request that was looked up lately (or a part that only one has)"
            )
        if len(found) > 1:
            newest = " and ".join(one[:80] for one in found[-2:])
            raise PoolRefused(
                f"{what[:80]!r} is in the ids of {len(found)} requests, {newest} the last of them: give a part that "
                "only one has"
            )
        looks = [self._told_look(look, now) for look in requests.looks(found[0])]
        return {"kind": "request", "request": found[0], "lookups": looks}

    def _told_look(self, look: Any, now: float) -> Report:
        # What is known by now may be more than a code, as long as the key is still missing for the same reason.
        later = self._core.reading.explain(look.namespace, [look.missing] if look.missing else [bytes(KEY_BYTES)])
        detail = later.detail if look.code and later.codes[0] == look.code else ""
        return {
            "namespace": look.namespace,
            "asked": look.asked,
            "found": look.found,
            "missing": look.missing.hex(),
            "seconds_ago": round(max(now - look.at, 0.0), 3),
            **_told_reason(look.code),
            "detail": detail,
        }

    def _show_namespace(self, row: Report) -> Report:
        layouts, name = self._core.reasons.layouts, row["namespace"]
        return {
            "kind": "namespace",
            **row,
            "facts": dict(layouts.facts(name)),
            "other_layouts": [
                {"namespace": other, "differs": dict(layouts.differences(name, other).fields)}
                for other in layouts.related(name)
            ],
        }

    def _show_key(self, key: bytes, now: float) -> Report:
        known = {namespace.name: namespace for namespace in self._core.namespaces}
        rows: list[Report] = []
        for name in dict.fromkeys([*known, *self._held_below()]):
            row = self._key_in(known[name], key, now) if name in known else None
            holders = self._tiers.holders(name, key) if self._tiers is not None else []
            if row is None and holders:
                row = {"namespace": name, "state": "absent", **_told_reason(Reason.LOWER_TIER.code), "detail": ""}
            if row is not None:
                rows.append({**row, "tiers": holders})
        return {"kind": "key", "key": key.hex(), "namespaces": rows}

    def _key_in(self, namespace: NamespacePages, key: bytes, now: float) -> Report | None:
        page = namespace.index.get(key)
        if page is not None:
            ref = PageRef.unpack(page.ref)
            prefix = page.parent
            return {
                "namespace": namespace.name,
                "state": "present" if page.present else "being_written",
                "tier": "DRAM",
                "segment": ref.segment,
                "slot": ref.slot,
                "leases": page.leases,
                "pinned": page.key in namespace.pins.pinned,
                "continued_by": len(page.children()),
                "prefix": "" if prefix is None else prefix.key.hex(),
                "prefix_present": prefix is None or prefix.present,
                "idle_seconds": round(max(now - page.used, 0.0), 3) if page.present else 0.0,
            }
        known = self._core.reading.explain(namespace.name, [key])
        code = known.codes[0]
        if code in (0, Reason.NEVER_STORED.code, Reason.OTHER_LAYOUT.code):
            return None
        return {"namespace": namespace.name, "state": "absent", **_told_reason(code), "detail": known.detail}


def _told_reason(code: int) -> Report:
    reason = Reason.of_code(code) or Reason.NOTHING_MISSED
    return {"reason": reason.value, "sentence": reason.sentence}
