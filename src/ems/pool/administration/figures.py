"""What a node's figures come to: added up by namespace, model or tenant, and whether the node is well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ems.config import format_size

By = Literal["namespace", "model", "tenant"]

_SUMS = ("pages", "bytes", "writing", "leases", "pinned")
SCARCE = 0.5
"""Share of the offered pages refused for want of room from which on a node is too small."""
CLIENT_STARTS = "starts, Mooncake's client is not there yet"
ENOUGH = 1000
"""Pages that must have been offered before that is judged."""
_LEFT_ALONE = (
    ("tier_wrong_key", "packs left alone that were sealed with another key"),
    ("tier_unreadable", "packs left alone that this release does not read"),
    ("tier_not_believed", "files left alone that others may have written"),
)
"""What a tier may have that the node does not serve."""


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at: whether it is well, and what was seen."""

    name: str
    well: bool
    seen: str


def grouped(rows: Sequence[dict[str, Any]], by: By) -> list[dict[str, Any]]:
    """``rows`` of namespaces added up by model or tenant, the largest first."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        tiers = row["tiers"]
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


def judge(figures: Mapping[str, Any]) -> list[Check]:
    counters: Mapping[str, int] = figures["counters"]
    total, touched = figures["bytes_total"], figures["bytes_touched"]
    stored, refused = counters["pages_committed"], counters["refused_no_space"]
    offered = stored + refused
    damaged = figures.get("misses", {}).get("checksum", 0)
    checks = [
        Check("node", well=True, seen=f"process {figures['pid']} answers"),
        Check("memory", well=total > 0, seen=f"{format_size(touched)} of {format_size(total)} touched"),
        Check("draining", well=not figures.get("draining", False), seen="yes" if figures.get("draining") else "no"),
        Check(
            "room",
            well=offered < ENOUGH or refused < SCARCE * offered,
            seen=f"{refused} of {offered} offered pages refused for want of room",
        ),
        Check("checksums", well=not damaged, seen=f"{damaged} lookups missed a damaged page"),
    ]
    tenants = figures.get("tenants", {})
    if not tenants.get("open", True):
        unkept = tenants["quotas_unkept"]
        checks.append(Check("quotas", well=not unkept, seen=unkept or "those of the tenants' file count"))
    for tier in figures.get("tiers", ()):
        well = bool(tier["reading"] and tier["writing"])
        works = "works" if tier.get("tier_agent_starts", 1) else CLIENT_STARTS
        seen = works if well else f"left alone: {tier['reason']}"
        left = [f"{tier[figure]} {text}" for figure, text in _LEFT_ALONE if tier.get(figure)]
        checks.append(Check(f"tier {tier['name']}", well=well, seen="; ".join([seen, *left])))
    return checks
