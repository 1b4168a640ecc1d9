"""Rounds over all routers in turn, in front of the same stubs, and the report.

CPU is user and system time of the router's processes; of the rounds the least counts, since other work on the machine
only ever adds.  The CPU of a chunk is that of a run of streams, all of it, by their chunks.  What a router adds to
latency is the difference of quantiles beside the same requests sent to prefill and decode by the client itself, at the
same rate.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec

from ems.bench.router.contenders import Contender, Running
from ems.bench.router.load import closed_loop, open_loop, request_of
from ems.bench.router.stub import Engine
from ems.config import MIB
from ems.errors import ConfigError
from ems.tables import Table

_BY_ITSELF = (request_of(to_prefill=True), request_of())
"""What a client sends to prefill and decode when there is no router."""
_TRANCHES = 10


class RouterPlan(msgspec.Struct, frozen=True):
    """What is sent in each round: PD requests at once, streams at once, and PD requests at a rate."""

    requests: int = 4000
    connections: int = 32
    streams: int = 64
    chunks: int = 64
    interval: float = 0.01
    """Seconds between a stream's chunks."""
    rate: float = 500.0
    seconds: float = 5.0
    """How long requests are sent at ``rate``; 0 leaves that out."""
    rounds: int = 3
    memory_requests: int = 0
    """Requests over which each router's memory is watched; 0 leaves that out."""

    def __post_init__(self) -> None:
        for name in ("requests", "connections", "streams", "chunks", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}, expected at least 1")
        if self.rate <= 0 or self.interval < 0 or self.seconds < 0 or self.memory_requests < 0:
            raise ConfigError("--rate must be above 0, and no other number below 0")


class RouterRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One router's figures; seconds and bytes.  Shares are its figures by those of the second router."""

    name: str
    request_cpu: float
    chunk_cpu: float
    request_rate: float
    busy_p50: float
    """Of PD requests with all connections busy."""
    busy_p99: float
    stream_p99: float
    """Of whole streams, which take ``chunks * interval`` by themselves."""
    handed_over: bool
    """Whether each decode got what its prefill had answered."""
    added_p50: float | None = None
    added_p99: float | None = None
    memory: tuple[int, ...] = ()
    """Resident bytes after each tenth of ``memory_requests``."""


class RouterReport(msgspec.Struct, frozen=True):
    """All routers, the first of which is compared with each other one."""

    plan: RouterPlan
    items: tuple[RouterRow, ...]


class _Best:
    """The best of the rounds of one router."""

    def __init__(self, router: Running) -> None:
        self.router = router
        self.request_cpu = self.chunk_cpu = self.stream_p99 = float("inf")
        self.rate = 0.0
        self.busy: tuple[float, float] = (float("inf"), float("inf"))
        self.added: list[tuple[float, float]] = []
        self.handed_over = True
        self.memory: list[int] = []


async def measure(contenders: Sequence[Contender], plan: RouterPlan, progress: Callable[[str], None]) -> RouterReport:
    """Start stubs and routers, measure, and end them all.

    :raises ConfigError: a router does not start.
    :raises LoadFailed: a router gives a wrong answer.
    """
    prefill, decode = (Engine(plan.chunks, plan.interval) for _ in range(2))
    ports = (await prefill.start(), await decode.start())
    try:
        with contextlib.ExitStack() as stack:
            found = [_Best(stack.enter_context(Running(one, *ports))) for one in contenders]
            for one in found:
                progress(f"starting {one.router.name}")
                await one.router.ready()
            for number in range(plan.rounds):
                direct = await _latency(plan, ports, _BY_ITSELF) if plan.seconds else None
                for one in found:
                    progress(f"round {number + 1} of {plan.rounds}: {one.router.name}")
                    await _round(one, plan, decode, direct)
            for one in found if plan.memory_requests else ():
                await _watch_memory(one, plan, progress)
            return RouterReport(plan, tuple(map(_row, found)))
    finally:
        prefill.stop()
        decode.stop()


async def _round(one: _Best, plan: RouterPlan, decode: Engine, direct: tuple[float, float] | None) -> None:
    router = one.router
    whole, stream = request_of(), request_of(stream=True)
    await closed_loop(router.port, whole, plan.connections, 2 * plan.connections)  # connections and caches warm
    decodes, handed_over = decode.decodes, decode.handed_over
    before, began = router.cpu(), time.perf_counter()
    times = await closed_loop(router.port, whole, plan.connections, plan.requests)
    seconds, cpu = time.perf_counter() - began, router.cpu() - before
    one.request_cpu = min(one.request_cpu, cpu / plan.requests)
    one.rate = max(one.rate, plan.requests / seconds)
    one.busy = min(one.busy, _quantiles(times), key=lambda pair: pair[1])
    before = router.cpu()
    times = await closed_loop(router.port, stream, plan.streams, 2 * plan.streams)
    one.chunk_cpu = min(one.chunk_cpu, (router.cpu() - before) / (2 * plan.streams * plan.chunks))
    one.stream_p99 = min(one.stream_p99, _quantiles(times)[1])
    if direct is not None:
        routed = await _latency(plan, (router.port,), (whole,))
        one.added.append((routed[0] - direct[0], routed[1] - direct[1]))
    one.handed_over &= decode.decodes - decodes == decode.handed_over - handed_over


async def _latency(plan: RouterPlan, ports: tuple[int, ...], requests: tuple[bytes, ...]) -> tuple[float, float]:
    return _quantiles(await open_loop(ports, requests, plan.rate, plan.seconds))


async def _watch_memory(one: _Best, plan: RouterPlan, progress: Callable[[str], None]) -> None:
    for number in range(_TRANCHES):
        progress(f"memory of {one.router.name}: {number + 1} of {_TRANCHES}")
        await closed_loop(one.router.port, request_of(), plan.connections, max(1, plan.memory_requests // _TRANCHES))
        one.memory.append(one.router.memory())


def _quantiles(times: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    if len(times) < 2:
        return times[0], times[0]
    ranks = statistics.quantiles(times, n=100, method="inclusive")
    return ranks[49], ranks[98]


def _row(one: _Best) -> RouterRow:
    return RouterRow(
        name=one.router.name,
        request_cpu=one.request_cpu,
        chunk_cpu=one.chunk_cpu,
        request_rate=one.rate,
        busy_p50=one.busy[0],
        busy_p99=one.busy[1],
        stream_p99=one.stream_p99,
        handed_over=one.handed_over,
        added_p50=statistics.median(pair[0] for pair in one.added) if one.added else None,
        added_p99=statistics.median(pair[1] for pair in one.added) if one.added else None,
        memory=tuple(one.memory),
    )


def tables(report: RouterReport) -> list[Table]:
    """For people: the figures, how the first router compares with the others, and memory if it was watched."""
    plan = report.plan
    columns = ("router", "CPU µs/request", "CPU µs/chunk", "requests/s", "p50 ms", "p99 ms", "added p50", "added p99")
    rows = [
        (
            one.name + ("" if one.handed_over else " (no hand-off)"),
            f"{1e6 * one.request_cpu:.0f}",
            f"{1e6 * one.chunk_cpu:.1f}",
            f"{one.request_rate:.0f}",
            f"{1e3 * one.busy_p50:.2f}",
            f"{1e3 * one.busy_p99:.2f}",
            *("-" if value is None else f"{1e3 * value:.2f}" for value in (one.added_p50, one.added_p99)),
        )
        for one in report.items
    ]
    loads = f"{plan.connections} connections; {plan.streams} streams of {plan.chunks} chunks"
    title = f"Prefill, hand-off, decode over {loads}"
    first = report.items[0]
    said = [
        f"{first.name} takes {first.request_cpu / one.request_cpu:.2f} x the CPU per request and "
        f"{first.chunk_cpu / one.chunk_cpu:.2f} x per chunk of {one.name}, "
        f"at {first.request_rate / one.request_rate:.2f} x its rate"
        for one in report.items[1:]
    ]
    remark = ". ".join([*said, f"Added latency is in ms at {plan.rate:g} requests/s"]) + "."
    found = [Table(columns, rows, title, remark)]
    if plan.memory_requests:
        names = ("router", *(f"{10 * (number + 1)} %" for number in range(_TRANCHES)))
        texts = [(one.name, *(f"{size / MIB:.1f}" for size in one.memory)) for one in report.items]
        found.append(Table(names, texts, f"Resident MiB over {plan.memory_requests} requests"))
    return found
