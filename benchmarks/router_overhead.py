#!/usr/bin/env python3
"""What the router costs: CPU time of its process per request and per stream chunk, beside direct connections.

Three processes: an engine that answers at once from memory, the router (the installed command, as users run it), and
this one, which makes the load.  Direct and routed runs alternate and each keeps its best round, since other work on the
machine only ever adds time.  "CPU" is user plus system time of the router process alone, so what the direct rows have
there is nothing; their latency and rate are what this load generator and this engine reach by themselves.

Run it with the project's interpreter: ``python benchmarks/router_overhead.py [--help]``.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import multiprocessing
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from multiprocessing.connection import Connection

ANSWER = b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"' + b"x" * 920 + b'"}],"usage":{}}'
EVENT = (
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" word"}}],"model":"' + b"m" * 30 + b'"}\n\n'
)
PROMPT = b'{"model":"m","max_tokens":16,"temperature":0,"stream":%s,"prompt":"' + b"hello " * 330 + b'"}'


def request_of(*, stream: bool) -> bytes:
    body = PROMPT % (b"true" if stream else b"false")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


# -------------------------------------------------------------------------------------------------------------- engine


async def serve_engine(port: Connection, chunks: int, interval: float) -> None:
    unary = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                received = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = received.partition(b"content-length:")[2].partition(b"\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                if b'"stream":true' not in body:
                    writer.write(unary)
                    continue
                writer.write(head)
                for _ in range(chunks):
                    writer.write(chunk)
                    await asyncio.sleep(interval)
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def engine(port: Connection, chunks: int, interval: float) -> None:
    uvloop.run(serve_engine(port, chunks, interval))


# ---------------------------------------------------------------------------------------------------------------- load


async def read_answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200 "), head
    length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
    if length:
        await reader.readexactly(int(length))
        return
    while await reader.readuntil(b"\r\n") != b"0\r\n":
        await reader.readuntil(b"\n\n\r\n")
    await reader.readexactly(2)


async def load(port: int, connections: int, each: int, *, stream: bool) -> list[float]:
    """Send ``each`` requests on each connection, one after another; return the seconds of each."""
    request = request_of(stream=stream)
    times: list[float] = []

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(each):
            began = time.perf_counter()
            writer.write(request)
            await read_answer(reader)
            times.append(time.perf_counter() - began)
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(one())
    return times


@dataclass(frozen=True)
class Round:
    """One measured run; ``cpu`` in seconds of the router's process."""

    times: list[float]
    seconds: float
    cpu: float


async def measure(process: psutil.Process | None, run: Callable[[], Awaitable[list[float]]]) -> Round:
    def cpu() -> float:
        if process is None:
            return 0.0
        used = process.cpu_times()
        return used.user + used.system

    before, began = cpu(), time.perf_counter()
    times = await run()
    return Round(times, time.perf_counter() - began, cpu() - before)


def better(new: Round, old: Round | None, process: psutil.Process | None) -> Round:
    if old is None:
        return new
    if process is None:
        return min(new, old, key=lambda one: one.seconds)
    return min(new, old, key=lambda one: one.cpu)


# --------------------------------------------------------------------------------------------------------------- report


def start_router(engine_port: int, *, pair: bool) -> tuple[subprocess.Popen[str], int]:
    flags = ["--port", "0", "--decoder-hosts", "127.0.0.1", "--decoder-ports", str(engine_port)]
    if pair:
        flags += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(engine_port)]
    command = [sys.executable, "-m", "ems.cli", "router", *flags]
    router = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert router.stderr is not None
    port = int(router.stderr.readline().rpartition(":")[2])
    router.stderr.readline()
    return router, port


async def compare(arguments: argparse.Namespace, engine_port: int, routed: dict[str, tuple[int, int]]) -> Table:
    targets: dict[str, tuple[int, psutil.Process | None]] = {"direct": (engine_port, None)}
    targets |= {name: (port, psutil.Process(pid)) for name, (port, pid) in routed.items()}
    table = Table("load", "way", "p50 ms", "p99 ms", "requests/s", "router CPU µs/request", "router CPU µs/chunk")
    loads = {
        "unary": (arguments.connections, arguments.requests // arguments.connections, False),
        "stream": (arguments.streams, 4, True),
    }
    for kind, (connections, each, stream) in loads.items():
        best: dict[str, Round] = {}
        for _ in range(arguments.rounds):
            for name, (port, process) in targets.items():
                await load(port, connections, 1, stream=False)  # connections and caches warm
                run = functools.partial(load, port, connections, each, stream=stream)
                new = await measure(process, run)
                best[name] = better(new, best.get(name), process)
        for name, one in best.items():
            ranks = statistics.quantiles(one.times, n=100)
            per_request = 1e6 * one.cpu / len(one.times)
            table.add_row(
                kind,
                name,
                f"{1e3 * ranks[49]:.2f}",
                f"{1e3 * ranks[98]:.2f}",
                f"{len(one.times) / one.seconds:.0f}",
                "-" if name == "direct" else f"{per_request:.0f}",
                f"{per_request / arguments.chunks:.1f}" if stream and name != "direct" else "-",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000, help="unary requests a round")
    parser.add_argument("--connections", type=int, default=32, help="connections of the unary load")
    parser.add_argument("--streams", type=int, default=64, help="streams at once, four on each connection")
    parser.add_argument("--chunks", type=int, default=32, help="chunks a stream")
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between chunks")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=engine, args=(there, arguments.chunks, arguments.interval), daemon=True)
    process.start()
    engine_port = here.recv()
    routers = {}
    try:
        for name, pair in (("router, balancing", False), ("router, prefill and decode", True)):
            routers[name] = start_router(engine_port, pair=pair)
        ports = {name: (port, router.pid) for name, (router, port) in routers.items()}
        Console(width=120).print(uvloop.run(compare(arguments, engine_port, ports)))
    finally:
        for router, _ in routers.values():
            router.terminate()
            router.communicate()
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
