"""``ems resize``: give the running pool another size."""

from __future__ import annotations

from ems.cli.acts import ask
from ems.cli.options import CHANGING, Changing
from ems.cli.shown import print_json
from ems.config import format_size, parse_size
from ems.pool.administration.acts import Resize


def resize(size: str, /, *, asked: Changing = CHANGING) -> None:
    """Give the running pool another size, in whole segments.

    A larger pool gets segments, a smaller one gives up those that hold least; what somebody reads stays until it is
    released.

    Parameters
    ----------
    size
        The new size, such as 16GB.
    """
    report = ask(asked.socket, Resize(parse_size(size)), dry_run=asked.dry_run)
    if asked.json:
        print_json(report)
        return
    would = "would have" if asked.dry_run else "has"
    text = f"the pool {would} {format_size(report['bytes'])} in {report['segments']} segments"
    if report["added"]:
        text += f", {report['added']} more"
    if report["taken"]:
        text += f", {report['taken']} fewer; {report['removed']} pages {'would leave' if asked.dry_run else 'left'}"
    print(text)
