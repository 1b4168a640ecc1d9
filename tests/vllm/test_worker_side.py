"""The worker side with a real node: what a load that fails within a step does to what the step saves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext

import msgspec
import pytest
import torch

from ems.errors import ConfigError
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.pool.layout import REF_BYTES
from ems.transfers.checksums import PageSums
from ems.transfers.device import CpuDevice
from ems.transfers.plan import CopyPlan
from ems.vllm.configuration.settings import read_settings
from ems.vllm.loads import Loader, LoadJob
from ems.vllm.metadata import QUIET, StepMetadata, StepReport
from ems.vllm.model import BlockModel, LocalPlane
from ems.vllm.planes import Plane, Portion
from ems.vllm.reporting.stats import EmsStats
from ems.vllm.requests import Load, LoadPart, Save
from ems.vllm.worker import WorkerSide
from tests.e2e.engines import Node, running_node, wait_for

BLOCK = 4
NAME = "default/model/layout"
LAYERS = ("layers.0", "layers.1")


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "8MB") as running:
        yield running


@pytest.fixture
def window() -> int:
    return 0


@pytest.fixture
def layerwise() -> bool:
    return False


@pytest.fixture
def worker(node: Node, window: int, layerwise: bool) -> Iterator[WorkerSide]:
    said = {"socket": str(node.socket), "autostart": False, "load_async": False, "use_layerwise": layerwise}
    settings, _ = read_settings("kv_both", said, {})
    plane = Plane(NAME, window=window)
    side = WorkerSide(
        settings, BlockModel(NAME, BLOCK, 16, 1, (plane,)), [LocalPlane(0, plane, LAYERS, Portion(), (2, 2))]
    )
    side.register({name: torch.zeros((16, 2, BLOCK, 16), dtype=torch.bfloat16) for name in LAYERS})
    yield side
    side.close()


def run(worker: WorkerSide, step: StepMetadata, *, drafts: bool) -> None:
    """The hooks of a step in vLLM's order; with ``drafts`` to compute it asks for results before that."""
    worker.begin(step)
    worker.start_loads()
    if drafts:
        worker.results()
    worker.computed()
    worker.end()
    if not drafts:
        worker.results()


@pytest.mark.parametrize("on_error", ["refuse", "serve_without"])
def test_a_second_engine_of_the_process_is_refused(worker: WorkerSide, on_error: str) -> None:
    """vLLM hands it the connector of the first, which would load and store the tensors of whoever registered last."""
    worker._settings = msgspec.structs.replace(worker._settings, on_error=on_error)
    before = worker._rows
    with pytest.raises(ConfigError, match="this process has an engine with EMS already"):
        worker.register({name: torch.zeros((16, 2, BLOCK, 16), dtype=torch.bfloat16) for name in LAYERS})
    assert worker._rows is before


@pytest.mark.parametrize("drafts", [False, True], ids=["without-drafts", "with-drafts"])
@pytest.mark.parametrize("fails", [True, False], ids=["a-load-fails", "nothing-is-loaded"])
def test_what_is_computed_behind_blocks_that_hold_nothing_is_not_stored(
    node: Node, worker: WorkerSide, fails: bool, drafts: bool
) -> None:
    chain = KeyChain(NAME, BLOCK)
    chain.extend(list(range(4 * BLOCK)))
    gone = LoadPart(0, [1, 2], chain.packed(0, 2), bytes(2 * REF_BYTES))
    loads = [Load("r", "a-node-that-is-gone", [gone], in_step=True)] if fails else []
    save = Save(1, "r", 2, chain.parent(2), chain.tails(2, 4), [[3, 4]])
    run(worker, StepMetadata(loads=loads, saves=[save]), drafts=drafts)

    assert worker.take_invalid_blocks() == ({1, 2} if fails else set())
    ended: list[int] = []

    def over() -> bool:
        """A save may be given up before its pages are reserved, which the node never hears of then."""
        worker.begin(QUIET)
        worker.computed()
        worker.results()
        report = worker.take_report()
        ended.extend(report.saved if report else ())
        return ended == [1] and (fails or node.counters["pages_committed"] == 2)

    wait_for(over, "the save is over")
    client = PoolClient(node.socket, "test")
    assert client.lookup(Namespace(NAME, 0), chain.packed(2, 4)).count == (0 if fails else 2)
    client.close()


def test_a_step_that_nobody_ended_was_computed_when_the_next_begins(node: Node, worker: WorkerSide) -> None:
    """With drafts vLLM tells only the last stage of a pipeline."""
    chain = KeyChain(NAME, BLOCK)
    chain.extend(list(range(2 * BLOCK)))
    worker.begin(StepMetadata(saves=[Save(1, "r", 0, chain.parent(0), chain.tails(0, 2), [[3, 4]])]))
    worker.begin(StepMetadata())
    wait_for(lambda: node.counters["pages_committed"] == 2, "the pages are stored")
    worker.end()


def test_saves_whose_blocks_went_back_end_before_the_engine_clears_these(node: Node, worker: WorkerSide) -> None:
    chain = KeyChain(NAME, BLOCK)
    chain.extend(list(range(2 * BLOCK)))
    worker.begin(StepMetadata(saves=[Save(1, "r", 0, chain.parent(0), chain.tails(0, 2), [[3, 4]])]))
    wait_for(lambda: node.stats()["reservations"] == 1, "the pages are reserved")
    worker.call_off(StepMetadata(call_off=True))  # vLLM calls this before it does anything else of a step
    worker.begin(StepMetadata(call_off=True))
    worker.computed()
    wait_for(lambda: node.stats()["reservations"] == 0, "they are given back")
    assert node.counters["pages_committed"] == 0


def test_a_save_leaves_the_processor_to_the_output_of_its_step(
    node: Node, worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied at once it made the first token of a prompt 2 ms later on a host whose cores the engine keeps busy."""
    monkeypatch.setattr("ems.vllm.saves.OUTPUT_SECONDS", 60.0)
    waits = threading.Event()

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    chain = KeyChain(NAME, BLOCK)
    chain.extend(list(range(2 * BLOCK)))
    worker.begin(StepMetadata(saves=[Save(1, "r", 0, chain.parent(0), chain.tails(0, 2), [[3, 4]])]))
    assert worker._batch is not None
    worker._batch.next_step = Noted()
    worker.computed()
    worker.end()
    assert waits.wait(20), "the save waits for the next step"
    assert node.counters["pages_committed"] == 0
    worker.begin(QUIET)
    wait_for(lambda: node.counters["pages_committed"] == 2, "the pages are stored")
    worker.end()

    worker.begin(StepMetadata(saves=[Save(2, "s", 0, chain.parent(0), chain.tails(0, 2), [[5, 6]])]))
    worker.computed()
    worker.end()
    saver = worker._saver
    assert saver is not None
    over: list[int] = []

    def ended() -> bool:
        over.extend(saver.take_over())
        return 2 in over

    wait_for(ended, "what is there already does not wait to be copied")


def test_what_ended_is_told_in_a_quiet_step_and_once(worker: WorkerSide) -> None:
    chain = KeyChain(NAME, BLOCK)
    chain.extend(list(range(2 * BLOCK)))
    begin = time.perf_counter()
    worker.begin(StepMetadata(saves=[Save(1, "r", 0, chain.parent(0), chain.tails(0, 2), [[3, 4]])]))
    assert not worker.has_results
    worker.computed()
    worker.end()
    reports: list[StepReport] = []
    figures: list[EmsStats] = []

    def told() -> bool:
        worker.begin(QUIET)
        worker.computed()
        if worker.has_results:
            assert worker.results() == (set(), set())
            figures.extend(filter(None, [worker.take_stats()]))
            reports.extend(filter(None, [worker.take_report()]))
        return bool(reports) and bool(reports[-1].transfers)

    wait_for(told, "the save has ended")
    assert [number for report in reports for number in report.saved] == [1], "its blocks are free before it is stored"
    transfers = reports[-1].transfers
    assert [one.blocks for one in transfers] == [2]
    assert 0 < transfers[0].seconds < time.perf_counter() - begin
    assert sum(len(stats.data["transfers"]) for stats in figures) == 1
    assert not worker.has_results
    assert (worker.take_stats(), worker.take_report()) == (None, None)


def test_a_load_that_its_step_waits_for_is_over_before_the_step_computes(
    node: Node, worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[CopyPlan] = []
    copy = CpuDevice.copy

    def noted(device: CpuDevice, plan: CopyPlan, sums: PageSums | None = None) -> None:
        copy(device, plan, sums)
        copies.append(plan)

    monkeypatch.setattr(CpuDevice, "copy", noted)
    chain = KeyChain(NAME, BLOCK)
    chain.extend(list(range(2 * BLOCK)))
    worker.begin(StepMetadata(saves=[Save(1, "r", 0, chain.parent(0), chain.tails(0, 2), [[3, 4]])]))
    worker.computed()
    wait_for(lambda: node.counters["pages_committed"] == 2, "the pages are stored")
    client = PoolClient(node.socket, "test")
    lease = client.lookup(Namespace(NAME, 0), chain.packed(0, 2), lease=True).lease
    assert lease is not None
    part = LoadPart(0, [1, 2], chain.packed(0, 2), lease.packed_refs)
    copies.clear()
    worker.begin(StepMetadata(loads=[Load("s", lease.node, [part], in_step=True)]))
    assert len(copies) == 1
    worker.computed()
    assert worker.results() == (set(), set())
    report = worker.take_report()
    assert report is not None
    assert report.in_step == {"s": 1}
    assert worker.take_invalid_blocks() == set()
    client.close()


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layer-by-layer"])
def test_layers_are_stopped_at_only_where_a_step_has_work_in_them(worker: WorkerSide, layerwise: bool) -> None:
    chain = KeyChain(NAME, BLOCK)
    chain.extend(list(range(2 * BLOCK)))
    asked = []
    for step in (
        StepMetadata(),
        StepMetadata(saves=[Save(1, "r", 0, chain.parent(0), chain.tails(0, 2), [[3, 4]])]),
        StepMetadata(loads=[Load("r", "a-node-that-is-gone", [], in_step=True)]),
        StepMetadata(loads=[Load("r", "a-node-that-is-gone", [])]),
    ):
        worker.begin(step)
        worker.start_loads()
        asked.append(worker.in_layers)
        worker.computed()
        worker.end()

    assert asked == [False, layerwise, layerwise, False]
    assert not worker.in_layers


@pytest.mark.parametrize("window", [0, 8])
def test_behind_a_window_a_load_fails_whole(worker: WorkerSide, window: int) -> None:
    """What comes before the block that is missing is not there either: the engine has dropped it."""
    chain = KeyChain(NAME, BLOCK)
    chain.extend(list(range(4 * BLOCK)))
    gone = LoadPart(0, [3, 4], chain.packed(2, 4), bytes(2 * REF_BYTES))
    worker.begin(StepMetadata(loads=[Load("r", "a-node-that-is-gone", [gone])]))
    whole: set[str] = set()
    blocks: set[int] = set()

    def ended() -> bool:
        whole.update(worker.results()[1])
        blocks.update(worker.take_invalid_blocks())
        return bool(whole or blocks)

    wait_for(ended, "the load has failed")
    assert (whole, blocks) == (({"r"}, set()) if window else (set(), {3, 4}))
    worker.end()


def test_a_step_waits_for_a_load_only_if_it_has_nothing_to_compute(
    worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = threading.Event()

    def load(_loader: Loader, _job: LoadJob) -> dict[int, set[int]]:
        assert loaded.wait(60)
        return {}

    monkeypatch.setattr(Loader, "_load", load)
    monkeypatch.setattr("ems.vllm.worker.IDLE_SECONDS", 60.0)
    worker.begin(StepMetadata(idle=True))
    assert worker.results()[0] == set(), "there is no load to wait for"
    worker.end()
    worker.begin(StepMetadata(loads=[Load("r", "node", [])]))
    assert worker.results()[0] == set(), "what is computed does not wait"
    worker.end()
    worker.begin(StepMetadata(idle=True))
    threading.Timer(0.05, loaded.set).start()
    assert worker.results()[0] == {"r"}
    worker.end()


@pytest.mark.parametrize("on_error", ["refuse", "serve_without"])
def test_ranks_on_several_hosts_are_refused_or_load_nothing(node: Node, on_error: str) -> None:
    settings, _ = read_settings("kv_both", {"socket": str(node.socket), "autostart": False, "on_error": on_error}, {})
    plane = Plane(NAME)
    model, planes = BlockModel(NAME, BLOCK, 16, 1, (plane,)), [LocalPlane(0, plane, LAYERS, Portion(), (2, 2))]
    side = WorkerSide(settings, model, planes, hosts=2)
    with pytest.raises(ConfigError, match="ranks run on 2 hosts") if on_error == "refuse" else nullcontext():
        side.register({name: torch.zeros((16, 2, BLOCK, 16), dtype=torch.bfloat16) for name in LAYERS})
        side.begin(StepMetadata(loads=[Load("r", "node", [LoadPart(0, [3], bytes(16), bytes(REF_BYTES))])]))
        side.start_loads()
        loader = side._loader
        assert loader is not None
        wait_for(lambda: loader.news, "the load ends")
        assert side.results() == ({"r"}, set())
        assert side.take_invalid_blocks() == {3}
    side.close()


@pytest.mark.parametrize(("below", "said"), [("", True), ("mooncake:", False)])
def test_an_engine_that_expects_a_cluster_is_told_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, below: str, said: bool
) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:9")
    caplog.set_level("WARNING", "vllm.ems.worker")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with running_node("--size", "8MB", *(("--tier", below) if below else ())) as node:
        extra = {"socket": str(node.socket), "autostart": False, "backend": "mooncake"}
        plane = Plane(NAME)
        local = LocalPlane(0, plane, LAYERS, Portion(), (2, 2))
        settings = read_settings("kv_both", extra, {})[0]
        side = WorkerSide(settings, BlockModel(NAME, BLOCK, 16, 1, (plane,)), [local])
        side.register({name: torch.zeros((16, 2, BLOCK, 16), dtype=torch.bfloat16) for name in LAYERS})
        side.close()
    assert (f"backend is 'mooncake', but the node on {node.socket} has no cluster below it" in caplog.text) is said
