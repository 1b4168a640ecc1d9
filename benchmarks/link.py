#!/usr/bin/env python3
"""What it costs the interpreter to have the pages of a long prompt copied, and how fast an accelerator copies them.

For each shape of model and engine block one rank loads a prompt: batch by batch, each batch is a plan and one call of
the driver.  "Planning" is the time of the interpreter, which the engine's model runner needs as well; "pieces" is what
the driver is told of; "one by one" is the time of the interpreter where each piece is a copy of its own (measured for
20,000 of them).

Without an accelerator nothing is copied and the driver is a stand-in that counts.  With ``--device cuda`` (or ``xpu``,
``npu``) the pages are copied to it out of pinned memory, and the share of a plain copy of as many bytes is printed.
Run it with the project's interpreter: ``python benchmarks/link.py [--help]``.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ems.tables import Table
from ems.transfers.device import Device, device_of
from ems.transfers.plan import CopyPlan
from ems.transfers.rows import BlockRows, Row

ONE_BY_ONE = 20_000
BATCH = Device.batch_bytes


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


def measure(shape: Shape, tokens: int, kind: str) -> Measured:
    """Memory that is only planned with is never touched, so that it costs nothing."""
    blocks = tokens // shape.block
    size = (blocks, shape.heads, shape.block, shape.values)
    tensors = [torch.empty(size, dtype=torch.bfloat16, device=kind) for _ in range(shape.layers)]
    rows = BlockRows(tensors, shards=shape.shards)
    count = blocks * shape.shards
    memory = memoryview(mmap.mmap(-1, count * rows.page_bytes))
    pages = [memory[at * rows.page_bytes : (at + 1) * rows.page_bytes] for at in range(count)]
    named: list[Row] = [(block, shard) for block in range(blocks) for shard in range(shape.shards)]
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
    return Measured(count, pieces, submissions, planning, _one_by_one(plan) * pieces, copying, plain)


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
    columns = ["shape", "pages", "pieces", "calls", "planning", "one by one"]
    if options.device != "cpu":
        columns += ["copying", "of a plain copy"]
    table = []
    for shape in SHAPES:
        sys.stderr.write(f"measuring {shape.name}\n")
        found = measure(shape, options.tokens, options.device)
        row = [shape.name, f"{found.pages:,}", f"{found.pieces:,}", f"{found.submissions}"]
        row += [f"{found.planning * 1000:.0f} ms", f"{found.one_by_one * 1000:,.0f} ms"]
        if options.device != "cpu":
            row += [f"{found.copying * 1000:.0f} ms", f"{found.plain / found.copying:.0%}"]
        table.append(row)
    for line in Table(columns, table).lines(None):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
