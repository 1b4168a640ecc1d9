"""Text for people: tables and sentences, folded to a width; nothing of them is ever cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

import msgspec


class Table(msgspec.Struct, frozen=True):
    """A heading for each column, and rows of as many texts: first what a row is about, figures to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    remark: str = ""

    def lines(self, width: int | None) -> Iterator[str]:
        """The table in lines of ``width`` where one word or name is not longer; None folds nothing.

        Where a row does not fit into a line, words in its last cell are folded beside the others.  Else its first cell
        has a line of its own above the others; where these do not fit either, each of them comes with its heading.
        """
        if self.title:
            yield from fold(self.title, width)
            yield ""
        texts = [self.columns, *self.rows]
        widths = [max(len(row[at]) for row in texts) for at in range(len(self.columns))]
        right = [
            bool(at and self.rows) and all(row[at][:1].isdigit() for row in self.rows) for at in range(len(widths))
        ]

        def joined(row: Sequence[str], first: int) -> str:
            cells = zip(row[first:], widths[first:], right[first:], strict=True)
            return "  ".join(
                text.rjust(size) if figures else text.ljust(size) for text, size, figures in cells
            ).rstrip()

        whole = sum(widths) + 2 * len(widths) - 2
        if width is None or whole <= width:
            yield from (joined(row, 0) for row in texts)
        elif not right[-1] and whole - widths[-1] <= width // 2:
            for row in texts:
                beside = joined([*row[:-1], "|"], 0)[:-1]
                yield from fold(row[-1], width, " " * len(beside), beside)
        elif whole - widths[0] <= width:
            for row in texts:
                yield row[0]
                yield f"  {joined(row, 1)}"
        else:
            for row in self.rows:
                yield row[0]
                named = [f"{heading} {text}" for heading, text in zip(self.columns[1:], row[1:], strict=True) if text]
                yield from _packed(named, width)
        if self.remark:
            yield ""
            yield from fold(self.remark, width)


def fold(text: str, width: int | None, indent: str = "", first: str | None = None) -> list[str]:
    """Lines of ``text``, broken between words; the first begins with ``first``, the others with ``indent``."""
    first = indent if first is None else first
    if width is None or len(first) + len(text) <= width:
        return [first + text]
    return wrap(
        text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _packed(parts: Sequence[str], width: int) -> Iterator[str]:
    line = ""
    for part in parts:
        if line and len(line) + 4 + len(part) > width:
            yield from fold(line, width, "    ", "  ")
            line = ""
        line += f"  {part}" if line else part
    yield from fold(line, width, "    ", "  ")
