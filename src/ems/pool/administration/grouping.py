"""What a pool holds, added up by namespace, model or tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

By = Literal["namespace", "model", "tenant"]

_SUMS = ("pages", "bytes", "writing", "leases", "pinned")


def grouped(rows: Sequence[dict[str, Any]], by: By) -> list[dict[str, Any]]:
    """``rows`` of namespaces added up by model or tenant, the largest first."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        tiers = row.get("tiers", [])  # an older node tells of memory only
        total = found.get(row[by])
        if total is None:
            kept = row if by == "namespace" else {by: row[by], **{name: row[name] for name in _SUMS}}
            found[row[by]] = {**kept, "idle_seconds": row["idle_seconds"], "tiers": [dict(tier) for tier in tiers]}
            continue
        for name in _SUMS:
            total[name] += row[name]
        total["idle_seconds"] = min(total["idle_seconds"], row["idle_seconds"])
        _add_below(total["tiers"], tiers)
    return sorted(found.values(), key=lambda row: (-row["bytes"], -_bytes_below(row), str(row[by])))


def _add_below(totals: list[dict[str, Any]], tiers: Sequence[dict[str, Any]]) -> None:
    for tier in tiers:
        total = next((one for one in totals if one["name"] == tier["name"]), None)
        if total is None:
            totals.append(dict(tier))
        else:
            total["pages"] += tier["pages"]
            total["bytes"] += tier["bytes"]


def _bytes_below(row: dict[str, Any]) -> int:
    return sum(tier["bytes"] for tier in row["tiers"])
