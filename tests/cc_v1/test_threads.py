"""A scheduler's lookups beside a worker's loads and saves, all at once."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import torch

from ems import Ems
from tests.cc_v1.conftest import NEVER, OPTION, make_caches
from tests.kit.node import NodeProcess

if TYPE_CHECKING:
    from ems.cc_v1.context_caching import ContextCaching
    from tests.cc_v1.conftest import Caches, Connect

THREADS, ROUNDS, BLOCK, BLOCKS_EACH = 6, 40, 4, 8


def content(hashed: int) -> int:
    """What every value of a block is."""
    return hashed * 1000 + 7


class Worker(threading.Thread):
    """Saves, looks up and loads random blocks within its own part of the caches."""

    def __init__(self, cc: ContextCaching, caches: Caches, number: int) -> None:
        super().__init__()
        self._cc = cc
        self._flat = [tensor.view(-1, *tensor.shape[2:]) for layer in caches for tensor in layer]
        self._choice = random.Random(number)
        self._slots = range(number * BLOCKS_EACH * BLOCK, (number + 1) * BLOCKS_EACH * BLOCK)
        self.wrong: list[str] = []

    def run(self) -> None:
        for _ in range(ROUNDS):
            hashes = self._choice.sample(range(40), self._choice.randint(1, 4))
            slots = self._choice.sample(self._slots, len(hashes) * BLOCK)
            self._round(hashes, [slots[i : i + BLOCK] for i in range(0, len(slots), BLOCK)])

    def _round(self, hashes: list[int], places: list[list[int]]) -> None:
        slots, offsets = [slot for place in places for slot in place], [BLOCK] * len(hashes)
        for hashed, place in zip(hashes, places, strict=True):
            self._fill(place, content(hashed))
        saved = self._cc.get_result(self._cc.async_save(slots, hashes, offsets, OPTION))
        self._fill(slots, -1)
        found = self._cc.exists(hashes, OPTION).success
        loaded = self._cc.get_result(self._cc.async_load(slots, hashes, offsets, OPTION)).success
        if saved.success != len(hashes) or loaded < found:
            self.wrong.append(f"saved {saved.success} of {len(hashes)}, found {found}, loaded {loaded}")
        for position, (hashed, place) in enumerate(zip(hashes, places, strict=True)):
            expected = content(hashed) if position < loaded else -1
            if not all(bool((tensor[torch.tensor(place)] == expected).all()) for tensor in self._flat):
                self.wrong.append(f"block {hashed} holds something else")

    def _fill(self, slots: list[int], value: int) -> None:
        for tensor in self._flat:
            tensor[torch.tensor(slots)] = value


def test_every_thread_reads_what_it_should(node: NodeProcess, connect: Connect) -> None:
    """Threads share the hashes; what a block holds follows from its hash, so any loaded byte can be checked."""
    cc = connect(node, health=NEVER)
    caches = make_caches(torch.int32, blocks=THREADS * BLOCKS_EACH)
    cc.register_kvcache(caches)
    workers = [Worker(cc, caches, number) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [sentence for worker in workers for sentence in worker.wrong] == []
    assert Ems.check_health()
