"""Looking at other processes of this host."""

from __future__ import annotations

from pathlib import Path


def process_lives(pid: int) -> bool:
    """Whether a process with this id runs (a zombie does not: it can no longer write anywhere).

    A client in a process namespace of its own has an id of 0 here; what cannot be seen is taken to live.
    """
    if pid <= 0:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
