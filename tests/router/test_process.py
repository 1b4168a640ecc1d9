"""The router as a process: its command line, its first words, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import psutil
import pytest
from aiohttp import web

from ems.cli import run
from ems.errors import ConfigError
from ems.http.process import CannotListen, listen
from tests.router.fakes import ANSWER, FakeEngine, dead_address, prefilled

pytestmark = pytest.mark.process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ems.http.address import Address

SOURCE = Path(__file__).parents[2] / "src"
STOPPING = "Stopping when the requests under way ({}) are done, in {} s at the latest.\n"


class Process:
    """A router process whose start has been announced."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""

    async def announced(self) -> None:
        assert self.process.stderr is not None
        async with asyncio.timeout(40):
            while not self.lines or not self.lines[-1].startswith("Initialized"):
                line = (await self.process.stderr.readline()).decode().rstrip("\n")
                assert line, self.lines
                self.lines.append(line)
                if line.startswith("Listening on "):
                    self.url = line.removeprefix("Listening on ")

    async def ended(self) -> tuple[int, str]:
        """Return the exit status and what else was written to stderr."""
        async with asyncio.timeout(40):
            _, rest = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, rest.decode()


async def start(*flags: str, verb: str = "router", stderr: int = asyncio.subprocess.PIPE) -> Process:
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return Process(
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ems.cli", verb, *flags,
            env={**os.environ, "PYTHONPATH": path},
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
    )  # fmt: skip


@asynccontextmanager
async def running(*flags: str, verb: str = "router") -> AsyncIterator[Process]:
    router = await start("--port", "0", *flags, verb=verb)
    try:
        await router.announced()
        yield router
    finally:
        if router.process.returncode is None:
            router.process.kill()
            await router.ended()


def decoders(*addresses: Address) -> list[str]:
    return ["--decoder-hosts", *(a.host for a in addresses), "--decoder-ports", *(str(a.port) for a in addresses)]


def prefillers(*addresses: Address) -> list[str]:
    return ["--prefiller-hosts", *(a.host for a in addresses), "--prefiller-ports", *(str(a.port) for a in addresses)]


async def streaming(request: web.Request, body: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    await GO_ON.wait()
    await response.write(b"data: [DONE]\n\n")
    return response


GO_ON = asyncio.Event()
TWO_WORKERS = ["--decoder-hosts", "a", "--decoder-ports", "1", "--workers", "2"]


@pytest.fixture(autouse=True)
def fresh_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "GO_ON", asyncio.Event())


@pytest.mark.parametrize("verb", ["router", "proxy"])
async def test_the_command_of_today_serves_a_pair(verb: str) -> None:
    async with FakeEngine(prefilled) as p1, FakeEngine(prefilled) as p2, FakeEngine() as decode:
        flags = [*prefillers(p1.address, p2.address), *decoders(decode.address), "--max-retries", "3"]
        async with running(*flags, "--retry-delay", "0.001", verb=verb) as router:
            assert router.url.startswith("http://127.0.0.1:")
            assert router.lines[-1] == "Initialized 2 prefill clients and 1 decode clients."

            async with aiohttp.ClientSession() as client:
                for _ in range(2):
                    async with client.post(f"{router.url}/v1/chat/completions", json={"messages": []}) as response:
                        assert (response.status, await response.read()) == (200, ANSWER)
                        assert len(response.headers.getall("Date")) == 1
                        assert "Python" in response.headers["Server"], "the engine's own"
            soft, hard = psutil.Process(router.process.pid).rlimit(psutil.RLIMIT_NOFILE)
            router.process.terminate()

            assert soft == hard
            assert await router.ended() == (0, "")
        assert (len(p1.seen), len(p2.seen), len(decode.seen)) == (1, 1, 2)


async def test_running_requests_finish_after_sigterm() -> None:
    async with FakeEngine(streaming) as decode, running(*decoders(decode.address)) as router:
        async with (
            aiohttp.ClientSession() as client,
            asyncio.timeout(40),
            client.post(f"{router.url}/v1/completions", json={"stream": True}) as response,
        ):
            assert await response.content.readany() == b"data: 1\n\n"

            router.process.terminate()
            while True:  # until it listens no more
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
                except ConnectionRefusedError:
                    break
                except ConnectionResetError:
                    continue  # the kernel resets what it had not handed over when the router stopped to listen
                writer.close()
                await asyncio.sleep(0.01)
            GO_ON.set()

            assert await response.content.read() == b"data: [DONE]\n\n"

        assert await router.ended() == (0, STOPPING.format(1, 30))


async def test_it_serves_and_ends_in_order_though_nothing_can_be_said() -> None:
    address = dead_address()
    full = os.open("/dev/full", os.O_WRONLY)
    router = await start("--port", str(address.port), *decoders(dead_address()), stderr=full)
    os.close(full)
    served = False
    try:
        async with asyncio.timeout(40), aiohttp.ClientSession() as client:
            while router.process.returncode is None:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with client.get(f"http://{address}/livez") as response:
                        served = response.status == 200
                        router.process.terminate()
                        await router.process.wait()
                await asyncio.sleep(0.05)  # until it listens; bounded by the time-out above
        assert served, "it ended before it served"
        assert router.process.returncode == 0
    finally:
        if router.process.returncode is None:
            router.process.kill()


async def test_what_does_not_finish_in_time_is_told_so() -> None:
    async with FakeEngine(streaming) as decode, running(*decoders(decode.address), "--drain-timeout", "1") as router:
        async with (
            aiohttp.ClientSession() as client,
            asyncio.timeout(40),
            client.post(f"{router.url}/v1/completions", json={"stream": True}) as response,
        ):
            assert await response.content.readany() == b"data: 1\n\n"

            router.process.send_signal(signal.SIGINT)
            rest = await response.content.read()

            assert b'"code":"shutting_down"' in rest
            assert rest.endswith(b"\n\ndata: [DONE]\n\n")

        assert await router.ended() == (0, STOPPING.format(1, 1))
        await asyncio.wait_for(decode.abandoned.wait(), 20)


async def test_a_second_signal_ends_at_once() -> None:
    async with (
        FakeEngine(streaming) as decode,
        running(*decoders(decode.address)) as router,
        aiohttp.ClientSession() as client,
        client.post(f"{router.url}/v1/completions", json={"stream": True}) as response,
    ):
        await response.content.readany()
        router.process.send_signal(signal.SIGINT)
        router.process.send_signal(signal.SIGTERM)

        code, said = await router.ended()
        assert code == 0
        assert said == STOPPING.format(1, 30)


async def test_a_port_in_use_is_one_line_and_exit_status_3() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        router = await start("--port", port, *decoders(dead_address()))

        assert (3, f"error: Cannot listen on port {port} of 127.0.0.1: it is in use, choose another --port\n") == (
            await router.ended()
        )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "No decode instance was given"),
        (["--decoder-hosts", "a", "b", "--decoder-ports", "1"], "2 hosts and --decoder-ports has 1 port"),
        (["--decoder-hosts", "a", "--decoder-ports", "1", "--prefiller-ports", "1"], "--prefiller-hosts has 0 hosts"),
        (["--decoder-hosts", "a", "--decoder-ports", "99999"], "Port 99999 of a is out of range"),
        (["--decoder-hosts", "a", "--decoder-ports", "seven"], "seven"),
        (["--decoder-hosts", "a/b", "--decoder-ports", "1"], "'a/b' is not a host"),
        (["--decoder-hosts", "a", "--decoder-ports", "1", "--port", "-3"], "--port -3"),
        (["--decoder-hosts", "a", "--decoder-ports", "1", "--port", "x"], "--port"),
        (["--decoder-hosts", "a", "--decoder-ports", "1", "--retry-delay", "-1"], "--retry-delay -1"),
        (["--decoder-hosts", "a", "--decoder-ports", "1", "--log-level", "loud"], "--log-level"),
        (["--queue-size", "5"], "--queue-size is for a queue, which takes --max-running"),
        (["--session-boost", "30"], "--session-boost is for a queue, which takes --max-running"),
        (["--decoder-hosts", "a", "--decoder-ports", "1", "--no-such-flag"], "--no-such-flag"),
        (["--decoder-hosts", "a", "--decoder-ports", "1", "--workers", "0"], "--workers 0 is out of range"),
        ([*TWO_WORKERS, "--max-running", "1"], "--max-running 1 gives some of --workers 2 nothing to run"),
        ([*TWO_WORKERS, "--input-tokens-per-unit", "9"], "--workers 2 would each take the whole limit"),
        (["--decoder-hosts", "a", "--decoder-ports", "1", "--host", "no.such.host.invalid"], "Cannot listen on --host"),
        (["--decoder-hosts", "a", "--decoder-ports", "1", "--host", "192.0.2.1"], "not an address of this machine"),
    ],
)
def test_wrong_usage_is_a_line_on_stderr_and_exit_status_2(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["router", *flags])
    out, err = capsys.readouterr()

    assert status == 2
    assert not out
    assert said in err.splitlines()[0]
    assert "Traceback" not in err


def test_a_port_that_cannot_be_had_is_no_mistake_in_usage() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CannotListen):
        listen("127.0.0.1", taken.getsockname()[1])

    assert not issubclass(CannotListen, ConfigError)


async def test_the_log_names_what_failed_and_has_no_stack_trace() -> None:
    async with running(*decoders(dead_address())) as router:
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{router.url}/v1/completions", data=b"{}") as response,
        ):
            assert response.status == 503
            assert "error" in json.loads(await response.read())
        router.process.terminate()
        status, log = await router.ended()

        assert status == 0
        assert "decode instance 127.0.0.1:" in log
        assert "Traceback" not in log


def test_one_process_loads_nothing_of_several() -> None:
    program = "import sys, ems.router.server; print([name for name in sys.modules if name.startswith('ems.router.w')])"

    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[]\n"
