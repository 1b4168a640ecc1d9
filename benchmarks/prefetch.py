#!/usr/bin/env python3
"""What is it worth that the router tells a pool which prompt comes, before an engine asks for it?

A real router and a real node with a directory below.  A prompt's pages are in the directory and not in memory, and its
files are in no cache of the system.  Prefill takes ``--prefill`` seconds; the decode then looks the prompt up as an
engine does, and waits until its pages are in memory.  That wait is measured, with ``--pool-nodes`` and without.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from aiohttp import web
from rich.console import Console
from rich.table import Table

from ems.http.address import Address
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.http.prefetch_hints import PoolNode
from ems.pool.keys import NO_PARENT, KeyChain
from ems.pool.protocol.acts import Clear
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.router.fakes import FakeEngine, completion, running

CHUNK = 256
NAME = "default/m/layout/0.0"
FACTS = {"kind": "vllm", "tenant": "default", "model": "m", "page_shards": "1", "window": "0"}
PATIENCE = 120.0
LEAST_QUEUE = 16 << 20
"""Bytes: a pack must fit into it."""
PAUSE = 0.001
"""Between two looks of the decode."""


class Host:
    """A node whose tier has a prompt's pages."""

    def __init__(self, node: NodeProcess, client: PoolClient, folder: Path, tokens: list[int], page: int) -> None:
        self.node, self.client, self._folder, self.tokens = node, client, folder, tokens
        self.namespace = Namespace(NAME, page)
        chain = KeyChain("default/m/layout", CHUNK)
        chain.extend(tokens)
        self.keys = chain.packed(0, len(chain))
        client.describe(NAME, FACTS | {"chunk_tokens": str(CHUNK)})
        reservation = client.reserve(self.namespace, NO_PARENT, list(chain))
        segments = client.segments(reservation.epoch)
        for ref in reservation.granted.values():
            segments.page(ref, page)[:] = os.urandom(page)
        client.commit(reservation)
        until(lambda: node.figures()["tiers"][0]["pages_written"] == len(chain), "the tier has it", PATIENCE)

    def found(self) -> int:
        return self.client.lookup(self.namespace, self.keys).count

    def forget(self) -> None:
        """Leave the pages in the directory alone, and its files on the disk alone."""
        administrator = PoolClient(self.node.socket, "benchmark", administers=True)
        with closing(administrator):
            administrator.administer(Clear(everything=True, memory_only=True))
        os.sync()
        for path in self._folder.rglob("*.pack"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def http(self) -> Address:
        return Address.parse(self.node.log.rpartition("http=http://")[2].split()[0])


async def wait_of_decode(host: Host, key: Path, prefill_seconds: float, *, told: bool) -> float:
    """Seconds from the request at the decode until all pages of its prompt are in memory."""
    waits: list[float] = []

    async def prefilling(request: web.Request, body: bytes) -> web.StreamResponse:
        await asyncio.sleep(prefill_seconds)
        return await completion(request, body)

    async def decoding(request: web.Request, body: bytes) -> web.StreamResponse:
        begin, pages = time.perf_counter(), len(host.keys) // 16
        while await asyncio.to_thread(host.found) < pages:  # noqa: ASYNC110  as an engine's scheduler asks
            await asyncio.sleep(PAUSE)
        waits.append(time.perf_counter() - begin)
        return await completion(request, body)

    await asyncio.to_thread(host.forget)
    async with FakeEngine(prefilling) as prefill, FakeEngine(decoding) as decode:
        nodes = {decode.address: PoolNode(host.http)} if told else {}
        settings = {"pool_nodes": nodes, "pool_key": key if told else None}
        async with running([prefill.address], [decode.address], **settings) as router:
            answer = await router.post(json={"model": "m", "prompt": host.tokens})
            assert answer.status == 200, await answer.text()
    return waits[0]


async def measure(host: Host, key: Path, prefill_seconds: float, rounds: int) -> dict[bool, list[float]]:
    waits: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for told, seconds in waits.items():
            seconds.append(await wait_of_decode(host, key, prefill_seconds, told=told))
    return waits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt (default: 2048)")
    parser.add_argument("--token-kib", type=int, default=56, help="KiB of a token's KV (default: 56, a 7B model's)")
    parser.add_argument("--prefill", type=float, default=0.3, help="seconds that the prefill takes (default: 0.3)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind (default: 5)")
    parser.add_argument("--folder", type=Path, help="where the directory tier is made (default: for temporary files)")
    given = parser.parse_args()
    for flag, value, least in (
        ("--tokens", given.tokens, CHUNK),
        ("--token-kib", given.token_kib, 1),
        ("--prefill", given.prefill, 0),
        ("--rounds", given.rounds, 1),
    ):
        if not value >= least:
            parser.error(f"{flag} is {value}, expected at least {least}")
    if given.folder is not None and not given.folder.is_dir():
        parser.error(f"--folder {given.folder} is no folder")
    page = CHUNK * given.token_kib << 10
    with tempfile.TemporaryDirectory(prefix="ems-ahead-", dir=given.folder) as name:
        key = Path(name) / "key"
        key.write_text("token")
        key.chmod(0o600)
        size = 4 * max(given.tokens, 2 * CHUNK) * given.token_kib << 10  # a segment has room for its header and a page
        tier = f"dir:{name}/tier?queue={max(size, LEAST_QUEUE)}"
        flags = ["--size", str(size), "--segment-size", str(size // 4), "--http-port", "0"]
        node = NodeProcess(*flags, "--http-token-file", str(key), "--tier", tier)
        with node:
            node.wait_touched()
            with closing(node.client()) as client:
                host = Host(node, client, Path(name) / "tier", list(range(given.tokens)), page)
                waits = asyncio.run(measure(host, key, given.prefill, given.rounds))
    size = f"{given.tokens} tokens, {given.tokens * given.token_kib >> 10} MiB"
    table = Table(
        title=f"{size}, prefill {given.prefill:g} s: how long the decode waits for pages", title_justify="left"
    )
    for column in ("", "median, ms", "least", "most"):
        table.add_column(column, justify="right" if column else "left")
    for told, label in ((False, "the decode asks"), (True, "the pool is told")):
        figures = (statistics.median(waits[told]), min(waits[told]), max(waits[told]))
        table.add_row(label, *(f"{1e3 * one:.1f}" for one in figures))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
