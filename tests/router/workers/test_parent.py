"""Several workers as processes: one is killed, all are stopped, and what one knows the others go by."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import socket
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import psutil
import pytest

from ems.kthena.rate_limit import RateLimit
from ems.router.workers.parent import _SIGNALS, Parent
from tests.router.fakes import FakeEngine, completion, dead_address, until
from tests.router.test_admission import bearer, key_file
from tests.router.test_process import STOPPING, Process, decoders, running, start

pytestmark = pytest.mark.process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from aiohttp import web

PROMPT = {"model": "m", "prompt": "x" * 4096, "max_tokens": 5000}


class Held:
    """Lets an engine's streams begin, and end when it is told so; what is not streamed is answered at once."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if not json.loads(body).get("stream"):
            return await completion(request, body)
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await self.go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response


def workers(router: Process) -> list[psutil.Process]:
    return psutil.Process(router.process.pid).children()


async def successor(router: Process, before: list[psutil.Process]) -> psutil.Process:
    await until(lambda: bool(set(workers(router)) - set(before)))
    return (set(workers(router)) - set(before)).pop()


def said(router: Process) -> list[str]:
    return [line for line in router.lines if not re.match(r"\d{4}-", line)]


async def line(router: Process, pattern: str, times: int = 1) -> None:
    """Read on until something was said so often."""
    assert router.process.stderr is not None
    async with asyncio.timeout(40):
        while sum(re.search(pattern, one) is not None for one in router.lines) < times:
            router.lines.append((await router.process.stderr.readline()).decode().rstrip("\n"))


@asynccontextmanager
async def client_of(router: Process, worker: psutil.Process) -> AsyncIterator[aiohttp.ClientSession]:
    """A client with one connection, which this worker serves: the others are frozen while it is made."""
    others = [one for one in workers(router) if one != worker]
    for one in others:
        one.suspend()
    try:
        client = aiohttp.ClientSession(router.url, connector=aiohttp.TCPConnector(limit=1))
        async with client, asyncio.timeout(60):
            await (await client.get("/livez")).read()
            for one in others:
                one.resume()
            yield client
    finally:
        for one in others:
            with suppress(psutil.NoSuchProcess):
                one.resume()


@asynccontextmanager
async def two_clients(*flags: str) -> AsyncIterator[tuple[Process, list[psutil.Process], list[aiohttp.ClientSession]]]:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running(*flags, "--workers", "2"))
        both = workers(router)
        assert len(both) == 2
        yield router, both, [await stack.enter_async_context(client_of(router, one)) for one in both]


@asynccontextmanager
async def begun(client: aiohttp.ClientSession) -> AsyncIterator[aiohttp.ClientResponse]:
    async with client.post("/v1/completions", json=PROMPT | {"stream": True}) as stream:
        assert await stream.content.readany() == b"data: 1\n\n"
        yield stream


async def costs(client: aiohttp.ClientSession, name: str) -> dict[str, float]:
    """Send a request; what each instance would have cost it."""
    async with client.post("/v1/completions", json={"prompt": name}, headers={"X-Request-Id": name}) as response:
        assert response.status == 200
        await response.read()
    async with client.get(f"/debug/requests/{name}") as response:
        attempt = (await response.json())["choice"]["attempts"][0]
    return {one["instance"]: one["cost"] for one in attempt["scores"]}


async def test_a_load_of_one_worker_is_seen_by_the_other_until_it_dies() -> None:
    held = Held()
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(FakeEngine(held)) for _ in range(2)]
        clients = two_clients(*decoders(one.address, two.address))
        router, (first, second), (here, there) = await stack.enter_async_context(clients)
        async with begun(here) as stream:
            busy, free = (one, two) if one.seen else (two, one)

            async with asyncio.timeout(40):
                number = 0
                while (cost := await costs(there, f"seen-{number}"))[str(busy.address)] <= cost[str(free.address)]:
                    number += 1
            before = len(busy.seen)
            for again in range(3):
                await costs(there, f"away-{again}")
            assert len(busy.seen) == before, "the other worker's requests go where less is"

            first.kill()
            with pytest.raises(aiohttp.ClientError):
                await stream.content.read()
            async with asyncio.timeout(40):
                while (cost := await costs(there, f"gone-{number}"))[str(busy.address)] > cost[str(free.address)]:
                    number += 1
        await line(router, "Worker [01] was ended by SIGKILL; another one is started now")
        third = await successor(router, [first, second])
        await costs(await stack.enter_async_context(client_of(router, third)), "served")

        third.kill()
        await line(router, "Worker [01] was ended by SIGKILL; another one is started in 1 s")
        await costs(there, "served beside it")
        fourth = await successor(router, [first, second, third])
        await costs(await stack.enter_async_context(client_of(router, fourth)), "served again")


async def test_all_streams_of_both_end_well_after_sigterm() -> None:
    held = Held()
    async with (
        FakeEngine(held) as engine,
        two_clients(*decoders(engine.address)) as (router, _, (here, there)),
        begun(here) as one,
        begun(there) as other,
    ):
        assert said(router)[0].startswith("Listening on ")
        assert said(router)[1:] == ["Initialized 0 prefill clients and 1 decode clients."]

        router.process.terminate()
        await line(router, "Stopping", times=2)
        held.go_on.set()

        for stream in (one, other):
            assert await stream.content.read() == b"data: [DONE]\n\n"
        status, rest = await router.ended()
        told = "\n".join(router.lines[2:]) + "\n" + rest
        assert (status, told.count(STOPPING.format(1, 30).strip())) == (0, 2)
        assert "Traceback" not in told


async def test_a_second_signal_ends_all_of_them_at_once() -> None:
    async with (
        FakeEngine(Held()) as engine,
        two_clients(*decoders(engine.address)) as (router, _, (here, there)),
        begun(here),
        begun(there),
    ):
        router.process.send_signal(signal.SIGINT)
        await line(router, "Stopping", times=2)
        router.process.send_signal(signal.SIGTERM)

        assert (await router.ended())[0] == 0


async def test_workers_end_when_their_parent_is_gone() -> None:
    async with FakeEngine() as engine, two_clients(*decoders(engine.address)) as (router, both, _):
        router.process.kill()

        await until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in both), 40)


async def test_pages_are_those_of_the_router_whichever_worker_answers(tmp_path: Path) -> None:
    lines = tmp_path / "access.log"
    flags = ["--access-log", "json", "--access-log-output", str(lines), "--max-running", "5"]
    async with FakeEngine() as engine, two_clients(*decoders(engine.address), *flags) as (router, both, (here, there)):
        for number, client in enumerate((here, here, there)):
            await costs(client, f"r{number}")
        for client in (here, there):
            async with client.get("/metrics") as response:
                page = await response.text()
            assert 'ems_router_requests_total{endpoint="/v1/completions",status="200"} 3.0' in page
            assert f'ems_router_instance_requests_total{{instance="{engine.address}",role="decode"}} 3.0' in page
            assert page.count("# TYPE ems_build_info gauge") == 1
            for name in ("r0", "r2"):
                async with client.get(f"/debug/requests/{name}") as response:
                    assert (response.status, (await response.json())["request_id"]) == (200, name)
            async with client.get("/debug/requests/none") as response:
                assert (response.status, (await response.json())["error"]["code"]) == (404, "request_not_found")
            async with client.get("/debug/requests") as response:
                assert [one["request_id"] for one in (await response.json())["requests"]] == ["r2", "r1", "r0"]

        more, stays = str(dead_address()), str(dead_address())
        change = {"type": "decode", "instances": [more, stays]}
        async with here.post("/instances/add", json=change) as response:
            added = await response.json()
        assert added["current_decode_instances"] == [str(engine.address), more, stays]
        assert "pending_workers" not in added
        async with there.post("/instances/add", json=change) as response:
            assert (await response.json())["message"] == "The decode instances were there already"

        both[0].suspend()
        change["instances"] = more
        async with there.post("/instances/remove", json=change) as response:
            removed = await response.json()
        assert (response.status, removed["current_decode_instances"]) == (200, [str(engine.address), stays])
        assert len(removed["pending_workers"]) == 1
        both[0].resume()
        async with asyncio.timeout(40):
            while (await (await here.get("/healthcheck")).json())["decode_instances"] != 2:
                pass

        await until(lambda: lines.read_bytes().count(b"\n") == 3)  # a worker that is killed keeps what it did not write
        both[0].kill()
        third = await successor(router, both)
        async with client_of(router, third) as anew, anew.get("/healthcheck") as response:
            assert (await response.json())["decode_instances"] == 2, "it begins with what was changed before"
        router.process.terminate()
        assert (await router.ended())[0] == 0
        names = [json.loads(one)["request_id"] for one in lines.read_text().splitlines()]
        assert sorted(names) == ["r0", "r1", "r2"]


async def test_a_file_of_keys_with_limits_needs_limits_that_are_shared(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = key_file(path, alice={})
    flags = [*decoders(dead_address()), "--api-keys", str(path)]
    async with (
        running(*flags, "--workers", "2") as router,
        aiohttp.ClientSession(router.url) as client,
        client.post("/v1/completions", json={}, headers=bearer(keys["alice"])) as response,
    ):
        assert response.status == 503
        path.write_text("x")
        await line(router, "is no file of API keys", times=2)
        router.process.send_signal(signal.SIGHUP)
        await line(router, "is no file of API keys", times=4)

    key_file(path, alice={"limit": RateLimit(input_tokens_per_unit=5)})
    refused = await start("--port", "0", *flags, "--workers", "2")
    status, told = await refused.ended()

    assert (status, told.count("\n")) == (2, 1), told
    assert told.endswith("each of several --workers would take the limit: add --limits-redis\n")


async def test_a_worker_that_is_told_to_end_is_followed_by_another() -> None:
    async with FakeEngine() as engine, two_clients(*decoders(engine.address)) as (router, (first, _), _):
        os.kill(first.pid, signal.SIGTERM)

        await line(router, "Worker [01] ended with status 0; another one is started now")


async def test_whatever_ends_a_worker_it_is_followed_by_another() -> None:
    async with running(*decoders(dead_address()), "--workers", "2") as router:
        workers(router)[1].send_signal(signal.SIGRTMIN + 1)

        await line(router, "Worker [01] was ended by signal [0-9]+; another one is started now")


def caught(process: psutil.Process) -> set[int]:
    """Signals that a process catches."""
    found = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return {number for number in range(1, 65) if int(found[1], 16) >> (number - 1) & 1}


async def test_who_is_told_to_stop_while_it_starts_starts_nobody_else(tmp_path: Path) -> None:
    log = tmp_path / "opened when somebody reads it"
    os.mkfifo(log)
    flags = ["--workers", "2", "--access-log", "text", "--access-log-output", str(log)]
    async with FakeEngine() as engine:
        router = await start("--port", "0", *decoders(engine.address), *flags)
        await until(lambda: bool(workers(router)), 40)
        (first,) = workers(router)
        await until(lambda: caught(first) & {signal.SIGTERM, signal.SIGCHLD} == {signal.SIGTERM}, 40)
        router.process.terminate()
        await until(lambda: not psutil.Process(router.process.pid).net_connections(), 40)
        reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)

        assert await router.ended() == (0, "")
    os.close(reader)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Parent, list[str]]]:
    """A parent that can fork nobody, and what it says."""
    said: list[str] = []
    parent = Parent(2, 1.0, said.append)

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", fork)
    yield parent, said
    parent._signals.close()
    parent._signalling.close()


def test_a_worker_that_cannot_be_forked_costs_the_others_nothing(alone: tuple[Parent, list[str]]) -> None:
    parent, said = alone
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ()), psutil.Process().num_fds()
    parent._began = True
    for _ in range(2):
        parent._due = {1: 0.0}
        assert parent._start(1, 0.0) is None
        assert parent._due.keys() == {1}

    words = "Worker 1 cannot be started: no more processes; another one is started"
    assert said == [f"{words} now", f"{words} in 1 s"]
    assert (signal.pthread_sigmask(signal.SIG_BLOCK, ()), psutil.Process().num_fds()) == before


def test_a_router_that_has_no_worker_at_all_says_why_and_ends(alone: tuple[Parent, list[str]]) -> None:
    parent, said = alone
    assert parent._start(0, 0.0) is None

    assert (said, parent._due, parent._status) == (["error: Worker 0 cannot be started: no more processes"], {}, 1)


def test_however_many_signals_come_none_is_missed(
    alone: tuple[Parent, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, _ = alone

    def start(number: int, now: float) -> None:
        parent._due[number] = float("inf")
        for _ in range(1000):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(parent, "_start", start)
    before = {one: signal.getsignal(one) for one in _SIGNALS}
    try:
        with socket.socket() as listener:
            assert parent.run(listener) == 0
            assert listener.fileno() == -1, "it was told to stop"
    finally:
        signal.set_wakeup_fd(-1)
        for one, handler in before.items():
            signal.signal(one, handler)
