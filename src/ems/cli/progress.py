"""How verbs that compute for long show how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ems.cli.shown import note


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Shows what it is told, on stderr: bars on a terminal, else one line as each pass begins."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def tell(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
                if bars.disable:
                    note(name.strip())
            bars.update(tasks[name], completed=done)

        yield tell
