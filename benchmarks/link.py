#!/usr/bin/env python3
"""What it costs the interpreter to have the pages of a long prompt copied, and how fast an accelerator copies them.

For each shape of model and engine block one rank loads a prompt, in two ways beside each other: "one by one" is what
EMS did first, a page for each block of the engine and a call for each piece of memory; "now" has pages of 256 tokens
and one call of the driver for each batch.  Every line has the most that it may be.

- Planning: the time of the interpreter in which the copies of all batches are planned.
- Submissions: calls of the driver.
- Interpreter lock held: the processor time of everything that a worker does for the load, from the message that asks
  for it to the result, in both of its threads: list the pages, look at their headers before and behind the copy, plan.
  Checksums are left out, for they let go of the lock; the inner loops of numpy and a device's driver do so, too, and
  are in it.  For the way of before one call for each piece is added (measured for 20,000 of them).
- Message of the load: what the scheduler tells the worker.  Lookup: the median of five lookups of all pages with a
  lease.  Save: what a worker does with the message of a save of 8,192 tokens, to the list of its pages, of which the
  engine's own thread does a part.

Without an accelerator nothing is copied and the driver is a stand-in that counts.  With ``--device cuda`` (or ``xpu``,
``npu``) the pages are copied to it out of pinned memory, and the share of a plain copy of as many bytes is printed.
Run it with the project's interpreter: ``python benchmarks/link.py [--help]``.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from statistics import median
from typing import NamedTuple, cast
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, NO_PARENT, KeyChain, page_keys
from ems.pool.layout import (
    HEADERS_OFFSET,
    Description,
    Header,
    PageFlag,
    PageRef,
    SlotState,
    carve,
    header_offset,
    pack_description,
    pack_header,
)
from ems.pool.segments.reader import PageReader, Trust
from ems.tables import Table
from ems.transfers.checksums import PageSums
from ems.transfers.device import Device, device_of
from ems.transfers.plan import CopyPlan, Slots
from ems.vllm.loads import Loader
from ems.vllm.metadata import StepMetadata
from ems.vllm.model import CHUNK_TOKENS, LocalPlane
from ems.vllm.pages import PlaneRows
from ems.vllm.planes import Plane, Portion
from ems.vllm.requests import Load, LoadPart, Save
from tests.kit.node import NodeProcess

ONE_BY_ONE = 20_000
BATCH = Device.batch_bytes
SAVED_TOKENS = 8192
TIMES = 5
TINY = 64
"""Bytes of the pages that are looked up: their size does not matter to a lookup."""
SEGMENT = 1 << 30


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
    held: float
    one_by_one: float
    copying: float
    plain: float
    lookup: float
    told: int
    save: float


class CountingDevice(Device):
    """Counts what it is told of, and has it copied by ``inner`` if there is one."""

    def __init__(self, inner: Device | None) -> None:
        self._inner = inner
        self.submissions = self.pieces = 0

    def pin(self, buffer: memoryview) -> None:
        if self._inner is not None:
            self._inner.pin(buffer)

    def unpin(self, buffer: memoryview) -> None:
        if self._inner is not None:
            self._inner.unpin(buffer)

    def copy(self, plan: CopyPlan, sums: PageSums | None = None) -> None:
        self.submissions += 1
        self.pieces += len(plan.sizes)
        if self._inner is not None:
            self._inner.copy(plan, sums)

    def mark(self) -> object:
        return self._inner.mark() if self._inner is not None else None

    def wait_for(self, mark: object) -> None:
        if self._inner is not None:
            self._inner.wait_for(mark)

    def synchronise(self) -> None:
        if self._inner is not None:
            self._inner.synchronise()

    def paused(self) -> AbstractContextManager[None]:
        return self._inner.paused() if self._inner is not None else nullcontext()


class SparsePool:
    """A client whose node has some pages; their bytes are never touched, so that they cost nothing."""

    node = "node"
    epoch = 1

    def __init__(self, namespace: Namespace, keys: bytes) -> None:
        geometry = carve(SEGMENT, namespace.page_size)
        self._namespace = namespace
        self.segments: list[memoryview] = []
        refs = []
        for at in range(len(keys) // KEY_BYTES):
            number, slot = divmod(at, geometry.slot_count)
            if not slot:
                segment = memoryview(mmap.mmap(-1, SEGMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                description = Description(number, namespace.name, bytes(16), geometry, 1, 1)
                segment[:HEADERS_OFFSET] = pack_description(description)
                self.segments.append(segment)
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            header = Header(
                SlotState.PRESENT, 1, key, length=namespace.page_size, stamp=at + 1, flags=PageFlag.CHECKSUMMED
            )
            segment[header_offset(slot) : header_offset(slot + 1)] = pack_header(header)
            refs.append(PageRef(number, slot, 1).pack())
        self.packed_refs = b"".join(refs)

    def reader(self, namespace: Namespace, _epoch: int) -> PageReader:
        return PageReader(self.segments.__getitem__, namespace.name, namespace.page_size, Trust())

    def tell_stopped(self, _timeout: float) -> None: ...

    def notice(self) -> None: ...


def measure(shape: Shape, tokens: int, kind: str, page_blocks: int, client: PoolClient) -> Measured:
    """Memory that is only planned with is never touched, so that it costs nothing."""
    blocks = tokens // shape.block
    size = (blocks, shape.heads, shape.block, shape.values)
    tensors = [torch.empty(size, dtype=torch.bfloat16, device=kind) for _ in range(shape.layers)]
    name = f"default/{shape.name}/{page_blocks}"
    plane = Plane(name.replace(" ", "-"), shards=shape.shards)
    layers = tuple(f"layers.{number}" for number in range(shape.layers))
    local = LocalPlane(0, plane, layers, Portion(0, shape.shards), (shape.heads,) * shape.layers)
    rows = PlaneRows(local, [[tensor] for tensor in tensors], page_blocks)
    chain = KeyChain("benchmark", shape.block * page_blocks)
    count = chain.extend(range(tokens)) * shape.shards
    keys = page_keys(chain.packed(0, len(chain)), shape.shards)
    lookup = _looked_up(client, Namespace(plane.namespace, TINY), keys)
    pool = SparsePool(rows.namespace, keys)
    part = LoadPart(0, list(range(blocks)), chain.packed(0, len(chain)), pool.packed_refs)
    told = pickle.dumps(StepMetadata([Load("request", pool.node, [part])]), pickle.HIGHEST_PROTOCOL)
    planning, last = _planning(rows, pool, part)
    inner = device_of(tensors) if kind != "cpu" else None
    device = CountingDevice(inner)
    for segment in pool.segments:
        device.pin(segment)
    if inner is not None:
        _load(rows, pool, inner, told)  # the first one of a process compiles what copies small pieces
    held, copying = _load(rows, pool, device, told)
    plain = _plain(pool.segments, count * rows.rows.page_bytes, kind) if kind != "cpu" else 0.0
    for segment in pool.segments:  # or the driver would know what is at their addresses next
        device.unpin(segment)
    one_by_one = _one_by_one(last) * device.pieces
    save = _save(rows, chain, shape.block, page_blocks)
    pieces, submissions = device.pieces, device.submissions
    return Measured(count, pieces, submissions, planning, held, one_by_one, copying, plain, lookup, len(told), save)


def _planning(rows: PlaneRows, pool: SparsePool, part: LoadPart) -> tuple[float, CopyPlan]:
    """Seconds for the plans of all batches, and the last of them."""
    parts, refs, keys = rows.loaded(part)
    leased = pool.reader(rows.namespace, pool.epoch).look(refs, keys)
    step, seconds = max(BATCH // rows.rows.page_bytes, 1), 0.0
    for begin in range(0, leased.present, step):
        began = time.thread_time()
        slots = Slots(leased.starts[begin : begin + step], rows.rows.page_bytes, leased.segments)
        plan = rows.rows.plan_many(parts.span(begin, begin + step), slots, out=False)
        seconds += time.thread_time() - began
    return seconds, plan


def _load(rows: PlaneRows, pool: SparsePool, device: Device, told: bytes) -> tuple[float, float]:
    """Processor seconds and seconds of a load as a worker makes it."""
    loader = Loader(cast("PoolClient", pool), [rows], device, logging.getLogger("benchmark"), 1.0)
    with closing(loader), patch("ems.pool.segments.reader.crc32c", lambda _page: 0):
        used, begin = time.process_time(), time.perf_counter()
        (load,) = pickle.loads(told).loads  # noqa: S301 - what was made here
        loader.start(load, device.mark())
        (result,) = loader.results(60.0)
        used, seconds = time.process_time() - used, time.perf_counter() - begin
    assert result.sound, "the pages are there"
    return used, seconds


def _looked_up(client: PoolClient, namespace: Namespace, keys: bytes) -> float:
    """Seconds of a lookup with a lease."""
    pages = [keys[at : at + len(NO_PARENT)] for at in range(0, len(keys), len(NO_PARENT))]
    step = 4096  # a writer holds a share of the pool at most
    for begin in range(0, len(pages), step):
        parent = pages[begin - 1] if begin else NO_PARENT
        client.commit(client.reserve(namespace, parent, pages[begin : begin + step], 60.0), timeout=60.0)
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        hits = client.lookup(namespace, keys, lease=True, timeout=60.0)
        seconds.append(time.perf_counter() - began)
        assert hits.lease is not None, "the pool holds all pages"
        client.release(hits.lease)
    assert hits.count == len(pages), "the pool holds all pages"
    return median(seconds)


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


def _plain(segments: list[memoryview], size: int, kind: str) -> float:
    target = torch.empty(BATCH, dtype=torch.uint8, device=kind)
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    for first in range(0, size, BATCH):
        segment, start = divmod(first, SEGMENT)
        part = torch.frombuffer(segments[segment], dtype=torch.uint8)[start : start + min(BATCH, size - first)]
        target[: len(part)].copy_(part, non_blocking=True)
    torch.accelerator.synchronize()
    return time.perf_counter() - begin


def lines(shape: str, before: Measured, now: Measured) -> Iterator[list[str]]:
    """Rows of the table: what, the way of before, now, and the most that it may be now."""

    def milliseconds(*figures: float) -> list[str]:
        return [f"{figure * 1000:,.1f} ms" for figure in figures]

    yield [shape, "pages", f"{before.pages:,}", f"{now.pages:,}", ""]
    yield ["", "pieces", f"{before.pieces:,}", f"{now.pieces:,}", ""]
    yield ["", "submissions", f"{before.pieces:,}", f"{now.submissions:,}", "64"]
    yield ["", "planning", *milliseconds(before.planning, now.planning, 0.02)]
    yield ["", "interpreter lock held", *milliseconds(before.held + before.one_by_one, now.held, 0.03)]
    yield ["", "message of the load", f"{before.told / 1000:,.0f} KB", f"{now.told / 1000:,.0f} KB", "100 KB"]
    yield ["", "lookup with a lease", *milliseconds(before.lookup, now.lookup, 0.005)]
    yield ["", "save of 8,192 tokens", *milliseconds(before.save, now.save, 0.001)]
    if now.plain:
        yield ["", "copying", *milliseconds(before.copying, now.copying), ""]
        yield ["", "of a plain copy", f"{before.plain / before.copying:.0%}", f"{now.plain / now.copying:.0%}", ""]


def _is_there(kind: str) -> bool:
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128 * 1024, help="of the prompt (default: 131072)")
    parser.add_argument("--device", choices=("cpu", "cuda", "xpu", "npu"), default="cpu", help="cpu: nothing is copied")
    options = parser.parse_args()
    if options.tokens < CHUNK_TOKENS:
        parser.error(f"--tokens is {options.tokens}, expected at least {CHUNK_TOKENS}, which is a page")
    if options.device != "cpu" and not _is_there(options.device):
        parser.error(f"--device is {options.device}, which torch does not find here, expected cpu or what is there")
    table: list[list[str]] = []
    with (
        NodeProcess("--size", "1GB", "--segment-size", "32MB") as node,
        closing(PoolClient(node.socket, "benchmark")) as client,
    ):
        node.wait_touched()
        for shape in SHAPES:
            sys.stderr.write(f"measuring {shape.name}\n")
            before, now = (
                measure(shape, options.tokens, options.device, blocks, client)
                for blocks in (1, CHUNK_TOKENS // shape.block)
            )
            table += lines(shape.name, before, now)
    for line in Table(["shape", "", "one by one", "now", "at most"], table).lines(None):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
