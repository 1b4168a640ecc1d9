"""The workers of one engine with several ranks, on a real node."""

from __future__ import annotations

import logging

import torch

from ems.pool.client.pool_client import PoolClient
from ems.transfers.device import CpuDevice
from ems.vllm.loads import Loader
from ems.vllm.model import LocalPlane
from ems.vllm.pages import plane_rows
from ems.vllm.planes import Plane, portion
from ems.vllm.requests import Load, Save
from ems.vllm.saves import Saver
from tests.e2e.engines import Node, first

BLOCKS, BLOCK, WIDTH = 8, 4, 16


LAYERS = ("layers.0", "layers.1", "layers.2")


logger = logging.getLogger("test")


class Ranks:
    """The workers of one engine with ``heads`` KV heads over ``count`` ranks, all layers filled from ``seed``."""

    def __init__(
        self,
        node: Node,
        plane: Plane,
        heads: int,
        count: int,
        *,
        seed: int,
        page_blocks: int = 1,
        by_layer: bool = False,
    ) -> None:
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
            rows = plane_rows([local], mine, BLOCKS, page_blocks)
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
                batch.progress.done(name, None)
            batch.progress.finish(None)
        for saver in self.savers:
            first(saver.take_over, "the blocks are copied")

    def load(self, load: Load, *, in_step: bool = False) -> None:
        for loader in self.loaders:
            job = loader.start(load, None, in_step=in_step)
            for name in LAYERS if in_step else ():
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
