#!/usr/bin/env python3
"""What it costs the interpreter to have the pages of a long prompt copied, and how fast an accelerator copies them.

For each shape of model and engine block one rank loads a prompt: batch by batch, each batch is a plan and one call of
the driver.  A page has the state of one block of the engine, or of a chunk of 256 tokens.  "Planning" is the time of
the interpreter, which the engine's model runner needs as well; "pieces" is what the driver is told of; "one by one" is
the time of the interpreter where each piece is a copy of its own (measured for 20,000 of them).  "Lookup" is the median
of five lookups of all pages with a lease; "told" is what the scheduler tells the worker of the load; "save" is what a
worker does with the message of a save of 8,192 tokens, to the list of its pages.

Without an accelerator nothing is copied and the driver is a stand-in that counts.  With ``--device cuda`` (or ``xpu``,
``npu``) the pages are copied to it out of pinned memory, and the share of a plain copy of as many bytes is printed.
Run it with the project's interpreter: ``python benchmarks/link.py [--help]``.
"""

from __future__ import annotations

import argparse
import mmap
import pickle
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import NO_PARENT, KeyChain
from ems.tables import Table
from ems.transfers.device import Device, device_of
from ems.transfers.plan import CopyPlan
from ems.vllm.metadata import StepMetadata
from ems.vllm.model import CHUNK_TOKENS, LocalPlane
from ems.vllm.pages import PlaneRows
from ems.vllm.planes import Plane, Portion, page_keys
from ems.vllm.requests import Load, LoadPart, Save
from tests.kit.node import NodeProcess

ONE_BY_ONE = 20_000
BATCH = Device.batch_bytes
SAVED_TOKENS = 8192
TIMES = 5
TINY = 64
"""Bytes of the pages that are looked up: their size does not matter to a lookup."""


class Shape(NamedTuple):
    """What one rank has of a model: ``values`` are those of a token in one layer and head, keys included."""

    name: str
    layers: int
    heads: int
    values: int
    block: int
    shards: int


SHAPES = (
    Shape("Llama-3-8B, blocks of 16", 32, 8, 256, 16, 8),
    Shape("Llama-3-8B, blocks of 128", 32, 8, 256, 128, 8),
    Shape("70B, one rank of 8, blocks of 16", 80, 1, 256, 16, 1),
    Shape("MLA, blocks of 64", 61, 1, 576, 64, 1),
)


class Measured(NamedTuple):
    """Counts, and seconds."""

    pages: int
    pieces: int
    submissions: int
    planning: float
    one_by_one: float
    copying: float
    plain: float
    lookup: float
    told: int
    save: float


def measure(shape: Shape, tokens: int, kind: str, page_blocks: int, client: PoolClient) -> Measured:
    """Memory that is only planned with is never touched, so that it costs nothing."""
    blocks = tokens // shape.block
    size = (blocks, shape.heads, shape.block, shape.values)
    tensors = [torch.empty(size, dtype=torch.bfloat16, device=kind) for _ in range(shape.layers)]
    name = f"default/{shape.name}/{page_blocks}"
    plane = Plane(name.replace(" ", "-"), shards=shape.shards)
    layers = tuple(f"layers.{number}" for number in range(shape.layers))
    local = LocalPlane(0, plane, layers, Portion(0, shape.shards), (shape.heads,) * shape.layers)
    of_plane = PlaneRows(local, [[tensor] for tensor in tensors], page_blocks)
    rows = of_plane.rows
    chain = KeyChain("benchmark", shape.block * page_blocks)
    count = chain.extend(range(tokens)) * shape.shards
    keys = page_keys(chain.packed(0, len(chain)), shape.shards)
    lookup, refs = _looked_up(client, Namespace(plane.namespace, TINY), keys)
    part = LoadPart(0, list(range(blocks)), chain.packed(0, len(chain)), refs)
    told = len(pickle.dumps(StepMetadata([Load("request", "node", [part])]), pickle.HIGHEST_PROTOCOL))
    memory = memoryview(mmap.mmap(-1, count * rows.page_bytes))
    pages = [memory[at * rows.page_bytes : (at + 1) * rows.page_bytes] for at in range(count)]
    named = [page.part for page in of_plane.loaded(part)]
    device = device_of(tensors) if kind != "cpu" else None
    if device is not None:
        device.pin(memory)
    step = max(BATCH // rows.page_bytes, 1)
    pieces = submissions = 0
    planning = 0.0
    begin = time.perf_counter()
    for first in range(0, count, step):
        began = time.thread_time()
        plan = rows.plan(named[first : first + step], pages[first : first + step], out=False)
        planning += time.thread_time() - began
        pieces += len(plan.sizes)
        submissions += 1
        if device is not None:
            device.copy(plan)
    if device is not None:
        device.synchronise()
    copying = time.perf_counter() - begin
    plain = _plain(memory, kind) if device is not None else 0.0
    one_by_one = _one_by_one(plan) * pieces
    save = _save(of_plane, chain, shape.block, page_blocks)
    return Measured(count, pieces, submissions, planning, one_by_one, copying, plain, lookup, told, save)


def _looked_up(client: PoolClient, namespace: Namespace, keys: bytes) -> tuple[float, bytes]:
    """Seconds of a lookup with a lease, and where the pages lie."""
    pages = [keys[at : at + len(NO_PARENT)] for at in range(0, len(keys), len(NO_PARENT))]
    step = 4096  # a writer holds a share of the pool at most
    for begin in range(0, len(pages), step):
        parent = pages[begin - 1] if begin else NO_PARENT
        client.commit(client.reserve(namespace, parent, pages[begin : begin + step], 60.0), timeout=60.0)
    seconds, refs = [], b""
    for _ in range(TIMES):
        began = time.perf_counter()
        hits = client.lookup(namespace, keys, lease=True, timeout=60.0)
        seconds.append(time.perf_counter() - began)
        assert hits.lease is not None, "the pool holds all pages"
        client.release(hits.lease)
        refs = hits.lease.packed_refs
    assert hits.count == len(pages), "the pool holds all pages"
    return median(seconds), refs


def _save(rows: PlaneRows, chain: KeyChain, block: int, page_blocks: int) -> float:
    """Seconds in which a worker reads what is to be saved and makes the list of its pages, in a thread of its own."""
    end = min(SAVED_TOKENS // (block * page_blocks), len(chain))
    save = Save(1, "request", 0, NO_PARENT, chain.tails(0, end), [list(range(end * page_blocks))])
    told = pickle.dumps(StepMetadata(saves=[save]), pickle.HIGHEST_PROTOCOL)
    seconds = []
    for _ in range(TIMES):
        began = time.thread_time()
        rows.stored(pickle.loads(told).saves[0])  # noqa: S301 - what was made here
        seconds.append(time.thread_time() - began)
    return median(seconds)


def _one_by_one(plan: CopyPlan) -> float:
    """Seconds of the interpreter for one copy that is told of by itself."""
    source = torch.empty(1 << 20, dtype=torch.uint8)
    target = torch.empty(1 << 20, dtype=torch.uint8)
    size = min(int(plan.sizes[0]), 64)  # what is copied does not count
    began = time.thread_time()
    for at in range(ONE_BY_ONE):
        target[at : at + size].copy_(source[at : at + size], non_blocking=True)
    return (time.thread_time() - began) / ONE_BY_ONE


def _plain(memory: memoryview, kind: str) -> float:
    source = torch.frombuffer(memory, dtype=torch.uint8)
    target = torch.empty(min(len(memory), BATCH), dtype=torch.uint8, device=kind)
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    for first in range(0, len(memory), BATCH):
        part = source[first : first + BATCH]
        target[: len(part)].copy_(part, non_blocking=True)
    torch.accelerator.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128 * 1024, help="of the prompt (default: 131072)")
    parser.add_argument("--device", default="cpu", help="cpu (nothing is copied), cuda, xpu or npu")
    options = parser.parse_args()
    columns = ["shape", "a page", "pages", "pieces", "calls", "planning", "one by one", "lookup", "told", "save"]
    if options.device != "cpu":
        columns += ["copying", "of a plain copy"]
    table = []
    with (
        NodeProcess("--size", "1GB", "--segment-size", "32MB") as node,
        closing(PoolClient(node.socket, "benchmark")) as client,
    ):
        node.wait_touched()
        for shape, page_blocks in ((one, count) for one in SHAPES for count in (1, CHUNK_TOKENS // one.block)):
            sys.stderr.write(f"measuring {shape.name}, {page_blocks} a page\n")
            found = measure(shape, options.tokens, options.device, page_blocks, client)
            row = [shape.name, "block" if page_blocks == 1 else "chunk", f"{found.pages:,}", f"{found.pieces:,}"]
            row += [f"{found.submissions}", f"{found.planning * 1000:.0f} ms", f"{found.one_by_one * 1000:,.0f} ms"]
            row += [f"{found.lookup * 1000:.1f} ms", f"{found.told / 1000:.0f} KB", f"{found.save * 1000:.2f} ms"]
            if options.device != "cpu":
                row += [f"{found.copying * 1000:.0f} ms", f"{found.plain / found.copying:.0%}"]
            table.append(row)
    for line in Table(columns, table).lines(None):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
