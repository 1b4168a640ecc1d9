"""``ems drain``: let the node take nothing new in, wait until nobody uses it, stop it if wished."""

from __future__ import annotations

import time

from ems.cli.acts import answer, ask
from ems.cli.options import CHANGING, Asking, Changing, Flag, Seconds
from ems.cli.shown import complain
from ems.cli.stop import stop as stop_node
from ems.pool.protocol.acts import Drain

_POLL_SECONDS = 0.1


def drain(*, undo: Flag = False, stop: Flag = False, timeout: Seconds = 60.0, asked: Changing = CHANGING) -> int:
    """Let the node take no new pages in, and wait until nobody reads or writes.

    Engines serve on and still load what is there; what they compute is not stored.

    Parameters
    ----------
    undo
        Take pages in again.
    stop
        Stop the node when nobody reads or writes any more.
    timeout
        Seconds to wait for readers and writers; exit status 1 when they take longer.
    """
    report = ask(asked.at, Drain(draining=not undo), dry_run=asked.dry_run)
    deadline = time.monotonic() + timeout
    while not (undo or asked.dry_run) and _in_use(report) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
        report = ask(asked.at, Drain(), dry_run=True)
    idle = not _in_use(report)
    state = "takes nothing new in" if report["draining"] else "takes pages in"
    held = f"{report['leases']} leases and {report['reservations']} reservations are held"
    answer(report, f"the node {state}; {held}", asked)
    if undo or asked.dry_run:
        return 0
    if not idle:
        complain(f"the node was still in use after {timeout:g} s, it goes on draining")
        return 1
    return stop_node(asked=Asking(socket=asked.socket)) if stop else 0


def _in_use(report: dict[str, int]) -> bool:
    return bool(report["leases"] or report["reservations"])
