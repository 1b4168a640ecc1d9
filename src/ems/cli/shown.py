"""How verbs show what they found: tables for people, JSON for scripts, remarks beside both."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec


def print_json(report: object) -> None:
    """For scripts."""
    print(msgspec.json.format(msgspec.json.encode(report)).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """For people: the first column and texts to the left, all others to the right."""
    from rich.console import Console
    from rich.table import Table

    # Into a file or a pipe nothing is cut.
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 250)
    table = Table(box=None, pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        left = number == 0 or not any(row[number][:1].isdigit() for row in rows)
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Name and text, a line each."""
    width = max((len(name) for name, _ in facts), default=0)
    for name, text in facts:
        print(f"{name:<{width}}  {text}")


def age(seconds: float) -> str:
    """How long ago, short."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f}{unit}"
    return f"{seconds:.0f}s"


def moment(wall: float | None) -> str:
    """A time for people, UTC."""
    return "never" if wall is None else time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(wall))


def note(text: str) -> None:
    """Say something to the person, not to the script."""
    print(text, file=sys.stderr)
