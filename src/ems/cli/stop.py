"""``ems stop``: stop the pool node of this host."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from ems.cli.acts import connected
from ems.cli.options import ASKING, Asking, Flag, Seconds
from ems.cli.shown import complain, note, print_json
from ems.errors import PoolUnavailable
from ems.pool.processes import process_lives
from ems.pool.segments.folder import Folder

_POLL_SECONDS = 0.02


def stop(*, timeout: Seconds = 20.0, clear: Flag = False, asked: Asking = ASKING) -> int:
    """Stop the pool node of this host: its engines serve on without it.

    Its pages stay in shared memory for the node that is started next in the same folder.

    Parameters
    ----------
    timeout
        Seconds to wait for its end.
    clear
        Remove its pages from memory too, and give the memory back; what its tiers have stays there.
    """
    path = asked.at
    pid, directory, tiers = _peer(path)
    with contextlib.suppress(ProcessLookupError):  # it may end by itself in this very moment
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while process_lives(pid):
        if time.monotonic() >= deadline:
            complain(f"the node (process {pid}) did not end within {timeout:g} s")
            return 1
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
    note(f"stopped the node on {path} (process {pid})")
    if asked.json:
        print_json({"socket": str(path), "pid": pid, "directory": str(directory), "tiers": tiers, "cleared": clear})
    if clear:
        _clear(directory)
        if tiers:
            names = " and ".join(tiers)
            note(f"what {names} has stays, 'ems clear --all' on a running node takes it out")
    return 0


def _clear(directory: Path) -> None:
    """Remove the pages that a node left, unless another one has them by now."""
    if not directory.exists():
        return
    folder = Folder(directory)
    folder.remove_segments()
    folder.close(log=False)


def _peer(path: Path) -> tuple[int, Path, list[str]]:
    """The process that answers on ``path`` as a node, its folder and its tiers.

    Its own word and the kernel's must agree.
    """
    with connected(path) as client:
        seen: dict[str, Any] = client.stats()
        pid = client.node_pid
    if pid != seen["pid"]:
        raise PoolUnavailable(f"the node on {path} runs in another process namespace, stop it there")
    return pid, Path(str(seen.get("directory", ""))), [str(tier["name"]) for tier in seen.get("tiers", ())]
