"""Looking at other processes of this host."""

from __future__ import annotations

from pathlib import Path


def process_lives(pid: int) -> bool:
    """Whether a process with this id runs, with at least one thread that can still write somewhere.

    A client in a process namespace of its own has an id of 0 here; what cannot be seen is taken to live.
    """
    if pid <= 0:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    fields = stat.rpartition(")")[2].split()
    state, threads = fields[0], int(fields[17])
    # The state is that of the main thread; the others may go on without it, or be a moment behind when killed.
    return state not in ("Z", "X") or threads > 1
