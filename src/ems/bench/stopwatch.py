"""How long something takes, for measurements of this process."""

from __future__ import annotations

import time
from collections.abc import Callable


def timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
