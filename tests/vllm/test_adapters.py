"""Pages of requests with a LoRA adapter are named by its weights, whatever it is called and wherever it lies."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine.core import EngineCore

from ems.errors import ConfigError
from ems.pool.keys import NO_PARENT, Tail
from ems.vllm.adapters import Adapters, files_digest, has_read, how_used, watch_loads
from ems.vllm.configuration.settings import read_settings
from ems.vllm.hooks import follow_engine
from ems.vllm.loads import Loader
from ems.vllm.metadata import StepMetadata
from ems.vllm.model import LocalPlane
from ems.vllm.planes import Plane, Portion
from ems.vllm.requests import Adapter, Load, Save
from ems.vllm.worker import WorkerSide
from tests.e2e.engines import Node, running_node, wait_for
from tests.vllm.scheduler_side import BLOCK, EXPLAIN, MODEL, TOKENS, Blocks, Side, request, step


def adapter(folder: Path, weights: bytes, name: str = "adapter_model.safetensors", rank: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(weights)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return folder


def lora(path: Path, number: int = 1, name: str = "a", *, in_place: bool = False) -> LoRARequest:
    return LoRARequest(name, number, str(path), load_inplace=in_place)


# Files


def test_the_same_bytes_in_two_folders_are_the_same_adapter(tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "one", b"1" * 100), adapter(tmp_path / "other", b"1" * 100)
    os.utime(other / "adapter_model.safetensors", (1_700_000_000, 1_700_000_000))
    assert files_digest(str(one)) == files_digest(str(other))


def test_one_changed_byte_or_setting_is_another_adapter(tmp_path: Path) -> None:
    folders = [
        adapter(tmp_path / "one", b"1" * 100),
        adapter(tmp_path / "two", b"1" * 50 + b"2" + b"1" * 49),
        adapter(tmp_path / "three", b"1" * 100, rank=16),
        adapter(tmp_path / "four", b"1" * 100, "adapter_model.bin"),
    ]
    assert len({files_digest(str(folder)) for folder in folders}) == 4


def test_what_a_training_left_beside_the_weights_does_not_count(tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "one", b"1" * 100), adapter(tmp_path / "other", b"1" * 100)
    (other / "optimizer.pt").write_bytes(b"state")
    (other / "adapter_model.bin").write_bytes(b"the engine reads the other file")
    assert files_digest(str(one)) == files_digest(str(other))


def test_weights_that_are_replaced_in_place_are_noticed(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "one", b"1" * 100)
    before = files_digest(str(folder))
    adapter(tmp_path / "next", b"2" * 100)
    (tmp_path / "next" / "adapter_model.safetensors").replace(folder / "adapter_model.safetensors")
    assert files_digest(str(folder)) != before


@pytest.mark.parametrize("path", ["/nowhere", "somebody/an-adapter", "s3://bucket/adapter"])
def test_an_adapter_that_is_not_on_this_machine_has_no_name(path: str) -> None:
    with pytest.raises(ConfigError, match="not in files on this machine"):
        files_digest(path)


def test_a_folder_without_weights_has_no_name(tmp_path: Path) -> None:
    (adapter(tmp_path / "one", b"1") / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="not in files on this machine"):
        files_digest(str(tmp_path / "one"))


# What the engine has loaded


@pytest.fixture
def adapters() -> Adapters:
    return Adapters("bfloat16")


def test_name_path_and_number_do_not_count(adapters: Adapters, tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "one", b"1" * 100), adapter(tmp_path / "other", b"1" * 100)
    first, second = lora(one, 1, "a"), lora(other, 7, "b")
    assert adapters.key(first, adapters.find(first)) == adapters.key(second, adapters.find(second))


def test_what_the_engine_makes_of_an_adapter_counts(adapters: Adapters, tmp_path: Path) -> None:
    one = lora(adapter(tmp_path / "one", b"1" * 100))
    assert adapters.key(one, adapters.find(one)) != Adapters("float16").key(one, adapters.find(one))
    config = SimpleNamespace(lora_dtype="float16", target_modules=["q_proj"])
    assert how_used(config) != how_used(SimpleNamespace(lora_dtype="float16", target_modules=None))


def test_two_adapters_under_one_name_differ(adapters: Adapters, tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "one", b"1" * 100), adapter(tmp_path / "other", b"2" * 100)
    assert adapters.find(lora(one, 1)).digest != adapters.find(lora(other, 2)).digest


def test_files_that_change_without_a_load_do_not_count(adapters: Adapters, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "one", b"1" * 100)
    before = adapters.find(lora(folder))
    adapter(folder, b"2" * 101)
    assert adapters.find(lora(folder)) == before


def test_an_adapter_from_a_new_path_has_its_own_name(adapters: Adapters, tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "one", b"1" * 100), adapter(tmp_path / "other", b"2" * 100)
    before = adapters.find(lora(one))
    assert adapters.loaded(lora(other, in_place=True))
    assert adapters.find(lora(other)) not in (None, before)
    with pytest.raises(ConfigError, match="was loaded from"):
        adapters.find(lora(one))


def test_an_adapter_that_changed_in_its_place_is_not_stored_until_the_cache_is_empty(
    adapters: Adapters, tmp_path: Path
) -> None:
    folder = adapter(tmp_path / "one", b"1" * 100)
    before = adapters.find(lora(folder))
    adapter(folder, b"2" * 101)
    assert adapters.loaded(lora(folder, in_place=True))
    with pytest.raises(ConfigError, match="reset the prefix cache"):
        adapters.find(lora(folder))
    adapters.emptied([])
    assert adapters.find(lora(folder)).digest != before.digest


def test_a_request_that_outlives_a_reset_keeps_its_name_taken(adapters: Adapters, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "one", b"1" * 100)
    adapters.find(lora(folder))
    adapters.emptied([lora(folder)])
    adapter(folder, b"2" * 101)
    adapters.loaded(lora(folder))
    with pytest.raises(ConfigError, match="reset the prefix cache"):
        adapters.find(lora(folder))


def test_weights_that_changed_there_and_back_leave_blocks_of_both(adapters: Adapters, tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "one", b"1" * 100), adapter(tmp_path / "other", b"2" * 100)
    adapters.find(lora(one))
    assert adapters.loaded(lora(other, in_place=True))
    adapters.mixed(lora(one))
    adapters.loaded(lora(one, in_place=True))
    with pytest.raises(ConfigError, match="reset the prefix cache"):
        adapters.find(lora(one))


def test_loading_the_same_weights_again_changes_nothing(adapters: Adapters, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "one", b"1" * 100)
    before = adapters.find(lora(folder))
    assert not adapters.loaded(lora(folder, in_place=True))
    assert adapters.find(lora(folder)) == before


# The scheduler side


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node("--size", "8MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 8 << 20, "the memory is touched")
        yield running


@pytest.fixture
def make(node: Node) -> Iterator[Callable[[Adapters | None], Side]]:
    made: list[Side] = []

    def side(adapters: Adapters | None) -> Side:
        settings, _ = read_settings("kv_both", {"socket": str(node.socket), "autostart": False}, {})
        made.append(Side(settings, MODEL, adapters=adapters))
        return made[-1]

    yield side
    for each in made:
        each.close()


def names(side: Side, request_id: str, adapter: LoRARequest | None) -> bytes:
    """The keys under which a request's prompt is stored."""
    (save,) = side.compute(request(request_id, lora=adapter)).saves
    return b"".join(tail.key for tail in save.tails)


def test_keys_follow_the_weights(make: Callable[[Adapters | None], Side], tmp_path: Path) -> None:
    one, copy = adapter(tmp_path / "one", b"1" * 100), adapter(tmp_path / "copy", b"1" * 100)
    other = adapter(tmp_path / "other", b"2" * 100)
    side, instance = make(Adapters("")), make(Adapters(""))
    bare, first = names(side, "bare", None), names(side, "first", lora(one, 1))
    assert names(side, "other", lora(other, 2)) not in (bare, first)
    assert first != bare
    assert names(instance, "same", lora(copy, 5, "b")) == first


def test_a_request_is_saved_with_what_its_worker_has_to_check(
    make: Callable[[Adapters | None], Side], tmp_path: Path
) -> None:
    folder, side = adapter(tmp_path / "one", b"1" * 100), make(Adapters(""))
    sent = pickle.loads(pickle.dumps(side.compute(request("r", lora=lora(folder, 3)))))  # noqa: S301 - of our own
    assert sent.saves[0].adapter == Adapter(3, files_digest(str(folder)))


@pytest.mark.parametrize("known", [True, False], ids=["no files", "a release that hides what it reads"])
def test_an_adapter_that_nobody_can_identify_stays_out(make: Callable[[Adapters | None], Side], known: bool) -> None:
    side = make(Adapters("") if known else None)
    one = request("r", params=EXPLAIN, lora=lora(Path("/nowhere")))
    assert not side.compute(one).saves
    assert side.match(one, 0) == (0, False)
    assert side.end(one)["reason"] == "adapter"


def test_requests_under_way_are_not_stored_once_their_adapter_changed(
    make: Callable[[Adapters | None], Side], tmp_path: Path
) -> None:
    folder, side = adapter(tmp_path / "one", b"1" * 100), make(Adapters(""))
    one, fresh = request("r", lora=lora(folder)), request("fresh", params=EXPLAIN, lora=lora(folder))
    side.on_new_request(one)
    side.found(one)
    side.allocated(one, Blocks([1, 2, 3, 4]), 0)
    adapter(folder, b"2" * 101)
    side.adapter_loaded(lora(folder, in_place=True))
    side.on_new_request(fresh)
    assert not side.build_metadata(step(one, len(TOKENS))).saves
    assert side.finished(one, ([1, 2, 3, 4],)) == (False, None)
    assert side.match(fresh, 0) == (0, False)
    assert side.end(fresh)["reason"] == "adapter"


def test_an_emptied_cache_lets_a_changed_adapter_in_again(
    make: Callable[[Adapters | None], Side], tmp_path: Path
) -> None:
    folder, side = adapter(tmp_path / "one", b"1" * 100), make(Adapters(""))
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=BLOCK)
    side.bind(pool)
    before = names(side, "r", lora(folder))
    side.finished(request("r"), ([],))
    adapter(folder, b"2" * 101)
    side.adapter_loaded(lora(folder, in_place=True))
    assert pool.reset_prefix_cache()
    assert names(side, "fresh", lora(folder)) != before


def test_the_engine_tells_of_adapters_that_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    follow_engine()
    told: list[Any] = []
    ours = SimpleNamespace(weights_declared=None, adapter_loaded=told.append)
    executor = SimpleNamespace(add_lora=lambda _lora: True)
    core = SimpleNamespace(scheduler=SimpleNamespace(connector=ours), model_executor=executor)
    assert EngineCore.add_lora(core, lora(Path("/a")))
    assert told == [lora(Path("/a"))]


# The worker


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> WorkerLoRAManager:
    """One of vLLM's that reads nothing."""
    for name in ("_load_adapter", "_ems_watched"):
        if hasattr(WorkerLoRAManager, name):
            monkeypatch.delattr(WorkerLoRAManager, name)
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda _self, _lora: "weights", raising=False)
    monkeypatch.setattr("ems.vllm.adapters._managers", WeakKeyDictionary())
    assert watch_loads()
    return object.__new__(WorkerLoRAManager)


def test_a_worker_knows_what_it_has_read(manager: WorkerLoRAManager, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "one", b"1" * 100)
    named = Adapter(1, files_digest(str(folder)))
    assert (has_read(named, before=True), has_read(named, before=False)) == (True, False)
    manager._load_adapter(lora(folder))
    assert has_read(named, before=False)
    # VLLM made room for others and read it again.
    adapter(folder, b"2" * 101)
    manager._load_adapter(lora(folder))
    assert not has_read(named, before=True)
    assert has_read(Adapter(1, files_digest(str(folder))), before=False)


def test_files_that_change_while_they_are_read_have_no_name(
    manager: WorkerLoRAManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(tmp_path / "one", b"1" * 100)
    monkeypatch.delattr(WorkerLoRAManager, "_ems_watched")
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda _self, _lora: adapter(folder, b"2" * 101))
    watch_loads()
    manager._load_adapter(lora(folder))
    assert not has_read(Adapter(1, files_digest(str(folder))), before=True)


def test_engines_of_one_process_that_disagree_store_nothing(manager: WorkerLoRAManager, tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "one", b"1" * 100), adapter(tmp_path / "other", b"2" * 100)
    second: WorkerLoRAManager = object.__new__(WorkerLoRAManager)
    manager._load_adapter(lora(one))
    second._load_adapter(lora(other))
    assert not has_read(Adapter(1, files_digest(str(one))), before=True)


@pytest.mark.parametrize("changed", [False, True])
def test_pages_that_other_weights_computed_are_neither_stored_nor_loaded(
    manager: WorkerLoRAManager, node: Node, tmp_path: Path, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files changed, and vLLM read them again in a step, to compute the request that is saved."""
    folder = adapter(tmp_path / "one", b"1" * 100)
    named = Adapter(1, files_digest(str(folder)))
    if changed:
        adapter(folder, b"2" * 101)
    manager._load_adapter(lora(folder))
    loads: list[Load] = []
    monkeypatch.setattr(Loader, "start", lambda _self, load, _mark, **_more: loads.append(load))
    settings, _ = read_settings("kv_both", {"socket": str(node.socket), "autostart": False}, {})
    plane = LocalPlane(0, Plane(f"default/adapters/{changed}"), ("layers.0",), Portion(), (2,))
    worker = WorkerSide(settings, MODEL, [plane])
    worker.register({"layers.0": torch.zeros((MODEL.num_blocks, 2, BLOCK, 16), dtype=torch.bfloat16)})
    stored = node.counters["pages_committed"]
    load = Load("s", "node", [], adapter=named)
    worker.begin(StepMetadata([load], [Save(1, "r", 0, NO_PARENT, [Tail(bytes(16), b"k" * 4)], [[1]], adapter=named)]))
    worker.start_loads()
    worker.computed()

    def ended() -> bool:
        worker.results()
        report = worker.take_report()
        return report is not None and 1 in report.saved

    wait_for(ended, "the save has ended")
    assert [load.broken for load in loads] == [changed]
    assert node.counters["pages_committed"] - stored == (not changed)
    worker.close()
