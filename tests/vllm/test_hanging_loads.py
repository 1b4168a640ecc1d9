"""Loads that do not go on: the engine computes instead, and no copy writes into a block that was given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ems.pool.client.answers import Lease, Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.transfers.device import CpuDevice
from ems.transfers.plan import CopyPlan
from ems.transfers.rows import BlockRows
from ems.vllm.configuration.settings import read_settings
from ems.vllm.metadata import StepMetadata
from ems.vllm.model import BlockModel, LocalPlane
from ems.vllm.planes import Plane, Portion
from ems.vllm.requests import Load, LoadPart, Save
from ems.vllm.worker import WorkerSide
from tests.e2e.engines import Node, running_node, wait_for

BLOCK, BLOCKS = 4, 16
NAME = "default/model/layout"
LAYERS = ("layers.0", "layers.1")
STORED, PAGES = 7.0, 3


class Hang:
    """Where a thread stands still, from :meth:`begin` until :meth:`end`; others than it pass afterwards."""

    def __init__(self) -> None:
        self._armed = False
        self.reached = threading.Event()
        self.in_vain = False
        """Whether a thread stood still until it gave up, because the one that ends this waited for that thread."""
        self._go_on = threading.Event()

    def begin(self) -> None:
        self._armed = True

    def end(self) -> None:
        self._armed = False
        self._go_on.set()

    def __call__(self) -> None:
        if self._armed:
            self.reached.set()
            self.in_vain |= not self._go_on.wait(60)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node("--size", "16MB", "--segment-size", "1MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 16 << 20, "the memory is touched")
        yield running


@pytest.fixture
def layerwise(request: pytest.FixtureRequest) -> bool:
    return bool(getattr(request, "param", False))


class Engine:
    """A worker whose blocks are all zero, and pages of :data:`STORED` in the pool under a name of their own."""

    def __init__(self, node: Node, name: str, *, layerwise: bool) -> None:
        self.plane = Plane(name)
        said = {"socket": str(node.socket), "autostart": False, "use_layerwise": layerwise}
        settings, _ = read_settings("kv_both", said, {})
        model = BlockModel(name, BLOCK, BLOCKS, 1, (self.plane,))
        self.worker = WorkerSide(settings, model, [LocalPlane(0, self.plane, LAYERS, Portion(), (2, 2))])
        self.caches = {layer: torch.full((BLOCKS, 2, BLOCK, 16), STORED, dtype=torch.bfloat16) for layer in LAYERS}
        self.worker.register(self.caches)
        self.chain = KeyChain(name, BLOCK)
        self.chain.extend(list(range(PAGES * BLOCK)))
        before = node.counters["pages_committed"]
        self.step(saves=[Save(1, "saved", 0, self.chain.parent(0), self.chain.tails(0, PAGES), [[1, 2, 3]])])
        wait_for(lambda: node.counters["pages_committed"] == before + PAGES, "the pages are stored")
        for cache in self.caches.values():
            cache.zero_()
        self.client = PoolClient(node.socket, "test")
        found = self.client.lookup(Namespace(name, 0), self.chain.packed(0, PAGES), lease=True).lease
        assert found is not None
        self.lease: Lease = found
        self.loaded: set[str] = set()
        self.in_step: set[str] = set()
        self.errors: set[str] = set()
        self.invalid: set[int] = set()

    def load(self, request_id: str, first: int, *, in_step: bool = False) -> Load:
        ids = list(range(first, first + PAGES))
        part = LoadPart(0, ids, self.chain.packed(0, PAGES), self.lease.packed_refs)
        return Load(request_id, self.lease.node, [part], in_step=in_step)

    def step(self, **metadata: Any) -> None:
        """The hooks of a step in vLLM's order."""
        worker = self.worker
        worker.begin(StepMetadata(**metadata))
        worker.start_loads()
        for layer in LAYERS:
            worker.wait_for_layer(layer)
            worker.computed_layer(layer)
        worker.computed()
        worker.end()

    def look(self) -> None:
        """What the engine learns between two steps."""
        if self.worker.has_results:
            self.loaded |= self.worker.results()[0]
        self.invalid |= self.worker.take_invalid_blocks()
        report = self.worker.take_report()
        if report is not None:
            self.in_step |= set(report.in_step)
            self.errors |= set(report.errors)

    def wait(self, ended: Callable[[], bool]) -> None:
        def looks() -> bool:
            self.look()
            return ended()

        wait_for(looks, "the load is over")

    def filled(self, first: int) -> bool:
        return all(bool((cache[first : first + PAGES] == STORED).all()) for cache in self.caches.values())

    def untouched(self, first: int) -> bool:
        return all(not bool(cache[first : first + PAGES].any()) for cache in self.caches.values())


@pytest.fixture
def engine(
    node: Node, layerwise: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    engine = Engine(node, f"{NAME}/{request.node.name}", layerwise=layerwise)
    monkeypatch.setattr("ems.vllm.loads.LOAD_SECONDS", 0.2)
    yield engine
    engine.worker.close()
    engine.client.close()


@pytest.fixture
def before_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """Nothing is being copied while this hangs."""
    hang = Hang()
    plan = BlockRows.plan_many

    def hangs(self: BlockRows, *arguments: Any, **options: Any) -> CopyPlan:
        hang()
        return plan(self, *arguments, **options)

    monkeypatch.setattr(BlockRows, "plan_many", hangs)
    yield hang
    hang.end()
    assert not hang.in_vain


@pytest.fixture
def in_a_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """A copy that has begun hangs, and writes once it goes on."""
    hang = Hang()
    copy = CpuDevice.copy

    def hangs(*arguments: Any) -> None:
        hang()
        copy(*arguments)

    monkeypatch.setattr(CpuDevice, "copy", hangs)
    yield hang
    hang.end()
    assert not hang.in_vain


def test_a_load_between_steps_that_does_not_go_on_is_computed(engine: Engine, before_copies: Hang) -> None:
    before_copies.begin()
    engine.step(loads=[engine.load("hangs", 4), engine.load("behind", 8)])
    assert before_copies.reached.wait(60)
    engine.wait(lambda: engine.loaded == {"hangs", "behind"})
    assert engine.invalid == {4, 5, 6, 8, 9, 10}
    assert "PoolTimeout" in engine.errors, "the health gate closes"

    engine.step(loads=[engine.load("refused", 12)])
    engine.look()
    assert "refused" in engine.loaded, "nothing waits behind what hangs"

    before_copies.end()
    # The blocks belong to somebody else by now.
    engine.wait(lambda: goes_on(engine, "after", 1))
    assert engine.filled(1)
    for first in (4, 8, 12):
        assert engine.untouched(first)


def goes_on(engine: Engine, request_id: str, first: int) -> bool:
    """Whether a new load into blocks from ``first`` on is made."""
    engine.invalid.clear()
    engine.loaded.clear()
    engine.step(loads=[engine.load(request_id, first)])
    engine.wait(lambda: engine.loaded == {request_id})
    return not engine.invalid


@pytest.mark.parametrize("layerwise", [True], indirect=True, ids=["layer-by-layer"])
def test_a_step_does_not_end_with_a_load_that_does_not_go_on(engine: Engine, before_copies: Hang) -> None:
    before_copies.begin()
    engine.step(loads=[engine.load("hangs", 4, in_step=True)])
    engine.wait(lambda: "hangs" in engine.in_step)
    assert engine.invalid == {4, 5, 6}
    assert "PoolTimeout" in engine.errors

    before_copies.end()
    engine.wait(lambda: goes_on(engine, "after", 8))
    assert engine.filled(8)
    assert engine.untouched(4)


def test_blocks_into_which_a_copy_may_still_write_are_kept(engine: Engine, in_a_copy: Hang) -> None:
    in_a_copy.begin()
    engine.step(loads=[engine.load("hangs", 4), engine.load("behind", 8)])
    assert in_a_copy.reached.wait(60)
    engine.wait(lambda: engine.loaded == {"behind"})
    assert engine.invalid == {8, 9, 10}
    for _ in range(20):
        engine.look()
    assert engine.loaded == {"behind"}

    in_a_copy.end()
    engine.wait(lambda: engine.loaded == {"hangs", "behind"})
    assert engine.invalid == {8, 9, 10}
    assert engine.filled(4)
    assert engine.untouched(8)


@pytest.mark.parametrize("layerwise", [True], indirect=True, ids=["layer-by-layer"])
def test_a_step_waits_for_a_copy_that_has_begun(
    engine: Engine, in_a_copy: Hang, caplog: pytest.LogCaptureFixture
) -> None:
    in_a_copy.begin()
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(engine.step, loads=[engine.load("hangs", 4, in_step=True)])
        assert in_a_copy.reached.wait(60)
        wait_for(lambda: "gives up a load that a step waits for" in caplog.text, "the step has waited long enough")
        assert not step.done()
        in_a_copy.end()
        step.result(60)
    engine.wait(lambda: "hangs" in engine.in_step)
    # Either came first: that the step gave up, or that the load went on.
    assert engine.invalid or engine.filled(4)
    before = [cache.clone() for cache in engine.caches.values()]
    engine.wait(lambda: goes_on(engine, "after", 8))
    for cache, then in zip(engine.caches.values(), before, strict=True):
        assert torch.equal(cache[4:7], then[4:7]), "nothing was copied afterwards"
