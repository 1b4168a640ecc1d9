"""Whether a node is well, judged by its own figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ems.config import format_size

SCARCE = 0.5
"""Share of the offered pages refused for want of room from which on a node is too small."""
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
        unkept = tenants.get("quotas_unkept", "")  # a node of an earlier release does not tell
        checks.append(Check("quotas", well=not unkept, seen=unkept or "those of the tenants' file count"))
    for tier in figures.get("tiers", ()):
        well = bool(tier["reading"] and tier["writing"])
        seen = "works" if well else f"left alone: {tier['reason']}"
        left = [f"{tier[figure]} {text}" for figure, text in _LEFT_ALONE if tier.get(figure)]
        checks.append(Check(f"tier {tier['name']}", well=well, seen="; ".join([seen, *left])))
    return checks
