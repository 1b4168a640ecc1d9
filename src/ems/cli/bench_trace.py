"""``ems bench trace``: arguments and output; replaying is in ``ems.bench.trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter
from rich.console import Console

from ems.bench.trace.compare import TracePlan, compare
from ems.bench.trace.files import read_trace
from ems.bench.trace.made import KINDS, made_trace
from ems.bench.trace.report import plot as draw
from ems.bench.trace.report import table, tier_table
from ems.bench.trace.swap import Swap
from ems.cli.progress import Bars
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
    swap: Swap | None = None,
    requests: int = 4000,
    plot: Path | None = None,
    output: Annotated[Literal["table", "json"], Parameter(name=["--output", "-o"])] = "table",
) -> None:
    """Replay a trace of prompts through the pool's brain: which policy hits how often at which size.

    No bytes are moved and time is that of the trace. A hit is a block that is present with its whole prefix.

    Parameters
    ----------
    file
        One JSON object a line with timestamp (milliseconds) and hash_ids (names of the prompt's blocks); or made:KIND
        for made-up traffic: conversations, documents, shifting, scans or loop.
    policy
        Policies, separated by commas.
    capacity
        Sizes of the pool in blocks, separated by commas.
    look_ahead
        Length of the queue of waiting requests, which are announced to the pool.
    tier
        Blocks a second that a tier below memory brings up for announced requests; 0 means there is none.
    swap
        Another process becomes the node in the middle: by a hand-over, after a stop, after a kill (with what was
        written down a while before), or without anything that was learned (oblivion).
    requests
        Requests of made-up traffic.
    plot
        Draw hits over sizes into this file (.svg, .png or .pdf).
    output
        Tables for people or JSON for scripts.
    """
    plan = TracePlan(_policies(policy), tuple(_count(part) for part in capacity.split(",")), look_ahead, tier, swap)
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
    if output == "json":
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    console = Console()
    for shown in (table(found), tier_table(found)):
        if shown is not None:
            console.print(shown)


def _policies(text: str) -> tuple[PolicyName, ...]:
    known: dict[str, PolicyName] = {name: name for name in POLICIES}
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no policy called {name!r}, expected some of {', '.join(POLICIES)}")
    return tuple(known[name] for name in names)


def _count(text: str) -> int:
    if not text.strip().isdigit():
        raise ConfigError(f"--capacity is {text!r}, expected whole numbers separated by commas, such as 5000,10000")
    return int(text)
