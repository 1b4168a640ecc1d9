"""``ems status``: the pool of this host at a glance."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from ems.config import default_socket, format_size
from ems.pool.client import PoolClient

Output = Literal["table", "json"]


def status(
    *,
    socket: Annotated[Path | None, Parameter(env_var="EMS_SOCKET")] = None,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "table",
) -> None:
    """Show the pool of this host at a glance.

    Parameters
    ----------
    socket
        The node's Unix socket, default that of this user's node.
    output
        A table for people or JSON for scripts.
    """
    client = PoolClient(socket or default_socket(), "ems status")
    try:
        figures = client.stats()
    finally:
        client.close()
    if output == "json":
        print(msgspec.json.format(msgspec.json.encode(figures)).decode())
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
        ("pages", f"{counters['pages_committed']} stored, {counters['pages_evicted']} evicted"),
        (
            "refused",
            f"{counters['refused_no_space']} without room, {counters['refused_not_touched']} before memory was touched",
        ),
    ]


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
