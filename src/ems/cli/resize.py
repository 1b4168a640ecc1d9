"""``ems resize``: give the running pool another size, or stop doing so."""

from __future__ import annotations

from typing import Any

from ems.cli.acts import answer, ask
from ems.cli.options import CHANGING, Changing, Flag, Seconds
from ems.cli.shown import counted
from ems.config import format_size, parse_size
from ems.errors import ConfigError
from ems.pool.protocol.acts import CancelResize, Resize


def resize(
    size: str | None = None, /, *, cancel: Flag = False, timeout: Seconds = 120.0, asked: Changing = CHANGING
) -> None:
    """Give the running pool another size, in whole segments.

    A larger pool gets segments, a smaller one gives up those that hold least.  A segment that somebody reads goes when
    it is released, the others at once; who is waited for is said.  Ctrl-C ends the waiting, not the change.

    Parameters
    ----------
    size
        The new size, such as 16GB.
    cancel
        Keep the segments that an earlier resize has not given up yet.
    timeout
        Seconds without progress after which it is waited no longer, while the node goes on; exit status 1.
    """
    if cancel == (size is not None):
        raise ConfigError("give the new size, such as 16GB, or --cancel alone to end a change of size")
    if size is None:
        report = ask(asked.at, CancelResize(), dry_run=asked.dry_run)
    else:
        report = ask(asked.at, Resize(parse_size(size)), dry_run=asked.dry_run, timeout=timeout)
    answer(report, _sentence(report, dry_run=asked.dry_run), asked)


def _sentence(report: dict[str, Any], *, dry_run: bool) -> str:
    text = f"the pool {'would have' if dry_run else 'has'} {format_size(report['bytes'])} in "
    text += counted(report["segments"], "segment")
    if report.get("kept") is not None:
        return f"{text}; {report['kept']} of them {'would stay' if dry_run else 'stay'} that were to be given up"
    if report["added"]:
        text += f", {report['added']} more"
    if report["taken"]:
        pages = counted(report["removed"], "page")
        text += f", {report['taken']} fewer; {pages} {'would leave' if dry_run else 'left'}"
    return text
