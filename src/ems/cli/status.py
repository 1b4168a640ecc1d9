"""``ems status``: the pool of this host at a glance; ``ems health``: what is well with the node and what is not."""

from __future__ import annotations

from typing import Any

from ems.cli.acts import figures
from ems.cli.options import ASKING, Asking
from ems.cli.shown import present_facts, print_facts, print_json, show, table
from ems.config import format_size
from ems.pool.administration.figures import judge


def status(*, asked: Asking = ASKING) -> None:
    """Show the pool of this host at a glance."""
    seen = figures(asked.at)
    if asked.json:
        print_json(seen)
        return
    print_facts(summary_rows(seen))
    if seen["namespaces"]:
        print()
        rows = [
            (
                *(row[name] for name in ("name", "pages", "writing", "capacity")),
                format_size(row["page_size"]), format_size(row["pages"] * row["page_size"]),
            )
            for row in seen["namespaces"]
        ]  # fmt: skip
        show(table(("NAMESPACE", "PAGES", "WRITING", "SLOTS", "PAGE SIZE", "BYTES"), rows))


def health(*, asked: Asking = ASKING) -> int:
    """Say what is well with the node and what is not; exit status 1 when something is not."""
    checks = judge(figures(asked.at))
    well = all(check.well for check in checks)
    facts = [(check.name, f"{'well' if check.well else 'ILL'}, {check.seen}") for check in checks]
    present_facts({"well": well, "checks": checks}, [facts], asked.output)
    return 0 if well else 1


def summary_rows(seen: dict[str, Any]) -> list[tuple[str, str]]:
    counters = seen["counters"]
    total, used = seen["bytes_total"], seen["bytes_used"]
    asked, hit = counters["keys_looked_up"], counters["keys_hit"]
    started = "an engine" if seen["autostarted"] else "hand"
    return [
        ("node", f"{seen['node'][:12]}, EMS {seen['release']}, process {seen['pid']}, started by {started}"),
        ("up", _duration(seen["uptime_seconds"])),
        ("memory", f"{format_size(used)} of {format_size(total)} hold pages ({_share(used, total)})"),
        ("touched", f"{format_size(seen['bytes_touched'])} ({_share(seen['bytes_touched'], total)})"),
        ("clients", f"{seen['clients'] - 1}, {seen['leases']} leases, {seen['reservations']} reservations"),
        (
            "writing",
            f"{format_size(seen['bytes_reserved'])} reserved, {seen['slots_resting']} slots wait for cut-off writers",
        ),
        ("lookups", f"{counters['lookups']}, {hit} of {asked} keys found ({_share(hit, asked)})"),
        ("missed", _misses(seen.get("misses", {}))),
        ("pages", f"{counters['pages_committed']} stored, {counters['pages_evicted']} evicted"),
        (
            "refused",
            f"{counters['refused_no_space']} without room, {counters['refused_not_touched']} before memory was touched",
        ),
        (
            "too many",
            f"{counters['refused_share']} above a writer's share, {counters['reservations_expired']} late reservations",
        ),
        *(("tier", _tier(tier)) for tier in seen.get("tiers", ())),
    ]


def _tier(tier: dict[str, Any]) -> str:
    limit = f" of {format_size(tier['tier_limit'])}" if tier.get("tier_limit") else ""
    if tier["reading"] and tier["writing"]:
        state = "well"
    else:
        out = " and ".join(name for name in ("reading", "writing") if not tier[name])
        state = f"left alone ({out}): {tier['reason']}"
    return (
        f"{tier['name']}: {format_size(tier.get('tier_bytes', 0))}{limit}, {tier.get('tier_pages', 0)} pages, "
        f"{tier['pages_written']} written, {tier['pages_fetched']} fetched, {tier['pages_dropped']} dropped, {state}"
    )


def _misses(misses: dict[str, int]) -> str:
    by_count = sorted(misses.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count}" for reason, count in by_count) or "nothing yet"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none yet"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    shown = [f"{value}{unit}" for value, unit in parts if value][:2]
    return "".join(shown) or "0s"
