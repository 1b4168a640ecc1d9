"""``ems status``: the pool of this host at a glance."""

from __future__ import annotations

import sys
from typing import Any

from ems.cli.options import ASKING, Asking
from ems.cli.shown import print_json
from ems.config import default_socket, format_size
from ems.pool.client.pool_client import PoolClient


def status(*, asked: Asking = ASKING) -> None:
    """Show the pool of this host at a glance."""
    client = PoolClient(asked.socket or default_socket(), "ems status", administers=True)
    try:
        figures = client.stats()
    finally:
        client.close()
    if asked.json:
        print_json(figures)
        return
    _print_tables(figures)


def summary_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """What is shown of the node's ``figures`` above the table of namespaces, as name and text."""
    counters = figures["counters"]
    total, used = figures["bytes_total"], figures["bytes_used"]
    asked, hit = counters["keys_looked_up"], counters["keys_hit"]
    started = "an engine" if figures["autostarted"] else "hand"
    return [
        ("node", f"{figures['node'][:12]}, EMS {figures['release']}, process {figures['pid']}, started by {started}"),
        ("up", _duration(figures["uptime_seconds"])),
        ("memory", f"{format_size(used)} of {format_size(total)} hold pages ({_share(used, total)})"),
        ("touched", f"{format_size(figures['bytes_touched'])} ({_share(figures['bytes_touched'], total)})"),
        ("clients", f"{figures['clients'] - 1}, {figures['leases']} leases, {figures['reservations']} reservations"),
        ("lookups", f"{counters['lookups']}, {hit} of {asked} keys found ({_share(hit, asked)})"),
        ("missed", _misses(figures.get("misses", {}))),
        ("pages", f"{counters['pages_committed']} stored, {counters['pages_evicted']} evicted"),
        (
            "refused",
            f"{counters['refused_no_space']} without room, {counters['refused_not_touched']} before memory was touched",
        ),
        *(("tier", _tier(tier)) for tier in figures.get("tiers", ())),
    ]


def _tier(tier: dict[str, Any]) -> str:
    """One tier below memory in a line."""
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
    """Lookups that missed something, the most frequent reason first."""
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


def _print_tables(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    # Into a file or a pipe nothing is cut.
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 200)
    for name, text in summary_rows(figures):
        console.print(f"{name:<8} {text}")
    if not figures["namespaces"]:
        return
    table = Table(box=None, pad_edge=False, show_edge=False)
    for column in ("NAMESPACE", "PAGES", "WRITING", "SLOTS", "PAGE SIZE", "BYTES"):
        table.add_column(column, justify="left" if column == "NAMESPACE" else "right", no_wrap=True)
    for row in figures["namespaces"]:
        table.add_row(
            row["name"],
            str(row["pages"]),
            str(row["writing"]),
            str(row["capacity"]),
            format_size(row["page_size"]),
            format_size(row["pages"] * row["page_size"]),
        )
    console.print()
    console.print(table)
