"""Limits that several routers share: their buckets are in a Redis, with its clock.

A script takes from all buckets of a request or from none, in one round trip; what comes back later is sent without
waiting.  What always holds: a request waits at most ``TIMEOUT`` for Redis; while Redis does not answer each router
enforces the whole limit by itself, so that neither all is refused nor nothing; what was taken by a request whose client
left meanwhile comes back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Self

from ems.errors import ConfigError
from ems.router.admission.limits import Exceeded, Kind, Limited, Limits, Name, Taken, buckets_of, never_fits

if TYPE_CHECKING:
    from redis.asyncio import Redis

TIMEOUT = 0.25
RETRY_SECONDS = 1.0
"""How long a Redis that failed is left alone."""
PREFIX = "ems:ratelimit:"

# Of each key: what the bucket holds at most, seconds in which it refills, what is asked for, what is moved.
# Returns the number of the first bucket that has too little and the seconds until it has enough, or two zeros.
_MOVE = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local left = {}
for i, key in ipairs(KEYS) do
  local most, seconds, asked = tonumber(ARGV[4*i-3]), tonumber(ARGV[4*i-2]), tonumber(ARGV[4*i-1])
  local known = redis.call('HMGET', key, 'left', 'at', 'most')
  left[i] = most
  if known[1] then
    local had = known[1] * most / known[3]
    left[i] = math.min(most, had + math.max(0, now - known[2]) * most / seconds)
  end
  if left[i] + 0.000001 < asked then
    local wait = math.ceil((asked - left[i]) * seconds / most - 0.000001)
    return {i, math.max(1, wait)}
  end
end
for i, key in ipairs(KEYS) do
  local most, seconds, moved = tonumber(ARGV[4*i-3]), tonumber(ARGV[4*i-2]), tonumber(ARGV[4*i])
  local after = math.min(most, left[i] + moved)
  redis.call('HSET', key, 'left', string.format('%.6f', after), 'at', string.format('%.6f', now), 'most', most)
  redis.call('EXPIRE', key, math.ceil(math.max(seconds * (2 - after / most), 60)))
end
return {0, 0}
"""

log = logging.getLogger("ems.router")

_Bucket = tuple[Name, int, int]


class RedisLimits:
    """Buckets in one Redis; an asynchronous context manager that owns the connections."""

    def __init__(self, url: str) -> None:
        try:
            from redis.asyncio import BlockingConnectionPool, Redis
        except ImportError:
            raise ConfigError("Shared limits need the package redis: install 'ems-kv[redis]'") from None
        try:
            connections = BlockingConnectionPool.from_url(
                url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT, max_connections=16, timeout=TIMEOUT
            )
            self._redis: Redis = Redis.from_pool(connections)
        except ValueError as error:
            raise ConfigError(f"--limits-redis {url!r} is no URL of a Redis: {error}") from None
        self._script = self._redis.register_script(_MOVE)
        self._own = Limits()
        self._retry_at = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failures = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * TIMEOUT)
        await self._redis.aclose()

    async def take(self, limited: Sequence[Limited], tokens: int) -> Taken | Exceeded:
        loop = asyncio.get_running_loop()
        limited = tuple(limited)
        if (never := never_fits(limited, tokens)) is not None:
            return never
        if loop.time() < self._retry_at:
            return self._own.take(limited, tokens, loop.time())
        buckets = buckets_of(limited)
        asked = [(bucket, tokens, -tokens) if bucket[0][1] is Kind.INPUT else (bucket, 1, 0) for bucket in buckets]
        taken = Taken([(bucket[0], bucket) for bucket in buckets], tokens, self._move)
        asking = self._start(self._ask(asked))
        try:
            lacking = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda done: _give_back_unused(done, taken, loop.time()))
            raise
        if lacking is None:
            return self._own.take(limited, tokens, loop.time())
        if lacking[0]:
            name, most, _ = buckets[lacking[0] - 1]
            return Exceeded(*name, most, lacking[1])
        return taken

    def _move(self, buckets: list[_Bucket], tokens: int, _: float) -> None:
        self._start(self._ask([(bucket, float("-inf"), tokens) for bucket in buckets]))

    def _start(self, work: Coroutine[Any, Any, tuple[int, int] | None]) -> asyncio.Task[tuple[int, int] | None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask(self, asked: Sequence[tuple[_Bucket, float, int]]) -> tuple[int, int] | None:
        """Which bucket has too little (0: none) and for how many seconds; None when Redis does not answer."""
        from redis.exceptions import RedisError

        keys = [f"{PREFIX}{{{scope}}}:{kind}" for ((scope, kind), _, _), _, _ in asked]
        arguments: list[float] = []
        for (_, most, seconds), wanted, moved in asked:
            arguments += (most, seconds, max(wanted, -1e15), moved)
        try:
            async with asyncio.timeout(TIMEOUT):
                number, wait = map(int, await self._script(keys=keys, args=arguments))
        except (RedisError, OSError, TimeoutError, TypeError, ValueError) as error:  # the last two: it is no Redis
            self._failed(error)
            return None
        if not 0 <= number <= len(asked):
            self._failed(f"it names bucket {number} of {len(asked)}")
            return None
        if self._retry_at:
            self._retry_at = 0.0
            log.info("Limits are shared again")
        return number, wait

    def _failed(self, why: object) -> None:
        self.failures += 1
        if not self._retry_at:
            log.warning("Limits are not shared for now, each router enforces them alone: Redis: %s", why)
        self._retry_at = asyncio.get_running_loop().time() + RETRY_SECONDS


def _give_back_unused(done: asyncio.Task[tuple[int, int] | None], taken: Taken, now: float) -> None:
    if not done.cancelled() and (lacking := done.result()) is not None and not lacking[0]:
        taken.give_back(now)
