"""What processes consume: CPU time and memory, each page of shared memory counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import psutil

Processes = Callable[[], Iterable[psutil.Process]]


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """User and system time of the living ``processes`` and of their children that have ended."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def memory(processes: Iterable[psutil.Process]) -> int:
    """Bytes of memory of ``processes`` together (PSS)."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total
