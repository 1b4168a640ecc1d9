"""What a release of vLLM lacks is replaced or refused: names, a layer's state, the order of a step's hooks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ems.errors import ConfigError
from ems.pool.keys import KeyChain
from ems.vllm import compat
from ems.vllm.configuration.settings import read_settings
from ems.vllm.metadata import StepMetadata
from ems.vllm.model import BlockModel, LocalPlane
from ems.vllm.planes import Plane, Portion
from ems.vllm.requests import Save
from ems.vllm.worker import WorkerSide
from tests.e2e.engines import Node, running_node, wait_for

BLOCKS, TOKENS = 8, 4
NAME = "default/model/layout"


@pytest.mark.parametrize("version", ["0.23.0", "0.28.0", "0.30.1", "0.32.0", "0.32.1.dev3+gabc", "dev"])
def test_releases_that_are_tested_and_builds_without_a_number_pass(version: str) -> None:
    assert compat.untested_release(version) is None


@pytest.mark.parametrize("version", ["0.22.1", "0.18.0", "0.34.0", "1.0.0"])
def test_another_release_is_named_in_a_warning(version: str) -> None:
    warning = compat.untested_release(version)

    assert warning == f"this is vLLM {version}, and EMS was tested with 0.23 to 0.32"


def test_of_a_release_without_a_cpu_build_it_is_said_what_was_tested() -> None:
    warning = compat.untested_release("0.33.0")

    tested = "EMS was tested with 0.23 to 0.32, and with this one's Python code over the kernels of 0.32"
    assert warning == f"this is vLLM 0.33.0, and {tested}"


def test_a_configuration_says_which_runner_computes_and_where_it_does_not_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "envs", SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=True))
    assert compat.runs_on_v2(SimpleNamespace())
    assert compat.runs_on_v2(SimpleNamespace(use_v2_model_runner=True))
    assert not compat.runs_on_v2(SimpleNamespace(use_v2_model_runner=False))
    monkeypatch.setattr(compat, "envs", SimpleNamespace())
    assert not compat.runs_on_v2(SimpleNamespace())


def test_several_groups_need_a_release_that_can_be_told_of_failed_requests() -> None:
    compat.check_failures(1, False, reports=False)
    compat.check_failures(3, False, reports=True)
    with pytest.raises(ConfigError, match=r"has 3 KV cache groups.* --disable-hybrid-kv-cache-manager$"):
        compat.check_failures(3, False, reports=False)


def test_windows_need_a_release_that_can_be_told_of_failed_requests() -> None:
    compat.check_failures(1, False, reports=False)
    compat.check_failures(1, True, reports=True)
    with pytest.raises(ConfigError, match=r"has a sliding window.*; take vLLM 0.30 or later$"):
        compat.check_failures(1, True, reports=False)


def test_results_have_the_fields_that_the_engine_reads() -> None:
    for kind in (compat.KVConnectorTransferResults, compat._TransferResults):
        results = kind(finished_sending={"a"}, finished_recving={"b", "c"}, failed_recving={"c"})
        assert (results.finished_sending, results.finished_recving, results.failed_recving) == (
            {"a"},
            {"b", "c"},
            {"c"},
        )


def test_what_else_names_blocks_is_told_without_tags() -> None:
    tagged = hasattr(kv_cache_utils, "to_event_extra_keys")
    salt: tuple[object, ...] = (("salt", "s"),) if tagged else ("s",)

    assert compat.event_extra_keys([salt, None]) == [("s",), None]
    assert compat.event_extra_keys([None, None]) is None


def test_a_hash_stands_for_a_block_unless_the_engine_says_otherwise() -> None:
    assert compat.hash_tokens(SimpleNamespace(hash_block_size=16), 64) == 16
    assert compat.hash_tokens(SimpleNamespace(hash_block_size=None), 64) == 64
    assert compat.hash_tokens(SimpleNamespace(), 64) == 64


def test_failed_receives_of_an_output_with_and_without_them() -> None:
    assert compat.failed_receives(SimpleNamespace(failed_recving={"a"})) == {"a"}
    assert compat.failed_receives(SimpleNamespace()) == set()


@pytest.mark.parametrize(
    ("nodes", "together", "hosts"),
    [(None, [], 1), (1, [], 1), (2, [[True], [True, True]], 1), (2, [[True, False], [True]], 2)],
    ids=["no ranks yet", "one host", "data-parallel ranks elsewhere", "ranks elsewhere"],
)
def test_ranks_of_an_engine_say_on_how_many_hosts_they_run(
    monkeypatch: pytest.MonkeyPatch, nodes: int | None, together: list[list[bool]], hosts: int
) -> None:
    """The configuration does not say it where Ray starts them."""
    monkeypatch.setattr(parallel_state, "_NODE_COUNT", nodes)
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(cpu_group=0))
    monkeypatch.setattr(parallel_state, "_PP", SimpleNamespace(cpu_group=1))
    monkeypatch.setattr(parallel_state, "in_the_same_node_as", lambda group: together[group])
    assert compat.hosts_of_ranks() == hosts


@pytest.mark.parametrize(
    ("overlap", "stages", "may"), [(False, 1, True), (True, 1, False), (False, 2, False)], ids=["no", "async", "stages"]
)
def test_loads_are_part_of_a_step_only_where_the_next_begins_after_it_has_ended(
    overlap: bool, stages: int, may: bool
) -> None:
    """Where steps overlap vLLM takes the token that the next step computed behind a load that failed."""
    config = SimpleNamespace(
        use_v2_model_runner=False,
        scheduler_config=SimpleNamespace(async_scheduling=overlap),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )
    assert compat.may_load_in_step(config) is may


def test_what_a_step_under_way_may_still_write_is_not_computed() -> None:
    counts = {"num_computed_tokens": 10, "num_tokens": 9}
    assert compat.computed_tokens(SimpleNamespace(**counts, num_in_flight_tokens=0)) == 9
    assert compat.computed_tokens(SimpleNamespace(**counts, num_in_flight_tokens=3)) == 7


def test_a_release_that_does_not_count_tokens_in_flight_is_made_to() -> None:
    """As vLLM 0.23, which takes its own scheduler or another project's."""

    class Request:
        def __init__(self) -> None:
            self.num_computed_tokens, self.num_tokens = 0, 100

    class Scheduler:
        def __init__(self) -> None:
            self.requests = {"a": Request()}

        def _update_after_schedule(self, output: Any) -> None:
            for request_id, tokens in output.num_scheduled_tokens.items():
                self.requests[request_id].num_computed_tokens += tokens

        def update_from_output(self, output: Any, result: str) -> str:
            return result

    class AsyncScheduler(Scheduler):
        pass

    class InItsPlace(Scheduler):
        pass

    compat.count_tokens_in_flight(Request, InItsPlace)
    compat.count_tokens_in_flight(Request, InItsPlace)
    scheduler: Any = AsyncScheduler()
    steps = [SimpleNamespace(num_scheduled_tokens={"a": tokens}) for tokens in (60, 1, 1)]
    request = scheduler.requests["a"]
    for step in steps[:2]:
        scheduler._update_after_schedule(step)
    assert compat.computed_tokens(request) == 0
    assert scheduler.update_from_output(steps[0], "tokens") == "tokens"
    assert compat.computed_tokens(request) == 60
    scheduler._update_after_schedule(steps[2])
    scheduler.update_from_output(steps[1], "tokens")
    assert compat.computed_tokens(request) == 61
    scheduler.requests.clear()
    scheduler.update_from_output(steps[2], "tokens")


def test_a_release_that_counts_tokens_in_flight_is_left_alone() -> None:
    class Request:
        def __init__(self) -> None:
            self.num_in_flight_tokens = 0

    class Patched:
        """As vllm-ascend lets vLLM 0.23 count them."""

        def __init__(self) -> None: ...

    original = Patched.__init__

    @functools.wraps(original)
    def counted(self: Any) -> None:
        original(self)
        self.num_in_flight_tokens = 0

    Patched.__init__ = counted  # type: ignore[method-assign]
    for kind in (Request, Patched):
        compat.count_tokens_in_flight(kind, None)
        assert not hasattr(kind, "num_in_flight_tokens")


def test_a_spec_of_an_older_release_means_the_same() -> None:
    new = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    old = SimpleNamespace(block_size=16, num_kv_heads=2, head_size=8, page_size_bytes=new.page_size_bytes)

    for spec in (new, old):
        assert compat.num_heads(spec) == 2
        assert compat.state_content_size_bytes(spec) == 2 * 8 * 2
        assert compat.tokens_per_state(spec) == "1"
        assert compat.extra_retained_tokens(spec) == 0
    assert compat.kv_quant_mode(old) == "none"
    assert compat.tokens_per_state(SimpleNamespace(compress_ratio=4)) == "4"
    assert compat.extra_retained_tokens(SimpleNamespace(extra_retained_tokens=7)) == 7


def test_a_release_that_asks_nobody_makes_steps_while_something_is_saved() -> None:
    """As vLLM 0.23: otherwise the blocks of a request that has ended are held until the next one comes."""

    class Scheduler:
        saving = False

        def _update_after_schedule(self) -> None: ...

        def has_requests(self) -> bool:
            return False

    class InItsPlace(Scheduler):
        pass

    compat.keep_stepping(InItsPlace, lambda scheduler: scheduler.saving, base=SimpleNamespace(has_pending_push_work=0))
    scheduler = Scheduler()
    scheduler.saving = True
    assert not scheduler.has_requests(), "a later release asks by itself"
    compat.keep_stepping(InItsPlace, lambda scheduler: scheduler.saving, base=SimpleNamespace())
    assert scheduler.has_requests()
    assert not Scheduler().has_requests()


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "1MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 1 << 20, "the memory is touched")
        yield running


@pytest.fixture
def worker(node: Node) -> Iterator[WorkerSide]:
    settings, _ = read_settings("kv_both", {"socket": str(node.socket), "autostart": False})
    plane = Plane(NAME)
    side = WorkerSide(
        settings, BlockModel(NAME, TOKENS, BLOCKS, 1, (plane,)), [LocalPlane(0, plane, ("0",), Portion(), (2,))]
    )
    side.register({"0": torch.ones((BLOCKS, 2, TOKENS, 16), dtype=torch.bfloat16)})
    yield side
    side.close()


@pytest.mark.parametrize("release", ["0.30", "0.32", "0.33"])
def test_a_step_that_computes_nothing_saves_what_a_request_left(worker: WorkerSide, node: Node, release: str) -> None:
    """Until 0.30 the engine leaves out ``wait_for_save`` in such a step; from 0.33 on it may come after the results."""
    chain = KeyChain(NAME, TOKENS)
    chain.extend(list(range(2 * TOKENS)))
    worker.begin(StepMetadata(saves=[Save(1, "a", 0, chain.parent(0), chain.tails(0, 2), [[3, 5]])]))
    worker.start_loads()
    if release == "0.32":
        worker.computed()
        wait_for(lambda: node.counters["pages_committed"] == 2, "the blocks are stored")
    else:
        worker.results()
        assert worker.take_report() is None, "the blocks must be kept until they are copied"
        if release == "0.33":
            worker.computed()
    worker.end()

    saved: dict[int, int] = {}

    def told() -> bool:
        worker.begin(StepMetadata())
        worker.start_loads()
        worker.results()
        report = worker.take_report()
        saved.update(report.saved if report is not None else {})
        worker.end()
        return bool(saved)

    wait_for(told, "the engine hears that it may have the blocks")
    assert saved == {1: 1}
    wait_for(lambda: node.counters["pages_committed"] == 2, "the blocks are stored")


def test_memory_below_the_offloading_connector_needs_a_release_that_has_its_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.endswith("offload.config") else find(name)
    )
    for name in [name for name in sys.modules if name.startswith("ems.vllm.offloading")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"^EmsOffloadingSpec needs vLLM 0.32, .*; name EmsStoreConnector instead$"):
        importlib.import_module("ems.vllm.offloading")
