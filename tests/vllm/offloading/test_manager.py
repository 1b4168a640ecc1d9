"""What vLLM's scheduler is told of chunks, on a real node: found without waiting, leased while it is of use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, cut
from ems.pool.layout import REF_BYTES
from ems.vllm.configuration.settings import ConnectorSettings, read_settings
from ems.vllm.offloading.manager import MOST_WAITING, EmsOffloadingManager
from ems.vllm.offloading.search import Group
from tests.e2e.engines import PATIENT, Node, running_node, wait_for

PAGE = 512
TOKENS = 64
STEP = ScheduleEndContext((), ())


def chunk_keys(name: str, count: int) -> list[OffloadKey]:
    return [make_offload_key(b"%s %d" % (name.encode(), number), 0) for number in range(count)]


def context_of(request_id: str, keys: list[OffloadKey]) -> ReqContext:
    context = ReqContext(request_id)
    for number, key in enumerate(keys):
        context.set_offload_key_position(key, (number + 1) * TOKENS)
    return context


def settings_of(node: Node, role: str = "kv_both", **extra: object) -> ConnectorSettings:
    settings, warnings = read_settings(role, {"socket": str(node.socket), "autostart": False, **PATIENT, **extra}, {})
    assert not warnings
    return settings


def manager_of(settings: ConnectorSettings) -> EmsOffloadingManager:
    return EmsOffloadingManager(settings, "t/m/f", [Group(0, TOKENS)], [[Namespace("t/m/f/0.0", 0)]])


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "4MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 4 << 20, "the memory is touched")
        yield running


@pytest.fixture
def manager(node: Node) -> Iterator[EmsOffloadingManager]:
    one = manager_of(settings_of(node))
    yield one
    one.shutdown()


def store(node: Node, manager: EmsOffloadingManager, keys: list[OffloadKey]) -> None:
    """As a worker does what the manager says."""
    context = context_of("writer", keys)
    manager.on_new_request(context)
    asked = manager.prepare_store(keys, context)
    assert asked.keys_to_store == keys
    client = PoolClient(node.socket, "worker")
    pool_keys, parents = cut(asked.store_spec.keys[0], KEY_BYTES), cut(asked.store_spec.parents[0], KEY_BYTES)
    assert parents[1:] == pool_keys[:-1]
    client.commit(client.reserve(Namespace("t/m/f/0.0", PAGE), parents[0], pool_keys))
    client.close()
    manager.on_request_finished(context)


def look(manager: EmsOffloadingManager, keys: list[OffloadKey], context: ReqContext) -> list[LookupResult]:
    """In as many steps as it takes."""
    results: list[LookupResult] = []

    def answered() -> bool:
        results[:] = [manager.lookup(key, context) for key in keys]
        manager.on_schedule_end(STEP)
        return LookupResult.RETRY not in results

    wait_for(answered, "the lookup is answered")
    return results


def begun(manager: EmsOffloadingManager, request_id: str, keys: list[OffloadKey]) -> ReqContext:
    context = context_of(request_id, keys)
    manager.on_new_request(context)
    return context


def leases(node: Node) -> int:
    count: int = node.stats()["leases"]
    return count


def test_what_is_stored_is_found_and_leased_until_it_is_loaded(manager: EmsOffloadingManager, node: Node) -> None:
    keys = chunk_keys("a", 5)
    store(node, manager, keys[:3])
    context = begun(manager, "reader", keys)
    assert look(manager, keys, context) == [LookupResult.HIT] * 3 + [LookupResult.MISS] * 2
    assert leases(node) == 1
    pages = manager.prepare_load(keys[1:3], context)
    assert [len(of_group) // KEY_BYTES for of_group in pages.keys] == [2]
    assert pages.node == node.stats()["node"]
    manager.on_schedule_end(ScheduleEndContext(["reader"], ()))
    manager.on_request_finished(context)
    assert leases(node) == 1, "its blocks are still being filled"
    manager.complete_load(keys[1:3], context)
    wait_for(lambda: not leases(node), "the lease ends with the load")


def test_who_loaded_is_not_told_of_the_same_pages_until_it_ran(manager: EmsOffloadingManager, node: Node) -> None:
    """A load that failed ends like any other."""
    keys = chunk_keys("a", 3)
    store(node, manager, keys)
    context = begun(manager, "reader", keys)
    look(manager, keys, context)
    manager.prepare_load(keys, context)
    manager.complete_load(keys, context)
    assert look(manager, keys, context) == [LookupResult.MISS] * 3
    wait_for(lambda: not leases(node), "the lease ends with the load")

    manager.on_schedule_end(ScheduleEndContext(["reader"], ()))
    assert look(manager, keys, context) == [LookupResult.HIT] * 3


def test_a_chunk_that_no_lookup_found_is_at_no_place(manager: EmsOffloadingManager, node: Node) -> None:
    """The engine goes on: the load fails."""
    keys = chunk_keys("a", 4)
    store(node, manager, keys[:3])
    context = begun(manager, "reader", keys)
    look(manager, keys, context)
    pages = manager.prepare_load(keys, context)
    refs = cut(pages.refs[0][0], REF_BYTES)
    assert (len(refs), refs[3]) == (4, bytes(REF_BYTES))
    assert bytes(REF_BYTES) not in refs[:3]
    manager.complete_load(keys, context)


@pytest.mark.parametrize("end", ["is scheduled without a load", "is preempted", "ends"])
def test_what_is_of_no_use_is_given_back(manager: EmsOffloadingManager, node: Node, end: str) -> None:
    keys = chunk_keys("a", 3)
    store(node, manager, keys)
    context = begun(manager, "reader", keys)
    look(manager, keys, context)
    assert leases(node) == 1
    if end == "ends":
        manager.on_request_finished(context)
    else:
        ids: tuple[list[str], list[str]] = ["reader"], []
        manager.on_schedule_end(ScheduleEndContext(*(ids if end.startswith("is scheduled") else ids[::-1])))
    wait_for(lambda: not leases(node), "nothing is held")
    if end != "ends":
        assert look(manager, keys, context) == [LookupResult.HIT] * 3, "asked anew"


def test_a_long_queue_holds_few_leases(manager: EmsOffloadingManager, node: Node) -> None:
    keys = chunk_keys("a", 2)
    store(node, manager, keys)
    contexts = [begun(manager, f"reader {number}", keys) for number in range(MOST_WAITING + 9)]
    for context in contexts[:MOST_WAITING]:
        assert look(manager, keys, context) == [LookupResult.HIT] * 2
    for _ in range(3):
        assert {manager.lookup(keys[0], context) for context in contexts[MOST_WAITING:]} == {LookupResult.RETRY}
        manager.on_schedule_end(STEP)
    assert leases(node) == MOST_WAITING
    manager.on_request_finished(contexts[0])
    assert look(manager, keys, contexts[-1]) == [LookupResult.HIT] * 2
    for context in contexts:
        manager.on_request_finished(context)
    wait_for(lambda: not leases(node), "nothing is held")


def test_after_a_reset_nothing_stored_before_is_found(manager: EmsOffloadingManager, node: Node) -> None:
    keys = chunk_keys("a", 3)
    store(node, manager, keys)
    waiting = begun(manager, "waiting", keys)
    look(manager, keys, waiting)
    manager.reset_cache()
    assert look(manager, keys, waiting) == [LookupResult.MISS] * 3
    assert look(manager, keys, begun(manager, "new", keys)) == [LookupResult.MISS] * 3
    store(node, manager, keys)
    assert look(manager, keys, begun(manager, "newer", keys)) == [LookupResult.HIT] * 3


def test_a_node_that_hangs_makes_nobody_wait(node: Node) -> None:
    manager = manager_of(settings_of(node, lookup_timeout_ms=300))
    keys = chunk_keys("a", 3)
    context = begun(manager, "reader", keys)
    with node.frozen():
        assert manager.lookup(keys[0], context) is LookupResult.RETRY
        assert look(manager, keys, context) == [LookupResult.MISS] * 3
    manager.on_request_finished(context)
    wait_for(lambda: not leases(node), "what was promised after all is given back")
    manager.shutdown()


def test_a_node_that_is_gone_means_misses(node: Node, manager: EmsOffloadingManager) -> None:
    keys = chunk_keys("a", 3)
    store(node, manager, keys)
    node.kill()
    assert look(manager, keys, begun(manager, "one", keys)) == [LookupResult.MISS] * 3
    node.start()

    def found() -> bool:
        context = begun(manager, "two", keys)
        results = look(manager, keys, context)
        manager.on_request_finished(context)
        return results == [LookupResult.HIT] * 3

    wait_for(found, "what it had is found again")


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_consumer_stores_nothing(node: Node, role: str) -> None:
    manager = manager_of(settings_of(node, role))
    keys = chunk_keys("a", 2)
    asked = manager.prepare_store(keys, begun(manager, "one", keys))
    assert asked.keys_to_store == ([] if role == "kv_consumer" else keys)
    manager.shutdown()
