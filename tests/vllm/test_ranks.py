"""Engines with different numbers of ranks on one real pool: one reads what the other wrote, byte for byte."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest
import torch

from ems.cc_v1.tensors import CpuDevice
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.vllm.loads import Loader
from ems.vllm.model import LocalPlane
from ems.vllm.pages import plane_rows
from ems.vllm.planes import Plane, portion
from ems.vllm.requests import Load, LoadPart, Save
from ems.vllm.saves import Saver
from ems.vllm.search import Prompt, Search
from tests.e2e.engines import Node, first, running_node, wait_for

BLOCKS, BLOCK, WIDTH = 8, 4, 16
LAYERS = ("layers.0", "layers.1", "layers.2")
logger = logging.getLogger("test")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node("--size", "32MB", "--segment-size", "1MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 32 << 20, "the memory is touched")
        yield running


class Ranks:
    """The workers of one engine with ``heads`` KV heads over ``count`` ranks, all layers filled from ``seed``."""

    def __init__(self, node: Node, plane: Plane, heads: int, count: int, *, seed: int, by_layer: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        whole = {name: torch.randn(BLOCKS, heads, BLOCK, WIDTH, generator=generator) for name in LAYERS}
        self.plane = plane
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.clients: list[PoolClient] = []
        self.savers: list[Saver] = []
        self.loaders: list[Loader] = []
        for rank in range(count):
            held = max(heads // count, 1)
            start = rank * heads // count
            mine = {name: tensor[:, start : start + held].clone() for name, tensor in whole.items()}
            local = LocalPlane(0, plane, LAYERS, portion(heads, plane.shards, count, rank), (held,) * 3)
            rows = plane_rows([local], mine, BLOCKS)
            client = PoolClient(node.socket, f"rank{rank}")
            self.tensors.append(mine)
            self.clients.append(client)
            self.savers.append(Saver(client, rows, CpuDevice(), logger, 2.0, by_layer=by_layer))
            self.loaders.append(Loader(client, rows, CpuDevice(), logger, 2.0, by_layer=True))

    def whole(self, block: int) -> list[torch.Tensor]:
        """All heads of one block, layer by layer."""
        return [torch.cat([rank[name][block] for rank in self.tensors]) for name in LAYERS]

    def save(self, save: Save, *, by_layer: bool = False) -> None:
        for saver in self.savers:
            batch = saver.start([save])
            for name in LAYERS if by_layer else ():
                batch.computed_layer(name, None)
            batch.computed(None)
        for saver in self.savers:
            wait_for(lambda saver=saver: not saver.busy("r"), "the blocks are copied")  # type: ignore[misc]

    def load(self, load: Load, *, joined: bool = False) -> None:
        for loader in self.loaders:
            job = loader.start(load, None, joined=joined)
            for name in LAYERS if joined else ():
                assert job.progress.wait(name, 10)[0]
            result = first(loader.results, "the load ends")
            assert result.sound, result

    def close(self) -> None:
        for saver in self.savers:
            saver.close()
        for loader in self.loaders:
            loader.close()
        for client in self.clients:
            client.close()


def equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize(
    ("heads", "writers", "readers"),
    [(4, 1, 2), (4, 2, 1), (4, 2, 4), (2, 4, 1), (2, 1, 4), (1, 2, 1), (1, 1, 2)],
    ids=["1-2", "2-1", "2-4", "copies-1", "1-copies", "MLA 2-1", "MLA 1-2"],
)
def test_pages_serve_any_number_of_ranks(node: Node, heads: int, writers: int, readers: int, *, by_layer: bool) -> None:
    plane = Plane(f"default/m/{heads}{writers}{readers}{by_layer}", shards=heads)
    one = Ranks(node, plane, heads, writers, seed=1, by_layer=by_layer)
    other = Ranks(node, plane, heads, readers, seed=2)
    reader = PoolClient(node.socket, "scheduler")
    tokens = list(range(14))
    chain = KeyChain("model", BLOCK)
    chain.extend(tokens)
    tail = chain.tail(3, tokens[12:])
    try:
        one.save(Save("r", 0, chain.parent(0), [*chain, tail.key], [[5, 2, 7, 1]], tail), by_layer=by_layer)
        search = Search(reader, [plane], BLOCK, 2.0)
        wait_for(lambda: search.reach(Prompt(tokens, chain, tuple))[0] == 14, "the pages are committed")
        found = search.take(Prompt(tokens, chain, tuple))
        assert (found.tokens, found.blocks) == (14, 3)
        part = LoadPart(0, [1, 3, 4, 6], found.pages[0].keys, found.pages[0].packed_refs)
        if by_layer:
            rest, last = Load("r", found.leases[0].node, [part], joined=True).split()
            other.load(last, joined=True)
            other.load(rest, joined=True)
        else:
            other.load(Load("r", found.leases[0].node, [part]))
        copies = max(readers // heads, 1)
        for source, target in zip([5, 2, 7, 1], [1, 3, 4, 6], strict=True):
            expected = [layer[:: max(writers // heads, 1)] for layer in one.whole(source)]
            assert equal([layer[::copies] for layer in other.whole(target)], expected)
    finally:
        one.close()
        other.close()
        reader.close()
