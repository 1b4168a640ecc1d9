"""``ems bench``: the verbs that measure. Only arguments and output are here; measuring is in ``ems.bench``."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ems.bench.completions import base_url
from ems.bench.pool import PoolPlan
from ems.bench.pool import measure as measure_pool
from ems.bench.pool_report import tables as pool_tables
from ems.bench.ttft import measure
from ems.bench.ttft_report import Plan, parse_token_ids, table
from ems.cli.options import Format, Seconds, parse_counts
from ems.cli.progress import Bars
from ems.cli.shown import note, present
from ems.config import default_socket, parse_size


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
    socket: Path | None = None,
    api_key: Annotated[str | None, Parameter(env_var="OPENAI_API_KEY")] = None,
    output: Format = "table",
) -> int:
    """Measure the time to first token in three steps on two OpenAI-compatible servers.

    Random prompts A go to URL1 (first time), then others to URL1 (they push A out of the engine's own cache), then A
    to URL1 again and at last A to URL2. Exit status 1 when a request failed.

    Parameters
    ----------
    url1
        Server of steps 1 and 2, such as http://127.0.0.1:8000.
    url2
        Server of step 3.
    requests
        Prompts in A, and as many in B.
    concurrency
        Requests under way at the same time.
    input_tokens
        Length of each prompt.
    output_tokens
        Length of each answer.
    seed
        Draws the prompts; random by default, because prompts that were sent before are no longer cold.
    model
        Name of the model; the first that URL1 offers by default.
    token_ids
        Range of ids from which prompts are drawn.
    timeout
        Seconds for one request.
    socket
        Socket of a pool node whose figures are shown too; this host's by default, when one answers.
    api_key
        Sent as bearer token.
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
    with Bars() as bars:
        report = asyncio.run(
            measure(
                urls,
                plan,
                model=model,
                api_key=api_key,
                timeout=timeout,
                socket=socket or default_socket(),
                progress=bars.tell,
            )
        )
    present(report, table(report), output)
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

    Parameters
    ----------
    socket
        Socket of the node to measure; by default one that is started for this run alone.
    pages
        Page sizes, separated by commas.
    keys
        Keys of one lookup, separated by commas.
    rounds
        Rounds over each page size, of which the median counts.
    lookups
        Lookups of each number of keys.
    """
    plan = PoolPlan(
        pages=tuple(parse_size(part, name="--pages") for part in pages.split(",")),
        keys=parse_counts(keys, "--keys"),
        rounds=rounds,
        lookups=lookups,
    )
    report = measure_pool(plan, socket, note)
    present(report, pool_tables(report), output)
