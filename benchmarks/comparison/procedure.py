"""What is measured of one contender, request by request; the engines run already.

``base`` is an engine without a pool that stands beside the contender's two, so that whatever is compared with it is
compared in turns and not with another quarter of an hour.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import msgspec
import psutil

from benchmarks.comparison.pairs import Comparison, compare
from benchmarks.comparison.usage import Processes, cpu_seconds, memory
from ems.bench.completions import Completion, CompletionClient, ServerError
from ems.bench.ttft import measure
from ems.bench.ttft_report import Plan, Step
from tests.kit.engine import SERVED_MODEL, VllmServer

QUIET_SECONDS = 0.3
"""Pause after each request that is compared, much longer than storing what it computed takes: what one engine does
behind it must not slow the other one's request down."""
LOOK_SECONDS = 0.1
"""Pause between two attempts."""
RESET_SECONDS = 10.0
"""How long an engine may take until it has forgotten its own prefix cache: blocks may still be in use."""

Tell = Callable[[str], None]
Timed = Callable[[], Awaitable[float]]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    requests: int = 100
    concurrency: int = 25
    inputs: tuple[int, ...] = (1024, 1100)
    """Prompt lengths of the three steps: whole blocks only, and a part of a block."""
    output_tokens: int = 10
    rest: float = 0.0
    """Seconds before the third step."""
    pairs: int = 40
    waves: int = 12
    """Pairs of waves, each of ``concurrency`` prompts that nobody has seen, all at once."""
    cold_tokens: int = 1024
    prefix_tokens: int = 4096
    new_tokens: int = 16
    """Tokens behind the prefix that are new in each request."""
    decode_prompt_tokens: int = 2048
    """Stored while the first tokens behind it are generated."""
    decode_tokens: int = 33
    seed: int = 0


class ThreeSteps(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT in three steps, and what a request costs in CPU seconds of engines and pool, step by step."""

    input_tokens: int
    steps: list[Step]
    cpu_seconds: list[float]


class Warm(msgspec.Struct, frozen=True, kw_only=True):
    """Hits on a long prefix."""

    own: Comparison
    """The engine's own prefix cache with the connector in place, compared with that of the engine without a pool."""
    pool: Comparison | None
    """The pool, after the engine forgot, compared with the same; None where there is no pool."""
    pool_above_own: Comparison | None
    """The pool, compared with the own prefix cache of the very same engine."""


class Turns(msgspec.Struct, kw_only=True):
    """Seconds, measured in turns: the engine without a pool first in each, then this one."""

    cold: list[tuple[float, float]] = []
    waves: list[tuple[float, float]] = []
    own: list[tuple[float, float]] = []
    pool: list[tuple[float, float]] = []
    decode: list[tuple[float, float]] = []

    def add(self, other: Turns) -> None:
        """Take in what was measured in another life of the same engines."""
        self.cold += other.cold
        self.waves += other.waves
        self.own += other.own
        self.pool += other.pool
        self.decode += other.decode

    def warm(self) -> Warm:
        """The hits in short."""
        same = [(own, pool) for (_, own), (_, pool) in zip(self.own, self.pool, strict=False)]
        return Warm(
            own=compare(self.own),
            pool=compare(self.pool) if self.pool else None,
            pool_above_own=compare(same) if same else None,
        )


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one contender; figures of ``Comparison`` are those of the engine without a pool and of this."""

    three_steps: list[ThreeSteps]
    cold: Comparison
    """Time to first token of a prompt that nobody has seen."""
    waves: Comparison
    """Mean time to first token of many such prompts at once: step 1, but by turns."""
    warm: Warm
    decode: Comparison
    """Time for each further token while the prompt is being stored."""
    memory: int
    """Bytes of both engines and the pool after the three steps."""


@dataclass(frozen=True)
class Bench:
    """The two engines of a contender, the one it is compared with (mostly without a pool), the pool's processes."""

    first: VllmServer
    second: VllmServer | None
    """None where the three steps are not measured."""
    base: VllmServer
    pool: Processes
    has_pool: bool
    sizes: Sizes
    tell: Tell


async def in_three_steps(bench: Bench) -> tuple[list[ThreeSteps], int]:
    """The three steps for each prompt length, and the memory of all processes in the end, in bytes.

    Raises:
        ServerError: an engine went away, or answers with errors.
    """
    steps = [await _three_steps(bench, tokens) for tokens in bench.sizes.inputs]
    return steps, memory(_processes(bench))


async def by_turns(bench: Bench) -> Turns:
    """All that is compared with the engine without a pool; of the contender's engines the first alone is asked.

    Raises:
        ServerError: an engine went away, or answers with errors.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        pairs = Pairs(bench, session)
        turns = Turns(cold=await pairs.cold(), waves=await pairs.waves())
        await pairs.warm(turns)
        turns.decode = await pairs.decode()
        return turns


def findings(steps: list[ThreeSteps], memory_bytes: int, turns: Turns) -> Findings:
    """All that was measured, in short."""
    return Findings(
        three_steps=steps,
        cold=compare(turns.cold),
        waves=compare(turns.waves),
        warm=turns.warm(),
        decode=compare(turns.decode),
        memory=memory_bytes,
    )


# --------------------------------------------------------------------------------------------------------- three steps


async def _three_steps(bench: Bench, tokens: int) -> ThreeSteps:
    sizes = bench.sizes
    plan = Plan(
        requests=sizes.requests,
        concurrency=sizes.concurrency,
        input_tokens=tokens,
        output_tokens=sizes.output_tokens,
        seed=sizes.seed * 1_000_000 + tokens,  # prompts of different lengths have no beginning in common
    )
    marks: dict[str, float] = {}

    def watch(name: str, done: int, _all: int) -> None:
        if not done:
            bench.tell(f"{tokens:,} tokens: {' '.join(name.split())}")
            marks[name] = cpu_seconds(_processes(bench))

    assert bench.second is not None
    report = await measure(
        (bench.first.url, bench.second.url), plan, model=SERVED_MODEL, progress=watch, rest=sizes.rest
    )
    await asyncio.sleep(QUIET_SECONDS)
    if report.failed:
        raise ServerError(f"{report.failed} of {3 * sizes.requests} requests failed, expected none")
    names = [*marks, "end"]
    marks["end"] = cpu_seconds(_processes(bench))
    spent = {name: marks[after] - marks[name] for name, after in itertools.pairwise(names)}
    return ThreeSteps(
        input_tokens=tokens,
        steps=report.steps,
        cpu_seconds=[spent[step.name] / sizes.requests for step in report.steps],
    )


def _processes(bench: Bench) -> list[psutil.Process]:
    second = bench.second.processes() if bench.second is not None else []
    return [*bench.first.processes(), *second, *bench.pool()]


# --------------------------------------------------------------------------------------------------------------- pairs


Times = list[tuple[float, float]]


class Pairs:
    """Requests sent in turns to the engine that is compared with (``base``) and to the contender's first one."""

    def __init__(self, bench: Bench, session: aiohttp.ClientSession) -> None:
        self._sizes = bench.sizes
        self._tell = bench.tell
        self._has_pool = bench.has_pool
        self._session = session
        self._client = CompletionClient(session, bench.first.url)
        self._base = CompletionClient(session, bench.base.url)
        self._random = random.Random(f"{bench.sizes.seed}/{bench.first.port}")

    async def cold(self) -> Times:
        self._tell("cold requests by turns")

        def first_token(client: CompletionClient) -> Timed:
            async def timed() -> float:
                return (await self._ask(client, self._prompt(self._sizes.cold_tokens), 4)).first_token

            return timed

        return await self._in_turns(first_token(self._base), first_token(self._client))

    async def waves(self) -> Times:
        self._tell("waves of cold requests by turns")

        def mean_first_token(client: CompletionClient) -> Timed:
            async def timed() -> float:
                prompts = [self._prompt(self._sizes.cold_tokens) for _ in range(self._sizes.concurrency)]
                count = self._sizes.output_tokens
                asked = [client.complete(SERVED_MODEL, prompt, count) for prompt in prompts]
                answers = await asyncio.gather(*asked)
                await asyncio.sleep(QUIET_SECONDS)
                return statistics.fmean(answer.first_token for answer in answers)

            return timed

        return await self._in_turns(
            mean_first_token(self._base), mean_first_token(self._client), count=self._sizes.waves
        )

    async def decode(self) -> Times:
        self._tell("further tokens by turns")

        def token_time(client: CompletionClient) -> Timed:
            async def timed() -> float:
                count = self._sizes.decode_tokens
                answer = await self._ask(client, self._prompt(self._sizes.decode_prompt_tokens), count)
                return (answer.whole - answer.first_token) / (count - 1)

            return timed

        return await self._in_turns(token_time(self._base), token_time(self._client))

    async def warm(self, turns: Turns) -> None:
        self._tell(f"hits on {self._sizes.prefix_tokens:,} tokens by turns")
        prefix = self._prompt(self._sizes.prefix_tokens)

        def hit(client: CompletionClient, *, forget: bool) -> Timed:
            async def timed() -> float:
                if forget:
                    await empty_own_cache(self._session, client.url)
                return (await self._ask(client, prefix + self._prompt(self._sizes.new_tokens), 1)).first_token

            return timed

        for client in (self._base, self._client):
            await self._ask(client, prefix, 4)
        kinds = [hit(self._base, forget=False), hit(self._client, forget=False)]
        if self._has_pool:
            kinds.append(hit(self._client, forget=True))
        for number in range(self._sizes.pairs + 1):
            took = [0.0] * len(kinds)
            for turn in range(len(kinds)):
                kind = (number + turn) % len(kinds)
                took[kind] = await kinds[kind]()
            if number:  # the first ones do not count
                turns.own.append((took[0], took[1]))
                turns.pool += [(took[0], took[2])] if self._has_pool else []

    async def _in_turns(self, base: Timed, other: Timed, count: int = 0) -> Times:
        """Both by turns, each as often first as second; one pair before that does not count."""
        measured = []
        for number in range((count or self._sizes.pairs) + 1):
            if number % 2:
                second, first = await other(), await base()
            else:
                first, second = await base(), await other()
            if number:
                measured.append((first, second))
        return measured

    async def _ask(self, client: CompletionClient, prompt: list[int], tokens: int) -> Completion:
        answer = await client.complete(SERVED_MODEL, prompt, tokens)
        await asyncio.sleep(QUIET_SECONDS)
        return answer

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(300, 1000), k=tokens)


async def empty_own_cache(session: aiohttp.ClientSession, url: str) -> None:
    """Empty the engine's own prefix cache, and leave the pool alone.

    Raises:
        ServerError: the engine refuses.
        TimeoutError: blocks are still in use after :data:`RESET_SECONDS`.
    """
    async with asyncio.timeout(RESET_SECONDS):
        while not await _reset(session, url):  # noqa: ASYNC110 - the engine gives no sign when it could
            await asyncio.sleep(LOOK_SECONDS)
    await asyncio.sleep(QUIET_SECONDS)


async def _reset(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.post(f"{url}/reset_prefix_cache") as answer:
        if answer.status != HTTPStatus.OK:
            raise ServerError(f"{url} does not reset its prefix cache: status {answer.status}")
        return bool((await answer.json())["success"])
