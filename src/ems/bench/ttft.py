"""Time to first token in three steps on two servers: what a cache behind them saves.

Prompts A go to server 1, which has not seen them; prompts B go there and push A out of the engine's own cache; then A
goes to server 1 again (a hit in the pool behind it) and to server 2 (a hit that another instance stored).  Nothing is
assumed about the servers except that they speak OpenAI's completions API and take prompts of token ids.

This is the shell: it sends and times.  What is sent and what comes out is in :mod:`ems.bench.ttft_report`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import aiohttp

from ems.bench.completions import CompletionClient, ServerError
from ems.bench.ttft_report import Outcome, Pass, Plan, Report, changes, evaluate
from ems.errors import ConfigError, PoolError
from ems.pool.client.pool_client import PoolClient

Progress = Callable[[str, int, int], None]
"""Told the name of a pass, how many of its requests are done, and how many there are."""

_COUNTERS = ("pages_committed", "keys_looked_up", "keys_hit", "pages_evicted")


async def measure(
    urls: tuple[str, str],
    plan: Plan,
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout: float = 600.0,
    socket: Path | None = None,
    progress: Progress | None = None,
    rest: float = 0.0,
) -> Report:
    """Run the procedure and return its report.

    ``urls`` are roots of servers, ``timeout`` is in seconds for one request, ``socket`` is that of a pool node whose
    figures are added when it answers; before step 3 nothing is sent for ``rest`` seconds.
    """
    tell = progress or (lambda _name, _done, _all: None)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=10),
        headers=headers,
        read_bufsize=1 << 20,
    ) as session:
        first, second = (CompletionClient(session, url) for url in urls)
        chosen = await _choose_model(first, second, model)
        for client in dict.fromkeys((first, second)):
            await _warm_up(client, chosen, plan, tell)
        before = _pool_figures(socket)
        a, b = plan.prompts("A"), plan.prompts("B")
        passes = [await _send(first, chosen, plan, ("1  A to server 1, cold", a), tell)]
        await _send(first, chosen, plan, ("   B to server 1, evicts A", b), tell)
        passes.append(await _send(first, chosen, plan, ("2  A to server 1 again", a), tell))
        await asyncio.sleep(rest)
        passes.append(await _send(second, chosen, plan, ("3  A to server 2", a), tell))
        after = _pool_figures(socket)
    pool = changes(before, after) if before and after else None
    return Report(model=chosen, plan=plan, steps=evaluate(passes), pool=pool)


async def _choose_model(first: CompletionClient, second: CompletionClient, wanted: str | None) -> str:
    offers = [await first.models(), await second.models()]
    model = wanted or next(iter(offers[0]), None)
    if model is None:
        raise ServerError(f"{first.url} offers no model, expected one or more")
    for client, offered in zip((first, second), offers, strict=True):
        if model not in offered:
            names = ", ".join(offered) or "no model"
            raise ConfigError(f"{client.url} offers {names} and not {model}; name one that both offer with --model")
    return model


async def _warm_up(client: CompletionClient, model: str, plan: Plan, tell: Progress) -> None:
    """Let the server pay for what happens once: short prompts, some of them at once, and one of full length."""
    prompts = plan.prompts(f"warm-up of {client.url}")[: min(4, plan.concurrency)]
    short = [prompt[:16] for prompt in prompts]
    name = f"warming up {client.url}"
    tell(name, 0, 2)
    await asyncio.gather(*(client.complete(model, prompt, plan.output_tokens) for prompt in short))
    tell(name, 1, 2)
    await client.complete(model, prompts[0], plan.output_tokens)
    tell(name, 2, 2)


async def _send(
    client: CompletionClient, model: str, plan: Plan, what: tuple[str, Sequence[Sequence[int]]], tell: Progress
) -> Pass:
    """Send all prompts, ``plan.concurrency`` at once, each worker the next one as soon as it is free."""
    name, prompts = what
    outcomes: list[Outcome | None] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))
    done = 0
    last_error: ServerError | None = None

    async def work() -> None:
        nonlocal done, last_error
        for index in waiting:
            try:
                answer = await client.complete(model, prompts[index], plan.output_tokens)
                outcomes[index] = Outcome(first_token=answer.first_token, text=answer.text)
            except ServerError as error:
                last_error = error
            done += 1
            tell(name, done, len(prompts))

    tell(name, 0, len(prompts))
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(plan.concurrency, len(prompts))):
            group.create_task(work())
    if last_error is not None and not any(outcomes):
        raise last_error
    return Pass(name=name, url=client.url, seconds=time.perf_counter() - started, outcomes=outcomes)


def _pool_figures(socket: Path | None) -> dict[str, float] | None:
    if socket is None or not socket.exists():
        return None
    try:
        with closing(PoolClient(socket, name="ems bench ttft", administers=True)) as client:
            counters = client.stats()["counters"]
    except PoolError:
        return None
    assert isinstance(counters, dict), "the node's figures have counters"
    return {name: float(counters[name]) for name in _COUNTERS if name in counters}
