"""``ems bench``: the verbs that measure.  Arguments, progress and output are here; measuring is in ``ems.bench``."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import Parameter

from ems.bench import pool as of_pool
from ems.bench import tier as of_tier
from ems.bench import ttft as of_ttft
from ems.bench.completions import base_url
from ems.bench.router import contenders as of_contenders
from ems.bench.router import measure as of_router
from ems.bench.trace.compare import TracePlan, compare, refuse_plot, table, tier_table
from ems.bench.trace.compare import plot as draw
from ems.bench.trace.traffic import read_or_make
from ems.bench.ttft_report import Plan, parse_token_ids
from ems.bench.ttft_report import table as ttft_table
from ems.cli.options import Format, Seconds, Texts, parse_counts
from ems.cli.progress import progress_bars
from ems.cli.shown import note, present
from ems.config import POLICIES, PolicyName, default_socket, format_size, parse_size
from ems.errors import ConfigError
from ems.pool.tiers.settings import parse_tier
from ems.tables import Table


def ttft(
    url1: str,
    url2: str,
    /,
    *,
    requests: int = 100,
    concurrency: int = 25,
    input_tokens: int = 1024,
    output_tokens: int = 10,
    seed: int | None = None,
    model: str | None = None,
    token_ids: str = "300-999",
    timeout: Seconds = 600,
    rest: Seconds = 0,
    socket: Path | None = None,
    api_key: Annotated[str | None, Parameter(env_var="OPENAI_API_KEY")] = None,
    output: Format = "table",
) -> int:
    """Measure the time to first token in three steps on two OpenAI-compatible servers.

    Random prompts A go to URL1 (first time), then others to URL1 (they push A out of the engine's own cache), then A
    to URL1 again and at last A to URL2. Exit status 1 when a request failed.

    Args:
        url1: Server of steps 1 and 2, such as http://127.0.0.1:8000.
        url2: Server of step 3.
        requests: Prompts in A, and as many in B.
        concurrency: Requests under way at the same time.
        input_tokens: Length of each prompt.
        output_tokens: Length of each answer.
        seed: Draws the prompts; random by default, because prompts that were sent before are no longer cold.
        model: Name of the model; the first that URL1 offers by default.
        token_ids: Range of ids from which prompts are drawn.
        timeout: Seconds for one request.
        rest: Seconds before A goes to URL2, in which hosts of a cluster copy what was used again.
        socket: Socket of a pool node whose figures are shown too; this host's by default, when one answers.
        api_key: Sent as bearer token.
    """
    first_id, last_id = parse_token_ids(token_ids)
    plan = Plan(
        requests=requests,
        concurrency=concurrency,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        seed=secrets.randbits(32) if seed is None else seed,
        first_token_id=first_id,
        last_token_id=last_id,
    )
    urls = (base_url("URL1", url1), base_url("URL2", url2))
    with progress_bars() as tell:
        measuring = of_ttft.measure(
            urls,
            plan,
            model=model,
            api_key=api_key,
            timeout=timeout,
            rest=rest,
            socket=socket or default_socket(),
            progress=tell,
        )
        report = asyncio.run(measuring)
    present(report, ttft_table(report), output)
    return 1 if report.failed else 0


def pool(
    *,
    socket: Path | None = None,
    pages: str = "32KB,128KB,768KB,4MB",
    keys: str = "1,128,1024",
    rounds: int = 5,
    lookups: int = 400,
    output: Format = "table",
) -> None:
    """Measure the pool: bandwidth of saves and loads beside plain memcpy, latency of lookups.

    Args:
        socket: Socket of the node to measure, whose tiers get the pages, too; by default one is started for that.
        pages: Page sizes, separated by commas.
        keys: Keys of one lookup, separated by commas.
        rounds: Rounds over each page size, of which the median counts.
        lookups: Lookups of each number of keys.
    """
    sizes = tuple(parse_size(part, name="--pages") for part in pages.split(","))
    plan = of_pool.PoolPlan(pages=sizes, keys=parse_counts(keys, "--keys"), rounds=rounds, lookups=lookups)
    report = of_pool.measure(plan, socket, note)
    present(report, of_pool.tables(report), output)


def tier(tier: str, /, *, total: str = "512MB", page: Texts = None, rounds: int = 5, output: Format = "table") -> None:
    """Measure how fast a directory tier writes and reads, beside plain sequential I/O of the same bytes.

    Args:
        tier: The tier as 'ems node --tier' takes it; what is written goes into a folder below it and is removed.
        total: Bytes that each round writes and reads.
        page: Bytes of a page; may be repeated.
        rounds: Rounds for each page size; medians are shown.
    """
    sizes = [parse_size(one, name="--page") for one in page] if page else list(of_tier.DEFAULT_PAGES)
    plan = of_tier.TierPlan(parse_size(total, name="--total"), sizes, rounds)
    rows = of_tier.measure(parse_tier(tier), plan, note)
    cells = [
        (
            format_size(row.page_bytes),
            *_speeds(row.plain_write, row.tier_write, row.write_share),
            *_speeds(row.plain_read, row.tier_read, row.read_share),
        )
        for row in rows
    ]
    columns = ("page", "plain write", "tier write", "share", "plain read", "tier read", "share")
    present({"items": rows}, Table(columns, cells, "Bandwidth in GB/s"), output)


def _speeds(plain: float, tier: float, share: float) -> tuple[str, ...]:
    return f"{plain / 1e9:.2f}", f"{tier / 1e9:.2f}", f"{share:.0%}"


def router(
    *,
    requests: int = 4000,
    connections: int = 32,
    streams: int = 64,
    chunks: int = 64,
    interval: Seconds = 0.01,
    rate: float = 500,
    seconds: Seconds = 5,
    rounds: int = 3,
    memory_requests: int = 0,
    proxy_command: Texts = None,
    only: str | None = None,
    output: Format = "table",
) -> None:
    """Measure what routers cost: CPU for each request and chunk, rate, added latency, in front of the same stubs.

    EMS's router is measured, and vllm-router where it is installed; others are given by --proxy-command.

    Args:
        requests: PD requests of a round.
        connections: Connections of that load.
        streams: Streams at once.
        chunks: Chunks of a stream.
        interval: Seconds between chunks.
        rate: Requests a second when latency is measured.
        seconds: How long they are sent; 0 leaves that out.
        rounds: Rounds, of which the best counts.
        memory_requests: Requests over which memory is watched.
        proxy_command: NAME=COMMAND of another router, with {port}, {prefill} and {decode} for ports; may be repeated.
        only: Names of the routers to measure, separated by commas.
    """
    plan = of_router.RouterPlan(
        requests=requests,
        connections=connections,
        streams=streams,
        chunks=chunks,
        interval=interval,
        rate=rate,
        seconds=seconds,
        rounds=rounds,
        memory_requests=memory_requests,
    )
    known = [*of_contenders.installed(), *map(of_contenders.parse_command, proxy_command or ())]
    wanted = None if only is None else {name.strip() for name in only.split(",")}
    chosen = [one for one in known if wanted is None or one.name in wanted]
    if not chosen:
        raise ConfigError(f"--only {only} leaves no router, expected some of {', '.join(one.name for one in known)}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(of_router.measure(chosen, plan, note))
    present(report, of_router.tables(report), output)


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

    Args:
        file: JSON lines with timestamp (ms) and hash_ids; or made:conversations, documents, shifting, scans or loop.
        policy: Policies, separated by commas.
        capacity: Sizes of the pool in blocks, separated by commas.
        look_ahead: Length of the queue of waiting requests, which are announced to the pool.
        tier: Blocks a second that a tier below memory brings up for announced requests; 0 means there is none.
        requests: Requests of made-up traffic.
        plot: Draw hits over sizes into this file (.svg, .png or .pdf).
    """
    if plot is not None:
        refuse_plot(plot)
    read = read_or_make(file, requests)
    plan = TracePlan(_policies(policy), parse_counts(capacity, "--capacity"), look_ahead, tier)
    with progress_bars() as tell:
        found = compare(read, plan, tell)
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
