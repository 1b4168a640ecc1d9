"""How verbs show what they found: tables for people, JSON for scripts, remarks beside both.

What goes to a terminal is folded to its width; a file and a pipe get whole lines.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

import msgspec

from ems.cli.options import Output
from ems.tables import Table, fold

_LONGEST_NAME = 16
_LEAST_TEXT = 24
"""Columns of a fact's name, and of its text beside it; where either is not enough, the text has lines of its own."""


def print_json(report: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(report)).decode())


def present(report: object, tables: Table | Sequence[Table], output: Output) -> None:
    if output == "json":
        print_json(report)
    else:
        print_tables(*([tables] if isinstance(tables, Table) else tables))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    return Table(columns, [[str(cell) for cell in row] for row in rows])


def print_tables(*tables: Table) -> None:
    for number, table in enumerate(tables):
        if number:
            print()
        for line in table.lines(_width(sys.stdout)):
            print(line)


def present_facts(report: object, groups: Sequence[Sequence[tuple[str, str]]], output: Output) -> None:
    if output == "json":
        print_json(report)
    else:
        print_facts(*groups)


def print_facts(*groups: Sequence[tuple[str, str]]) -> None:
    """Name and text, a line each, with an empty line between groups."""
    width = _width(sys.stdout)
    for number, facts in enumerate(groups):
        if number:
            print()
        names = max((len(name) for name, _ in facts if width is None or len(name) <= _LONGEST_NAME), default=0) + 2
        for name, text in facts:
            widest = max([_LEAST_TEXT, *map(len, text.split())])
            beside = len(name) <= names and names + widest <= (width or sys.maxsize)
            lines = (
                fold(text, width, " " * names, name.ljust(names))
                if beside
                else [*fold(name, width), *fold(text, width, "  ")]
            )
            print("\n".join(lines))


def say(text: str) -> None:
    print("\n".join(fold(text, _width(sys.stdout))))


def note(text: str) -> None:
    """Say something to the person, not to the script."""
    print("\n".join(fold(text, _width(sys.stderr))), file=sys.stderr, flush=True)


def complain(text: str) -> None:
    note(f"error: {text}")


def age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f}{unit}"
    return f"{seconds:.0f}s"


def moment(wall: float | None) -> str:
    return "never" if wall is None else time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(wall))


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _width(stream: TextIO) -> int | None:
    """Columns of the terminal that shows ``stream``; None for a file or a pipe, unless COLUMNS gives data a width."""
    if stream.isatty() or (stream is sys.stdout and os.environ.get("COLUMNS")):
        return shutil.get_terminal_size().columns
    return None
