"""What vLLM's scheduler is told of chunks, on a real node: found without waiting, leased while it is of use."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key

from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, NO_PARENT, cut, page_keys
from ems.pool.layout import REF_BYTES
from ems.vllm.configuration.settings import ConnectorSettings, read_settings
from ems.vllm.model import BlockModel
from ems.vllm.offloading.manager import EmsOffloadingManager
from ems.vllm.planes import Plane
from ems.vllm.requests import EAGER_LEASES
from tests.e2e.engines import PATIENT, Node, running_node, wait_for

PAGE = 512
TOKENS = 64
STEP = ScheduleEndContext((), ())
NAME = "t/m/f"
MODEL = BlockModel(NAME, TOKENS, 100, 1, (Plane(f"{NAME}/0.0", shards=2),))


def prompt_of(name: str, chunks: int) -> list[int]:
    return [zlib.crc32(name.encode()) % 1000 + at for at in range(chunks * TOKENS)]


def chunk_keys(name: str, count: int) -> list[OffloadKey]:
    return [make_offload_key(b"%s %d" % (name.encode(), number), 0) for number in range(count)]


def settings_of(node: Node, role: str = "kv_both", **extra: object) -> ConnectorSettings:
    settings, warnings = read_settings(role, {"socket": str(node.socket), "autostart": False, **PATIENT, **extra}, {})
    assert not warnings
    return settings


def manager_of(settings: ConnectorSettings) -> EmsOffloadingManager:
    return EmsOffloadingManager(settings, MODEL, [0])


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
    context = begun(manager, "writer", keys)
    asked = manager.prepare_store(keys, context)
    assert asked.keys_to_store == keys
    ((first, parent, tails, groups),) = asked.store_spec.runs
    assert (first, parent, len(tails), groups) == (0, NO_PARENT, len(keys), (0,))
    pages = cut(page_keys(b"".join(tail.key for tail in tails), 2), KEY_BYTES)
    client = PoolClient(node.socket, "worker")
    for shard in range(2):
        client.commit(client.reserve(Namespace(MODEL.namespaces[0], PAGE), NO_PARENT, pages[shard::2]))
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
    """A request whose prompt has one chunk for each of ``keys``, named as these are."""
    tokens = prompt_of(keys[0].split()[0].decode(), len(keys))
    request = SimpleNamespace(
        request_id=request_id, prompt_token_ids=tokens, all_token_ids=tokens, num_tokens=len(tokens)
    )
    request.lora_request = request.mm_features = request.cache_salt = None
    manager.arrived(request)
    context = ReqContext(request_id)
    for number, key in enumerate(keys):
        context.set_offload_key_position(key, (number + 1) * TOKENS)
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
    ((part,),) = pages.groups
    assert (part.plane, part.first, len(part.keys), len(part.packed_refs)) == (0, 1, 2 * KEY_BYTES, 2 * 2 * REF_BYTES)
    assert pages.node == node.stats()["node"]
    manager.on_schedule_end(ScheduleEndContext(["reader"], ()))
    manager.on_request_finished(context)
    assert leases(node) == 1, "its blocks are still being filled"
    manager.complete_load(keys[1:3], context)
    wait_for(lambda: not leases(node), "the lease ends with the load")


def test_answers_to_one_prompt_of_embeddings_have_names_of_their_own(manager: EmsOffloadingManager) -> None:
    names = []
    for answer in (300, 301):
        begun(manager, str(answer), chunk_keys("a", 1))
        request = manager._requests[str(answer)]
        request.prompt_token_ids, request.prompt_embeds = None, torch.ones(TOKENS, 2)
        request._prompt_embeds_per_block_hashes, request.num_tokens = {}, 2 * TOKENS
        request.all_token_ids = [0] * TOKENS + [answer] * TOKENS
        request.mm_features, request.prompt_is_token_ids = [], None
        assert list(manager._job(request, 0).tokens) == request.all_token_ids
        names.append(manager._chain(request.request_id, TOKENS, 2).packed(0, 2))
    assert names[0][:KEY_BYTES] == names[1][:KEY_BYTES]
    assert names[0][KEY_BYTES:] != names[1][KEY_BYTES:]


@pytest.mark.parametrize("ended", [False, True])
def test_a_reset_ends_the_lease_of_a_load_of_which_vllm_tells_no_more(
    manager: EmsOffloadingManager, node: Node, ended: bool
) -> None:
    keys = chunk_keys("a", 3)
    store(node, manager, keys)
    context = begun(manager, "reader", keys)
    look(manager, keys, context)
    manager.prepare_load(keys, context)
    if ended:
        manager.on_request_finished(context)
    manager.reset_cache()
    wait_for(lambda: not leases(node), "the lease ends with the reset")
    assert not manager.prepare_store(keys, context).keys_to_store, "its blocks have what was stored before"


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

    manager.on_schedule_end(ScheduleEndContext((), ["reader"]))
    assert look(manager, keys, context) == [LookupResult.HIT] * 3


def test_a_chunk_that_no_lookup_found_is_at_no_place(manager: EmsOffloadingManager, node: Node) -> None:
    """The engine goes on: the load fails."""
    keys = chunk_keys("a", 4)
    store(node, manager, keys[:3])
    context = begun(manager, "reader", keys)
    look(manager, keys, context)
    pages = manager.prepare_load(keys, context)
    refs = cut(pages.groups[0][0].packed_refs, REF_BYTES)
    assert refs[6:] == [bytes(REF_BYTES)] * 2
    assert bytes(REF_BYTES) not in refs[:6]
    manager.complete_load(keys, context)


@pytest.mark.parametrize("end", ["goes on without a load", "ends"])
def test_what_is_of_no_use_is_given_back(manager: EmsOffloadingManager, node: Node, end: str) -> None:
    keys = chunk_keys("a", 3)
    store(node, manager, keys)
    context = begun(manager, "reader", keys)
    look(manager, keys, context)
    assert leases(node) == 1
    if end == "ends":
        manager.on_request_finished(context)
    else:
        manager.allocated(SimpleNamespace(request_id="reader"), None, 0)
        manager.on_schedule_end(ScheduleEndContext(["reader"], ()))
    wait_for(lambda: not leases(node), "nothing is held")
    if end != "ends":
        manager.on_schedule_end(ScheduleEndContext((), ["reader"]))
        assert look(manager, keys, context) == [LookupResult.HIT] * 3, "a request that was preempted is looked up again"


def test_a_request_that_waits_is_looked_up_again(manager: EmsOffloadingManager, node: Node) -> None:
    """Until vLLM asks for it: what others store meanwhile is found, and leased."""
    keys = chunk_keys("a", 3)
    context = begun(manager, "reader", keys)
    wait_for(lambda: node.counters["lookups"] > 0, "nothing was found")
    store(node, manager, keys)
    wait_for(lambda: leases(node) == 1, "it is looked up again")
    assert look(manager, keys, context) == [LookupResult.HIT] * 3


@pytest.mark.parametrize("drops_last", [False, True])
def test_of_a_window_the_chunks_in_sight_are_found(drops_last: bool) -> None:
    """Where a draft model's layers have vLLM leave the last chunk out, what is in sight of the one before, too."""
    with running_node("--size", "256MB") as node:  # each group has segments of its own
        wait_for(lambda: node.stats()["bytes_touched"] == 256 << 20, "the memory is touched")
        planes = (Plane(f"{NAME}/0.0", shards=2), Plane(f"{NAME}/1.0", group=1, window=2 * TOKENS))
        model = BlockModel(NAME, TOKENS, 100, 2, planes)
        manager = EmsOffloadingManager(settings_of(node), model, [0, 1], drops_last=drops_last)
        keys = chunk_keys("a", 40)
        ((_, _, tails, _),) = manager.prepare_store(keys, begun(manager, "writer", keys)).store_spec.runs
        client = PoolClient(node.socket, "worker")
        for plane, first in zip(planes, (0, 20), strict=True):
            pages = cut(page_keys(b"".join(tail.key for tail in tails[first:30]), plane.shards), KEY_BYTES)
            client.commit(client.reserve(Namespace(plane.namespace, PAGE), NO_PARENT, pages))
        client.close()
        context = begun(manager, "reader", keys)
        assert look(manager, keys, context) == [LookupResult.HIT] * 30 + [LookupResult.MISS] * 10
        windowed = [make_offload_key(key[:-4], 1) for key in keys]
        for number, key in enumerate(windowed):
            context.set_offload_key_position(key, (number + 1) * TOKENS)
        seen = [number for number, result in enumerate(look(manager, windowed, context)) if result is LookupResult.HIT]
        assert seen == list(range(27 if drops_last else 28, 30))
        manager.on_request_finished(context)
        manager.shutdown()


def test_a_long_queue_holds_few_leases(manager: EmsOffloadingManager, node: Node) -> None:
    keys = chunk_keys("a", 2)
    store(node, manager, keys)
    contexts = [begun(manager, f"reader {number}", keys) for number in range(EAGER_LEASES + 9)]
    for context in contexts[:EAGER_LEASES]:
        assert look(manager, keys, context) == [LookupResult.HIT] * 2
    for _ in range(3):
        # VLLM asks for all that wait, in their order.
        asked = [manager.lookup(keys[0], context) for context in contexts]
        assert asked == [LookupResult.HIT] * EAGER_LEASES + [LookupResult.RETRY] * 9
        manager.on_schedule_end(STEP)
    assert leases(node) == EAGER_LEASES
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


def test_a_reset_is_said_in_the_log(
    manager: EmsOffloadingManager, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.ems.scheduler")
    manager.reset_cache()
    assert "shares nothing with other engines until it knows its weights" in caplog.text


def test_engines_that_name_the_same_weights_share_again(manager: EmsOffloadingManager, node: Node) -> None:
    other = manager_of(settings_of(node))
    keys = chunk_keys("a", 3)
    for one in (manager, other):
        one.reset_cache()
        one.weights_declared("v2")
    store(node, manager, keys)
    assert look(other, keys, begun(other, "reader", keys)) == [LookupResult.HIT] * 3
    other.weights_declared("v3")  # it holds KV of the weights before
    assert look(other, keys, begun(other, "later", keys)) == [LookupResult.MISS] * 3
    other.shutdown()


def test_weights_get_no_name_while_blocks_of_others_may_be_there(manager: EmsOffloadingManager, node: Node) -> None:
    """Of a request that is shorter than a chunk vLLM asks and stores nothing, but its blocks are in the cache."""
    emptied = True
    pool = SimpleNamespace(reset_prefix_cache=lambda: emptied)
    manager.bind(pool)
    keys, other = chunk_keys("a", 3), manager_of(settings_of(node))
    other.weights_declared("v2")

    def reset_and_declare() -> None:
        pool.reset_prefix_cache()
        manager.reset_cache()
        manager.weights_declared("v2")

    manager.allocated(SimpleNamespace(request_id="short"), None, 0)
    manager.reset_cache()
    manager.weights_declared("v2")
    store(node, manager, keys)
    assert look(other, keys, begun(other, "first", keys)) == [LookupResult.MISS] * 3

    emptied = False  # a block is in use, and vLLM tells of the reset all the same
    reset_and_declare()
    store(node, manager, keys)
    assert look(other, keys, begun(other, "second", keys)) == [LookupResult.MISS] * 3

    emptied = True
    reset_and_declare()
    store(node, manager, keys)
    assert look(other, keys, begun(other, "third", keys)) == [LookupResult.HIT] * 3
    other.shutdown()


def test_a_part_of_a_chunk_is_neither_found_nor_stored(manager: EmsOffloadingManager, node: Node) -> None:
    keys = chunk_keys("a", 2)
    store(node, manager, keys)
    context = begun(manager, "reader", keys)
    (part,) = chunk_keys("part", 1)
    context.set_offload_key_position(part, TOKENS + 3)
    assert look(manager, [*keys, part], context) == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]
    assert not manager.prepare_store([part], context).keys_to_store


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


def test_a_node_that_is_gone_means_misses(node: Node) -> None:
    manager = manager_of(settings_of(node, health_check_ms=100))
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
    manager.shutdown()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_consumer_stores_nothing(node: Node, role: str) -> None:
    manager = manager_of(settings_of(node, role))
    keys = chunk_keys("a", 2)
    asked = manager.prepare_store(keys, begun(manager, "one", keys))
    assert asked.keys_to_store == ([] if role == "kv_consumer" else keys)
    manager.shutdown()
