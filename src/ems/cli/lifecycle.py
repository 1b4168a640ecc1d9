"""``ems stop``, ``drain``, ``upgrade`` and ``resize``: the verbs that change a running node as a whole."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ems.cli.acts import answer, ask, connected
from ems.cli.options import ASKING, CHANGING, Asking, Changing, Flag, Seconds
from ems.cli.shown import complain, counted, note, print_json
from ems.config import format_size, parse_size
from ems.errors import ConfigError, PoolRefused, PoolTimeout, PoolUnavailable
from ems.pool.client.pool_client import PoolClient
from ems.pool.processes import process_lives
from ems.pool.protocol.acts import CancelResize, Drain, Resize, Upgrade
from ems.pool.segments.folder import Folder

RESTART_SECONDS = 120.0
"""How long an upgrade may take; it takes two seconds, half of them a restart, unless the machine is very busy."""
_POLL_SECONDS = 0.05


def stop(*, timeout: Seconds = 20.0, clear: Flag = False, asked: Asking = ASKING) -> int:
    """Stop the pool node of this host: its engines serve on without it.

    Its pages stay in shared memory for the node that is started next in the same folder.  A vLLM engine that lives on
    starts one again when it next needs the pool, unless it runs with EMS_AUTOSTART=0.

    Args:
        timeout: Seconds to wait for its end.
        clear: Remove its pages from memory too, and give the memory back; what its tiers have stays there.
    """
    path = asked.at
    with connected(path) as client:
        seen: dict[str, Any] = client.stats()
        pid = client.node_pid
    if pid != seen["pid"]:  # its own word and the kernel's must agree
        raise PoolUnavailable(f"the node on {path} runs in another process namespace, stop it there")
    with contextlib.suppress(ProcessLookupError):  # it may end by itself in this very moment
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while process_lives(pid):
        if time.monotonic() >= deadline:
            complain(f"the node (process {pid}) did not end within {timeout:g} s")
            return 1
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
    note(f"stopped the node on {path} (process {pid})")
    tiers = [tier["name"] for tier in seen.get("tiers", ())]
    stays = [f"the other hosts of {name}" if name.startswith("mooncake:") else name for name in tiers]
    if asked.json:
        directory = seen["directory"]
        print_json({"socket": str(path), "pid": pid, "directory": directory, "tiers": tiers, "cleared": clear})
    if clear:
        _clear(Path(seen["directory"]))
        if tiers:
            note(f"what is in {' and '.join(stays)} stays, 'ems clear --all' on a node that has used it takes it out")
    return 0


def _clear(directory: Path) -> None:
    """Remove the pages that a node left, unless another one has them by now."""
    if directory.exists():
        folder = Folder(directory)
        folder.remove_segments()
        folder.close(log=False)


def drain(
    *,
    undo: Flag = False,
    then_stop: Annotated[bool, Parameter(name="--stop", negative="", show_default=False)] = False,
    timeout: Seconds = 60.0,
    asked: Changing = CHANGING,
) -> int:
    """Let the node take no new pages in, and wait until nobody reads or writes.

    Engines serve on and still load what is there; what they compute is not stored.  A node that lends memory to a
    cluster takes it back first, and gives what was used last to other hosts.

    Args:
        undo: Take pages in again.
        then_stop: Stop the node when nobody reads or writes any more.
        timeout: Seconds to wait for readers and writers; exit status 1 when they take longer.
    """
    report = ask(asked.at, Drain(draining=not undo), dry_run=asked.dry_run)
    deadline = time.monotonic() + timeout
    while not (undo or asked.dry_run) and _in_use(report) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
        report = ask(asked.at, Drain(), dry_run=True)
    state = "takes nothing new in" if report["draining"] else "takes pages in"
    held = f"{report['leases']} leases and {report['reservations']} reservations are held"
    if report["pages_leaving"]:
        held += f", {counted(report['pages_leaving'], 'page')} to be given to other hosts"
    if given := report["pages_given"]:
        held += f", {counted(given, 'page')} given to other hosts"
    answer(report, f"the node {state}; {held}", asked)
    if undo or asked.dry_run:
        return 0
    for reason in report["left_alone"]:
        complain(f"not all that is hot was given to other hosts, {reason}")
    if _in_use(report):
        complain(f"the node was still in use after {timeout:g} s, it goes on draining")
        return 1
    return stop(asked=Asking(socket=asked.socket)) if then_stop else 0


def _in_use(report: dict[str, int]) -> bool:
    return bool(report["leases"] or report["reservations"] or report["pages_leaving"])


def upgrade(*, timeout: Seconds = RESTART_SECONDS, asked: Asking = ASKING) -> None:
    """Let the pool node become the release that is installed now, in its own process.

    Pages, pins and settings stay. Clients wait for about a second and go on. If the installed release cannot start the
    node goes on as it is. SIGHUP to the node does the same.

    Args:
        timeout: Seconds to wait until the node is back.
    """
    deadline = time.monotonic() + timeout
    with connected(asked.at) as client:
        before = client.stats(timeout)
        client.administer(Upgrade(), timeout=timeout)
        after = _back(client, str(before["node"]), deadline)
    note(f"the node on {asked.at} is EMS {after['release']}, was EMS {before['release']} (process {after['pid']})")
    if asked.json:
        was = {"pid": before["pid"], "release": before["release"]}
        print_json({"socket": str(asked.at), "pid": after["pid"], "release": after["release"], "before": was})


def _back(client: PoolClient, node: str, deadline: float) -> dict[str, Any]:
    """The figures of the node after its restart; ``node`` is its identity before."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            figures: dict[str, Any] = client.stats(left)
        except PoolTimeout:
            break
        if figures["node"] != node:
            return figures
        if not figures["restart"]["wished"]:
            raise PoolRefused(figures["restart"]["failure"])
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
    raise PoolUnavailable("the node did not come back in time, see its log and `ems health`")


def resize(
    size: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *,
    cancel: Flag = False,
    timeout: Seconds = 120.0,
    asked: Changing = CHANGING,
) -> None:
    """Give the running pool another size, in whole segments.

    A larger pool gets segments, a smaller one gives up those that hold least.  A segment that somebody reads goes when
    it is released, the others at once; who is waited for is said.  Ctrl-C ends the waiting, not the change.

    Args:
        size: The new size, such as 16GB.
        cancel: Keep the segments that an earlier resize has not given up yet.
        timeout: Seconds without progress after which it is waited no longer, while the node goes on; exit status 1.
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
        text += f", {report['taken']} fewer; {pages} {'would leave' if dry_run else 'left'} the pool"
    return text
