"""Events on real sockets: a prompt goes where an event said that its blocks are; gaps are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import msgspec
import pytest
import zmq
import zmq.asyncio

from ems.cli.router_flags import event_source
from ems.errors import ConfigError
from ems.http.address import Address
from ems.router.config import EventSource
from tests.router.fakes import FakeEngine, running, until

BLOCK = 16
END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Publishes and replays batches as vLLM does; ``withheld`` ones are had by replay alone."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._context.linger = 0
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._batches: list[bytes] = []
        self.asked: list[int] = []

    async def __aenter__(self) -> Self:
        ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (self._pub, self._router)]
        self.source = EventSource(*(f"tcp://127.0.0.1:{port}" for port in ports))
        self._task = asyncio.create_task(self._answer())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._pub.close()
        self._router.close()
        self._context.term()

    async def _answer(self) -> None:
        while True:
            client, _, first = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number in range(self.asked[-1], len(self._batches)):
                await self._router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), self._batches[number]])
            await self._router.send_multipart([client, b"", b"", END, b""])

    async def publish(self, *events: Any, withheld: bool = False, raw: bytes = b"") -> None:
        self._batches.append(raw or msgspec.msgpack.encode([0.0, events, 0]))
        if not withheld:
            await self.send(len(self._batches) - 1, self._batches[-1])

    async def send(self, number: int, payload: bytes) -> None:
        await self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])


def stored(token_ids: list[int], medium: str = "GPU") -> dict[str, Any]:
    names = [bytes([token_ids[0] % 256, at]) for at in range(len(token_ids) // BLOCK)]
    fields = {"block_hashes": names, "parent_block_hash": None, "token_ids": token_ids, "block_size": BLOCK}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": medium}


@asynccontextmanager
async def routed() -> AsyncIterator[tuple[Any, FakeEngine, FakeEngine, Publisher]]:
    """Two engines, of which the second one publishes."""
    async with FakeEngine() as silent, FakeEngine() as telling, Publisher() as publisher:
        addresses = [silent.address, telling.address]
        async with running(decodes=addresses, kv_events={telling.address: publisher.source}) as router:
            yield router, silent, telling, publisher


async def heard(router: Any, publisher: Publisher) -> None:
    """Publish what nobody asks for until the router hears it: a subscription begins some time after it is asked for."""
    chooser = router.router.chooser
    while not chooser.block_tokens:
        await publisher.publish(stored([7] * 4 * BLOCK))
        with suppress(TimeoutError):
            await until(lambda: bool(chooser.block_tokens), 0.05)


async def all_go_to(router: Any, engine: FakeEngine, prompt: list[int]) -> bool:
    """Send the prompt twice, so that going round would show."""
    before = len(engine.seen)
    for _ in range(2):
        await router.post(json={"model": "m", "prompt": prompt})
    return len(engine.seen) - before == 2


async def test_a_prompt_goes_where_its_blocks_are() -> None:
    async with routed() as (router, _, telling, publisher):
        await heard(router, publisher)
        prompt = list(range(1000, 1000 + 64 * BLOCK))
        index = router.router.chooser
        await publisher.publish(stored(prompt, "CPU"))
        await until(lambda: telling.address.host in index._pools)
        await publisher.publish(stored(prompt))

        def known() -> bool:
            scores = index.scores(*_asked(router, prompt))
            return any(score.uncached < 64 for score in scores)

        await until(known)
        assert await all_go_to(router, telling, prompt)


def _asked(router: Any, prompt: list[int]) -> Any:
    from ems.router.fleet import Role
    from ems.router.request import parse

    chooser = router.router.chooser
    request = parse(msgspec.json.encode({"model": "m", "prompt": prompt}))
    return Role.DECODE, router.instances(), request.prompt(b"", chooser.block_tokens, chooser.adapters), 0.0


async def test_what_was_missed_is_asked_for() -> None:
    async with routed() as (router, _, telling, publisher):
        await heard(router, publisher)
        prompt = list(range(2000, 2000 + 64 * BLOCK))
        await publisher.publish(stored(prompt), withheld=True)
        publisher.asked.clear()
        await publisher.publish()

        await until(lambda: bool(publisher.asked))
        await until(lambda: router.router.chooser.scores(*_asked(router, prompt))[1].uncached < 64)
        assert await all_go_to(router, telling, prompt)


async def test_nonsense_is_passed_over() -> None:
    async with routed() as (router, _, _, publisher):
        await heard(router, publisher)
        await publisher.publish(raw=b"\xc1", withheld=True)
        await publisher.publish(raw=b"\xc1")
        await publisher._pub.send_multipart([b"what"])
        prompt = list(range(3000, 3000 + 64 * BLOCK))
        await publisher.publish(stored(prompt))

        await until(lambda: router.router.chooser.scores(*_asked(router, prompt))[1].uncached < 64)


async def test_a_publisher_that_is_not_there_holds_nothing_up() -> None:
    async with FakeEngine() as engine:
        nobody = EventSource("tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
        async with running(decodes=[engine.address], kv_events={engine.address: nobody}) as router:
            assert (await router.post()).status == 200


def test_a_source_is_read() -> None:
    text = "h:8000=tcp://h:5557, tcp://h:5558"
    assert event_source(text) == (Address("h", 8000), EventSource("tcp://h:5557", "tcp://h:5558"))
    assert event_source("[::1]:8=tcp://[::1]:9")[1] == EventSource("tcp://[::1]:9")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h:8000",
        "h:8000=h:5557",
        "h=tcp://h:5557",
        "h:1=tcp://h:2,tcp://h:3,tcp://h:4",
        "h:1=tcp://*:5557",
        "h:1=tcp://h:5557,tcp://*:5558",
        "h:1=tcp://h:99999",
        "h:1=ipc://",
        f"h:1=ipc:///{'x' * 107}",
    ],
)
def test_what_is_no_source_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        event_source(text)
