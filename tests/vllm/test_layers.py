"""Layer by layer: a layer is used while later ones are still loaded, and stored while later ones are computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.transfers.checksums import PageSums
from ems.transfers.device import CpuDevice
from ems.transfers.plan import CopyPlan
from ems.vllm.layers import layer_index
from ems.vllm.planes import Plane
from ems.vllm.requests import Load, LoadPart, Save
from ems.vllm.search import Prompt, Search
from tests.e2e.engines import Node, first, running_node, wait_for
from tests.vllm.ranks import BLOCK, LAYERS, Ranks

TOKENS = list(range(8))


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "8MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 8 << 20, "the memory is touched")
        yield running


@pytest.fixture
def ranks(node: Node) -> Iterator[Ranks]:
    made = Ranks(node, Plane("default/m/layers", shards=2), 2, 1, seed=1, by_layer=True)
    yield made
    made.close()


def prompt() -> Prompt:
    chain = KeyChain("model", BLOCK)
    chain.extend(TOKENS)
    return Prompt(TOKENS, chain, lambda _size: ())


def save() -> Save:
    chain = prompt().chain
    return Save(1, "r", 0, chain.parent(0), chain.tails(0, len(chain)), [[1, 2]])


def layer_of(ranks: Ranks, plan: CopyPlan) -> int:
    """The layer of the first rank to which all copies belong."""
    starts = [ranks.tensors[0][name].data_ptr() for name in LAYERS]
    ends = [start + ranks.tensors[0][name].nbytes for start, name in zip(starts, LAYERS, strict=True)]
    (layer,) = {
        next(number for number in range(len(LAYERS)) if starts[number] <= address < ends[number])
        for address in plan.engine.tolist()
    }
    return layer


def test_a_layer_is_stored_before_the_next_is_computed(
    ranks: Ranks, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: queue.Queue[int] = queue.Queue()
    copy = CpuDevice.copy

    def seen(device: CpuDevice, plan: CopyPlan, sums: PageSums | None = None) -> None:
        copy(device, plan, sums)
        copied.put(layer_of(ranks, plan))

    monkeypatch.setattr(CpuDevice, "copy", seen)
    monkeypatch.setattr(CpuDevice, "batch_bytes", 1)
    batch = ranks.savers[0].start([save()])
    for number, name in enumerate(LAYERS):
        assert copied.empty()
        batch.progress.done(name, None)
        # Two blocks of two shards each.
        assert [copied.get(timeout=10) for _ in range(4)] == [number] * 4
        assert node.counters["pages_committed"] == 0
    batch.progress.finish(None)
    wait_for(lambda: node.counters["pages_committed"] == 4, "the pages are committed")


def test_a_layer_is_used_while_later_ones_are_loaded(ranks: Ranks, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.save(save(), by_layer=True)
    client = PoolClient(node.socket, "scheduler")
    search = Search(client, [ranks.plane], BLOCK, 2.0)
    wait_for(lambda: search.reach(prompt())[0] == len(TOKENS), "the pages are committed")
    found = search.take(prompt())
    go_on = [threading.Event() for _ in LAYERS]
    copy = CpuDevice.copy

    def held(device: CpuDevice, plan: CopyPlan, sums: PageSums | None = None) -> None:
        assert go_on[layer_of(ranks, plan)].wait(10)
        copy(device, plan, sums)

    monkeypatch.setattr(CpuDevice, "copy", held)
    part = LoadPart(0, [5, 6], found.pages[0].keys, found.pages[0].packed_refs)
    job = ranks.loaders[0].start(Load("r", found.leases[0].node, [part], in_step=True), None, in_step=True)
    for number, name in enumerate(LAYERS):
        assert not job.progress.wait(name, 0)[0]
        go_on[number].set()
        assert job.progress.wait(name, 10)[0]
        assert job.progress.over is False or number == len(LAYERS) - 1
    assert first(ranks.loaders[0].results, "the load ends").sound
    client.close()


def test_a_save_that_is_called_off_between_layers_leaves_nothing(ranks: Ranks, node: Node) -> None:
    batch = ranks.savers[0].start([save()])
    wait_for(lambda: node.stats()["reservations"] == 1, "the pages are reserved")
    batch.progress.done(LAYERS[0], None)
    ranks.savers[0].finish(0.0)
    for name in LAYERS[1:]:
        batch.progress.done(name, None)
    batch.progress.finish(None)

    wait_for(lambda: node.stats()["reservations"] == 0, "the reservation is given back")
    assert node.counters["pages_committed"] == 0


@pytest.mark.parametrize(
    ("name", "index"), [("model.layers.7.self_attn.attn", 7), ("layers.12", 12), ("attn", -1)], ids=str
)
def test_layers_are_ordered_by_their_number(name: str, index: int) -> None:
    assert layer_index(name) == index
