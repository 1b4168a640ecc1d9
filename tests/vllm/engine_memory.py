"""An engine's memory, its client and the threads that copy between them, on a real node."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ems.pool.client.answers import Lease
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.transfers.device import CpuDevice
from ems.vllm.loads import Loader, LoadResult
from ems.vllm.model import LocalPlane
from ems.vllm.pages import PlaneRows
from ems.vllm.planes import Plane, Portion
from ems.vllm.requests import Load, LoadPart, Save
from ems.vllm.saves import Saver
from tests.e2e.engines import Node, first

LAYERS, BLOCKS, TOKENS = 3, 16, 4


logger = logging.getLogger("test")


class Engine:
    """An engine's memory, a client, and the threads that copy."""

    def __init__(self, node: Node, name: str) -> None:
        generator = torch.Generator().manual_seed(hash(name) % 1000)
        shape = (BLOCKS, 2, TOKENS, 16)
        self.tensors = [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]
        layers = tuple(f"layers.{number}" for number in range(LAYERS))
        self.rows = PlaneRows(
            LocalPlane(0, Plane("default/model/layout"), layers, Portion(), (2,) * LAYERS),
            [[tensor] for tensor in self.tensors],
        )
        self.namespace = self.rows.namespace
        self.client = PoolClient(node.socket, name)
        self.device = CpuDevice()
        self.loader = Loader(self.client, [self.rows], self.device, logger, 2.0)
        self.saver = Saver(self.client, [self.rows], self.device, logger, 2.0)

    def block(self, number: int) -> list[torch.Tensor]:
        return [tensor[number].clone() for tensor in self.tensors]

    def save(self, chain: KeyChain, blocks: list[int], start: int = 0) -> None:
        tails = chain.tails(start, start + len(blocks))
        batch = self.saver.start([Save(1, "save", start, chain.parent(start), tails, [blocks])])
        batch.progress.finish(self.device.mark())
        first(self.saver.take_over, "the blocks are copied")

    def lease(self, chain: KeyChain) -> Lease:
        found = self.client.lookup(self.namespace, chain.packed(0, len(chain)), lease=True)
        assert found.lease is not None
        return found.lease

    def load(self, chain: KeyChain, lease: Lease, blocks: list[int]) -> LoadResult:
        part = LoadPart(0, blocks, chain.packed(0, len(blocks)), lease.packed_refs)
        self.loader.start(Load("load", lease.node, [part]), None)
        return first(self.loader.results, "the load ends")

    def close(self) -> None:
        self.loader.close()
        self.saver.close()
        self.client.close()


def chain_of(blocks: int, seed: int = 0) -> KeyChain:
    chain = KeyChain("default/model/layout", TOKENS)
    chain.extend([seed * 1000 + token for token in range(blocks * TOKENS)])
    return chain


def present(engine: Engine, chain: KeyChain) -> int:
    return engine.client.lookup(engine.namespace, chain.packed(0, len(chain))).count


def equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
