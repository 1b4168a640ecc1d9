"""Everything at once: faulty engines, impatient clients, instances that come and go."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

import aiohttp

from ems.router.fleet import Role
from tests.router.fakes import RawEngine, Running, running
from tests.router.kthena.manifests import ROUTE, SGLANG, documents, pod
from tests.router.soundness import unsound

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.router.fakes import Script

ANSWER = b'{"kv_transfer_params":null,"text":"' + b"x" * 300 + b'"}'
ERROR = b'{"error":"made"}'
EVENTS = [b'data: {"n":%d}\n\n' % n for n in range(5)] + [b"data: [DONE]\n\n"]
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DEEDS = ["answer"] * 30 + ["stream"] * 30 + ["close", "garbage", "error", "refuse", "cut answer", "cut stream", "reset"]


def moody(dice: random.Random) -> Script:
    """Return an engine's script that behaves differently each time."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        deed = dice.choice(DEEDS)
        if deed == "garbage":
            writer.write(dice.randbytes(200))
        elif deed in ("error", "refuse"):
            status = b"500" if deed == "error" else b"422"
            writer.write(b"HTTP/1.1 %s X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(ERROR), ERROR))
        elif deed.endswith("answer"):
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
            )
            writer.write(ANSWER if deed == "answer" else ANSWER[: dice.randrange(len(ANSWER))])
        elif deed.endswith("stream"):
            rest = b"".join(EVENTS)
            rest = rest if deed == "stream" else rest[: dice.randrange(len(rest))]
            writer.write(STREAM_HEAD)
            while rest:
                size = min(dice.randrange(1, 40), len(rest))
                writer.write(b"%x\r\n%s\r\n" % (size, rest[:size]))
                rest = rest[size:]
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n" if deed == "stream" else b"")
        elif deed == "reset":
            writer.transport.abort()
            return
        await writer.drain()

    return script


async def ask(router: Running, dice: random.Random, turn: asyncio.Semaphore) -> str:
    """Send one request, perhaps leave early; return what came of it and check that it is one of the allowed ends."""
    patience = dice.choice([10.0, 10.0, 10.0, 0.0, 0.001, 0.005])
    try:
        async with (
            turn,
            asyncio.timeout(patience),
            router.client.post(router.url("/v1/completions"), json={"model": "kimi-k25"}) as response,
        ):
            body = await response.read()
    except TimeoutError:
        assert patience < 10, "nothing hangs"
        return "left"
    except aiohttp.ClientPayloadError:
        return "visibly incomplete"
    if response.status == 200 and response.content_type == "text/event-stream":
        assert body.endswith(b"data: [DONE]\n\n")
        if body == b"".join(EVENTS):
            return "stream"
        head, _, tail = body.partition(b'data: {"error":')

        assert b"".join(EVENTS).startswith(head.removesuffix(b"\n\n"))
        assert b"upstream_broken" in tail
        return "stream with an error"
    if response.status == 200:
        assert body == ANSWER
        return "answer"
    if response.status in (422, 500):
        assert body == ERROR
        return "the engine's error"

    assert response.status == 503
    assert "error" in json.loads(body)
    return "503"


async def change(router: Running, engines: list[RawEngine], dice: random.Random) -> None:
    for _ in range(30):
        role = dice.choice(list(Role))
        body = {"type": role, "instances": str(dice.choice(engines).address)}
        await router.post(f"/instances/{dice.choice(['add', 'add', 'remove'])}", json=body)

        assert unsound(router.router.fleet) == []


async def test_whatever_happens_every_request_has_a_clear_end_and_nothing_stays_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dice = random.Random(20261120)
    async with (
        RawEngine(moody(dice)) as one,
        RawEngine(moody(dice)) as two,
        RawEngine(moody(dice)) as three,
        running([one.address, two.address], [one.address, two.address, three.address]) as router,
    ):
        turn = asyncio.Semaphore(16)
        async with asyncio.TaskGroup() as group:
            changes = group.create_task(change(router, [one, two, three], dice))
            tasks = [group.create_task(ask(router, dice, turn)) for _ in range(400)]
        await changes
        await router.idle()
        ends = [task.result() for task in tasks]

        assert {"answer", "stream", "left"} < set(ends), "the test should see many ends"
        assert router.router.fleet.leaving() == []
        assert not [one for one in caplog.records if one.name.startswith("ems.") and one.levelname == "ERROR"]


async def test_pairs_that_meet_by_themselves_have_clear_ends_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(20261125)
    async with RawEngine(moody(dice)) as one, RawEngine(moody(dice)) as two, RawEngine(moody(dice)) as three:
        pods = [pod(f"p{place}", "prefill", engine.address.port) for place, engine in enumerate((one, two))]
        pods += [pod(f"d{place}", "decode", engine.address.port) for place, engine in enumerate((one, two, three))]
        (tmp_path / "all.yaml").write_text(documents(SGLANG, ROUTE, *pods))
        async with running(manifests=tmp_path) as router:
            turn = asyncio.Semaphore(16)
            ends = await asyncio.gather(*(ask(router, dice, turn) for _ in range(400)))
            await router.idle()

    assert {"answer", "stream", "left"} < set(ends), "the test should see many ends"
    assert not [one for one in caplog.records if one.name.startswith("ems.") and one.levelname == "ERROR"]
    assert not [one for one in caplog.records if one.name == "asyncio"]
