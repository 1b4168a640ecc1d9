"""Everything that waits, in virtual time: the clock jumps to the next timer whenever nothing else is to be done."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from ems.http.address import Address
from ems.http.client import Connection, Receiver, Upstream, UpstreamBroken
from ems.http.message import Request
from ems.http.reply import Reply
from ems.router.app import Router
from ems.router.config import RouterConfig
from ems.router.fleet import Role
from tests.router.network import VirtualLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine


PREFILL = Address("prefill", 1)
DECODE = Address("decode", 1)


class FakeAnswer(Connection):
    """Pieces, each after so many seconds; ``None`` breaks the connection."""

    def __init__(self, *pieces: tuple[float, bytes | None]) -> None:
        super().__init__(asyncio.get_running_loop(), set())
        self._pieces = pieces
        self.ended = False

    async def play(self, receiver: Receiver) -> None:
        failed = self._done = asyncio.get_running_loop().create_future()
        receiver.comes_from(self)
        receiver.head(200, [(b"content-type", b"text/event-stream")])
        for seconds, piece in self._pieces:
            await asyncio.wait([failed], timeout=seconds)
            if failed.done():
                await failed
            if piece is None:
                raise UpstreamBroken("cut")
            receiver.piece(piece)
        self.ended = True
        receiver.end()

    def abort(self) -> None:
        self.closed = True


class FakeUpstream(Upstream):
    """Answers by a function of the address and the target; remembers when it was asked for what."""

    def __init__(self, answer: Callable[[Address, str], Awaitable[FakeAnswer]]) -> None:
        self._answer = answer
        self.asked: list[tuple[float, Address, str]] = []
        self.answers: list[FakeAnswer] = []

    async def __aexit__(self, *_: object) -> None: ...

    async def send(self, address: Address, request: bytes, receiver: Receiver) -> None:
        target = request.split(b" ", 2)[1].decode()
        self.asked.append((asyncio.get_running_loop().time(), address, target))
        answer = await self._answer(address, target)
        self.answers.append(answer)
        await answer.play(receiver)

    def times(self, address: Address, target: str) -> list[float]:
        return [round(time, 6) for time, *where in self.asked if where == [address, target]]


def virtually(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)


class Sink:
    """Keeps what a client gets."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data


async def request(router: Router) -> tuple[int, bytes]:
    """Serve one request, of HTTP/1.0, whose answers have no framing; return the status and the body."""
    asked = Request("POST", b"/v1/completions", [], "1.0", keeps_alive=False)
    asked.body = b"{}"
    sink = Sink()
    reply = Reply(sink, asked, b"", keeps_alive=False)
    await router.serve(asked, reply, None)

    assert reply.ended
    assert reply.status is not None
    return reply.status, sink.sent.partition(b"\r\n\r\n")[2]


def router_of(upstream: FakeUpstream, **settings: Any) -> Router:
    return Router(RouterConfig(prefills=(PREFILL,), decodes=(DECODE,), **settings), upstream)


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.slow
def test_a_slow_stream_that_moves_goes_on_for_ever() -> None:
    """A time-out is for silence, not for length: 1,000 pieces, each just in time."""

    async def answer(address: Address, target: str) -> FakeAnswer:
        if address == PREFILL or target == "/health":
            return FakeAnswer((0, b"{}"))
        return FakeAnswer(*[(99.9, b"data: x\n\n")] * 1000)

    async def main() -> None:
        upstream = FakeUpstream(answer)
        async with router_of(upstream, idle_timeout=100.0) as router:
            status, body = await request(router)

            assert (status, body) == (200, 1000 * b"data: x\n\n")
            assert now() > 99_000
            assert all(one.ended for one in upstream.answers)

    virtually(main())


def test_silence_ends_a_stream_after_the_idle_time_and_not_before() -> None:
    async def answer(address: Address, target: str) -> FakeAnswer:
        if address == PREFILL or target == "/health":
            return FakeAnswer((0, b"{}"))
        return FakeAnswer((50, b"data: 1\n\n"), (99, b"data: 2\n\n"), (100.5, b"data: 3\n\n"))

    async def main() -> None:
        upstream = FakeUpstream(answer)
        async with router_of(upstream, idle_timeout=100.0) as router:
            _, body = await request(router)

            assert body.startswith(b'data: 1\n\ndata: 2\n\ndata: {"error":')
            assert body.endswith(b"data: [DONE]\n\n")
            assert now() == 249
            assert upstream.answers[-1].closed or upstream.answers[-2].closed
            assert not router.fleet.listed(Role.DECODE)[0].load

    virtually(main())


def test_the_time_for_prefill_is_kept_and_then_decode_goes_on_alone() -> None:
    async def answer(address: Address, target: str) -> FakeAnswer:
        if target == "/health":
            return FakeAnswer((0, b""))
        return FakeAnswer((1e6, b"")) if address == PREFILL else FakeAnswer((1, b"data: [DONE]\n\n"))

    async def main() -> None:
        upstream = FakeUpstream(answer)
        async with router_of(upstream, prefill_timeout=600.0) as router:
            assert await request(router) == (200, b"data: [DONE]\n\n")
            assert upstream.times(PREFILL, "/v1/completions") == [0.0]
            assert upstream.times(DECODE, "/v1/completions") == [600.0]

    virtually(main())


def test_retries_back_off() -> None:
    async def answer(address: Address, target: str) -> FakeAnswer:
        if target == "/health":
            return FakeAnswer((0, b""))
        raise UpstreamBroken("refused")

    async def main() -> None:
        upstream = FakeUpstream(answer)
        config = RouterConfig(decodes=(DECODE,), max_retries=2, retry_delay=0.25)
        async with Router(config, upstream) as router:
            status, _ = await request(router)

            assert status == 503
            assert upstream.times(DECODE, "/v1/completions") == [0.0, 0.25, 0.75]

    virtually(main())


def test_a_dead_instance_is_probed_at_growing_intervals_until_it_is_back() -> None:
    async def answer(address: Address, target: str) -> FakeAnswer:
        if now() < 20:
            raise UpstreamBroken("refused")
        return FakeAnswer((0, b"{}"))

    async def main() -> None:
        upstream = FakeUpstream(answer)
        async with router_of(upstream) as router:
            await asyncio.sleep(100)

            assert upstream.times(DECODE, "/health") == [0.0, 1.0, 3.0, 7.0, 12.0, 17.0, 22.0]
            assert router.fleet.ready()

            await asyncio.sleep(10_000)

            assert len(upstream.times(DECODE, "/health")) == 7, "a healthy instance is left in peace"

    virtually(main())


def test_a_health_page_that_hangs_counts_as_ill() -> None:
    async def answer(address: Address, target: str) -> FakeAnswer:
        return FakeAnswer((1e6, b""))

    async def main() -> None:
        upstream = FakeUpstream(answer)
        async with router_of(upstream, probe_timeout=5.0) as router:
            await asyncio.sleep(4.9)

            assert router.fleet.usable(Role.DECODE)

            await asyncio.sleep(0.2)

            assert not router.fleet.usable(Role.DECODE)
            assert ((await request(router))[0], router.fleet.next_probe()) == (503, 6.0)

    virtually(main())


def test_a_probe_that_fails_by_a_defect_does_not_end_probing(caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    async def answer(address: Address, target: str) -> FakeAnswer:
        if broken and address == PREFILL:
            raise ZeroDivisionError
        return FakeAnswer((0, b"{}"))

    async def main() -> None:
        nonlocal broken
        async with router_of(FakeUpstream(answer)) as router:
            await asyncio.sleep(2)

            assert not router.fleet.usable(Role.PREFILL)
            assert router.fleet.ready()

            broken = False
            await asyncio.sleep(10)

            assert router.fleet.usable(Role.PREFILL)

    virtually(main())

    assert "by a defect" in caplog.text
