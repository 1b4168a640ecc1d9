"""Copies to and from the accelerator of this machine, with the driver's own calls."""

from __future__ import annotations

import mmap

import pytest
import torch

from ems.transfers.device import device_of
from ems.transfers.plan import Slots
from ems.transfers.rows import BlockRows, PageBlocks

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize("values", [64, 1 << 16], ids=["small pieces", "large pieces"])
@pytest.mark.parametrize("pinned", [True, False])
def test_blocks_go_to_pages_and_back(values: int, pinned: bool) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "torch knows no accelerator on this machine"
    tensors = [torch.randn(64, 2, values, dtype=torch.float32, device=accelerator) for _ in range(4)]
    others = [torch.zeros_like(tensor) for tensor in tensors]
    rows = BlockRows(tensors, shards=2)
    named = [(block, shard) for block in range(64) for shard in range(2)]
    memory = memoryview(mmap.mmap(-1, len(named) * rows.page_bytes))
    pages = [memory[at * rows.page_bytes : (at + 1) * rows.page_bytes] for at in range(len(named))]
    parts = [PageBlocks([block], shard) for block, shard in named]
    save, load = device_of(tensors), device_of(others)
    if pinned:
        load.pin(memory)
    save.wait_for(save.mark())
    save.copy(rows.plan(parts, Slots.of(pages), out=True))
    save.synchronise()
    load.wait_for(load.mark())
    load.copy(BlockRows(others, shards=2).plan(parts[::-1], Slots.of(pages[::-1]), out=False))
    load.synchronise()
    assert all(torch.equal(new, old) for new, old in zip(others, tensors, strict=True))
    load.unpin(memory)
