"""``ems simulate``.  Arguments, progress and output are here; simulating is in ``ems.simulate``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import psutil
from cyclopts import Parameter

from ems.bench.trace.compare import refuse_plot
from ems.bench.trace.traffic import read_or_make
from ems.cli.options import Flag, Format
from ems.cli.progress import progress_bars
from ems.cli.shown import note, present
from ems.config import DEFAULT_POLICY, PolicyName, format_size, parse_size
from ems.simulate import plot as drawn
from ems.simulate import report
from ems.simulate.network import Network
from ems.simulate.plan import Placement, Plan, Routing, Write
from ems.simulate.simulation import simulate as run
from ems.simulate.workload import Workload

_NETWORK = Network()


def simulate(
    file: str,
    /,
    *,
    hosts: int = 16,
    copies: int = 1,
    spread: float = 60,
    sample: float = 1,
    seed: int = 0,
    memory: str = "512GB",
    cluster: str = "512GB",
    persistent: Flag = False,
    page_size: str = "4MB",
    pages_per_block: int = 16,
    policy: PolicyName = DEFAULT_POLICY,
    routing: Routing = "prefix",
    placement: Placement = "random",
    replicas: int = 1,
    write: Write = "on-save",
    lose: int = 0,
    lose_at: float = 1800,
    down: float = 60,
    window: float = 60,
    requests: int = 4000,
    network: Annotated[Network, Parameter(name="*")] = _NETWORK,
    plot: Path | None = None,
    output: Format = "table",
) -> None:
    """Simulate a pool over many hosts: where blocks come from, what moves, what the master has to do.

    The brains of the hosts' nodes are the real ones; network and Mooncake's master are models. No bytes are moved and
    time is that of the trace.

    Args:
        file: JSON lines with timestamp (ms) and hash_ids; or made:conversations, documents, shifting, scans or loop.
        hosts: Hosts, each with a node and engines.
        copies: How many times the trace comes, each time with blocks of its own.
        spread: Seconds by which copies are shifted at most.
        sample: Share of the sessions that is simulated, on hosts with this share of their memory; below 1 the report
            has standard errors.
        seed: Draws shifts, samples, hosts and places.
        memory: Memory of a node.
        cluster: Memory that a host contributes to the cluster; 0 is a fleet without one.
        persistent: Below is a tier that keeps all pages.
        page_size: Bytes of a page.
        pages_per_block: Pages of one block of the trace; they come and go together.
        policy: Which page leaves a node's memory first.
        routing: Host of a request: any, one with least to compute, or the one that served its session last.
        placement: Host of a block in the cluster: any, the emptiest of some, or the one that writes it.
        replicas: Copies of each block in the cluster.
        write: When a block is written to the cluster as well.
        lose: Hosts that are lost together; what that costs is found by a second run.
        lose_at: Seconds until they are lost.
        down: Seconds until they are back, empty.
        window: Seconds of each part of the figures over time.
        requests: Requests of made-up traffic.
        network: Constants of the network.
        plot: Draw figures over time into this file (.svg, .png or .pdf).
    """
    plan = Plan(
        hosts=hosts,
        copies=copies,
        spread=spread,
        sample=sample,
        seed=seed,
        memory=parse_size(memory, name="--memory"),
        cluster=0 if cluster.strip() == "0" else parse_size(cluster, name="--cluster"),
        persistent=persistent,
        page_size=parse_size(page_size, name="--page-size"),
        pages_per_block=pages_per_block,
        policy=policy,
        routing=routing,
        placement=placement,
        replicas=replicas,
        write=write,
        window=window,
        lose=lose,
        lose_at=lose_at,
        down=down,
        network=network,
    )
    if plot is not None:
        refuse_plot(plot)
    began = time.monotonic()
    workload = Workload(read_or_make(file, requests), plan.copies, plan.sample, plan.spread, plan.seed)
    plan.refuse_late_loss(workload.lasts)
    plan.refuse_unfit(workload.longest, workload.distinct, psutil.virtual_memory().available)
    with progress_bars() as tell:
        found = run(plan, workload, tell)
    if plot is not None:
        drawn.plot(found, plot)
    process = psutil.Process().memory_info().rss
    note(
        f"simulated {len(workload):,} requests in {time.monotonic() - began:.1f} s and {format_size(process)} of memory"
    )
    present(found, report.tables(found), output)
