"""``ems bench trace``: arguments and output; replaying is in ``ems.bench.trace``."""

from __future__ import annotations

from pathlib import Path

from ems.bench.trace.compare import TracePlan, compare
from ems.bench.trace.files import read_trace
from ems.bench.trace.made import KINDS, made_trace
from ems.bench.trace.report import plot as draw
from ems.bench.trace.report import refuse_plot, table, tier_table
from ems.cli.options import Format, parse_counts
from ems.cli.progress import Bars
from ems.cli.shown import present
from ems.config import POLICIES, PolicyName
from ems.errors import ConfigError

MADE = "made:"
"""Before the kind of a trace that is made up."""


def trace(
    file: str,
    /,
    *,
    policy: str = ",".join(POLICIES),
    capacity: str = "5000,10000",
    look_ahead: int = 0,
    tier: float = 0,
    requests: int = 4000,
    plot: Path | None = None,
    output: Format = "table",
) -> None:
    """Replay a trace of prompts through the pool's brain: which policy hits how often at which size.

    No bytes are moved and time is that of the trace. A hit is a block that is present with its whole prefix.

    Parameters
    ----------
    file
        JSON lines with timestamp (ms) and hash_ids; or made: and conversations, documents, shifting, scans or loop.
    policy
        Policies, separated by commas.
    capacity
        Sizes of the pool in blocks, separated by commas.
    look_ahead
        Length of the queue of waiting requests, which are announced to the pool.
    tier
        Blocks a second that a tier below memory brings up for announced requests; 0 means there is none.
    requests
        Requests of made-up traffic.
    plot
        Draw hits over sizes into this file (.svg, .png or .pdf).
    """
    if requests < 1:
        raise ConfigError(f"--requests is {requests}, expected 1 or more")
    if plot is not None:
        refuse_plot(plot)
    plan = TracePlan(_policies(policy), parse_counts(capacity, "--capacity"), look_ahead, tier)
    if file.startswith(MADE):
        kind = file.removeprefix(MADE)
        if kind not in KINDS:
            raise ConfigError(f"there is no made-up traffic called {kind!r}, expected one of {', '.join(KINDS)}")
        read = made_trace(kind, requests)
    else:
        read = read_trace(Path(file))
    with Bars() as bars:
        found = compare(read, plan, bars.tell)
    if plot is not None:
        draw(found, plot)
    present(found, list(filter(None, (table(found), tier_table(found)))), output)


def _policies(text: str) -> tuple[PolicyName, ...]:
    known: dict[str, PolicyName] = {name: name for name in POLICIES}
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no policy called {name!r}, expected some of {', '.join(POLICIES)}")
    return tuple(known[name] for name in names)
