from __future__ import annotations

import asyncio
import random
import socket

import pytest

from ems.errors import ConfigError
from ems.kthena.rate_limit import RateLimit, Unit
from ems.router.admission import shared_limits
from ems.router.admission.limits import Exceeded, Kind, Limited, Taken
from ems.router.admission.shared_limits import RedisLimits
from tests.kit.redis import redis_server
from tests.router.fakes import dead_address

pytestmark = pytest.mark.process

DAY = RateLimit(input_tokens_per_unit=1000, output_tokens_per_unit=1000, unit=Unit.MONTH)
ROUTE: Limited = ("route/m", DAY)


async def taken(limits: RedisLimits, tokens: int, *limited: Limited) -> Taken:
    got = await limits.take(list(limited or (ROUTE,)), tokens)
    assert not isinstance(got, Exceeded)
    return got


async def settled(limits: RedisLimits) -> None:
    while limits._tasks:
        await asyncio.wait(limits._tasks)


async def test_routers_take_from_the_same_buckets() -> None:
    with redis_server() as port:
        url = f"redis://127.0.0.1:{port}"
        async with RedisLimits(url) as one, RedisLimits(url) as other:
            first = await taken(one, 600)
            got = await other.take([ROUTE], 600)
            assert isinstance(got, Exceeded)
            assert got[:2] == ("route/m", Kind.INPUT)
            assert got.retry_after is not None
            assert 0 < got.retry_after <= 30 * 86400
            first.give_back(0.0)
            first.give_back(0.0)
            await settled(one)
            (await taken(other, 1000)).settle(5000, 0.0)
            await settled(other)
            empty = await one.take([ROUTE], 0)
            assert isinstance(empty, Exceeded)
            assert empty.kind is Kind.OUTPUT
            await taken(one, 1000, ("route/other", DAY))


async def test_all_or_none_and_a_changed_limit_keeps_its_share() -> None:
    small = RateLimit(input_tokens_per_unit=10, unit=Unit.MONTH)
    double = RateLimit(input_tokens_per_unit=2000, unit=Unit.MONTH)
    with redis_server() as port:
        async with RedisLimits(f"redis://127.0.0.1:{port}") as limits:
            got = await limits.take([ROUTE, ("key/a", small)], 500)
            assert isinstance(got, Exceeded)
            assert got.scope == "key/a"
            await taken(limits, 1000)
            assert isinstance(await limits.take([("route/m", double)], 10), Exceeded)


async def test_a_client_that_leaves_while_redis_is_asked_costs_nothing() -> None:
    with redis_server() as port:
        async with RedisLimits(f"redis://127.0.0.1:{port}") as limits:
            await taken(limits, 0)  # there is a connection now
            for turns in range(4):
                asking = asyncio.create_task(limits.take([ROUTE], 900))
                for _ in range(turns):
                    await asyncio.sleep(0)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
                await settled(limits)
            await taken(limits, 1000)


async def test_random_histories_of_two_routers_end_full() -> None:
    chance = random.Random(7)
    with redis_server() as port:
        url = f"redis://127.0.0.1:{port}"
        async with RedisLimits(url) as one, RedisLimits(url) as other:
            held: list[tuple[Taken, int]] = []
            for _ in range(300):
                if held and chance.random() < 0.5:
                    held.pop(chance.randrange(len(held)))[0].give_back(0.0)
                    await settled(one)
                    await settled(other)
                else:
                    tokens = chance.randrange(400)
                    got = await chance.choice((one, other)).take([ROUTE], tokens)
                    if not isinstance(got, Exceeded):
                        held.append((got, tokens))
                assert sum(tokens for _, tokens in held) <= 1001
            for got, _ in held:
                got.give_back(0.0)
            await settled(one)
            await settled(other)
            await taken(one, 1000)


async def test_without_redis_each_router_enforces_the_limit_and_shares_again_later() -> None:
    with redis_server() as port:
        pass
    async with RedisLimits(f"redis://127.0.0.1:{port}") as limits:
        await taken(limits, 900)
        assert isinstance(await limits.take([ROUTE], 900), Exceeded)
        assert limits.failures >= 1
        with redis_server(port):
            limits._retry_at = 0.001
            await taken(limits, 1000)
            assert not limits._retry_at


async def test_a_redis_that_does_not_answer_does_not_hold_up_requests() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with RedisLimits(f"redis://127.0.0.1:{silent.getsockname()[1]}") as limits:
            async with asyncio.timeout(10):
                await taken(limits, 10)
            assert limits.failures == 1


async def test_many_requests_at_once_do_not_make_a_router_go_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_limits, "TIMEOUT", 20.0)
    with redis_server() as port:
        async with RedisLimits(f"redis://127.0.0.1:{port}") as limits:
            await taken(limits, 0)
            got = await asyncio.gather(*(limits.take([ROUTE], 100) for _ in range(100)))

            assert sum(isinstance(one, Taken) for one in got) == 10
            assert not limits.failures


@pytest.mark.parametrize("reply", [b"*2\r\n:9\r\n:1\r\n", b"*1\r\n:0\r\n", b"*2\r\n$1\r\nx\r\n:1\r\n", b":1\r\n"])
async def test_what_answers_nonsense_does_not_count(reply: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(reply if b"EVALSHA" in data else b"+OK\r\n" * max(1, data.count(b"\r\nCLIENT\r\n")))
        writer.close()

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        RedisLimits(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}") as limits,
    ):
        await taken(limits, 10)

        assert limits.failures == 1


def test_what_is_no_url_is_said() -> None:
    with pytest.raises(ConfigError, match="--limits-redis"):
        RedisLimits(f"http://{dead_address()}")
