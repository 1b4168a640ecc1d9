"""The scheduler side with a real node and made-up requests: what it tells, and that it leaves an ill pool alone."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.v1.core.block_pool import BlockPool

from ems.errors import ConfigError, PoolTimeout
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import NO_PARENT, KeyChain
from ems.pool.movement.speed import LEAST_SAMPLES
from ems.pool.protocol.acts import Show
from ems.vllm.configuration.settings import read_settings
from ems.vllm.lookups import LookupAnswer, Lookups
from ems.vllm.metadata import QUIET, StepReport
from ems.vllm.reporting.observer import Observer
from ems.vllm.reporting.stats import Transferred
from ems.vllm.requests import EAGER_LEASES, Phase
from ems.vllm.scheduler import ANNOUNCED, IN_STEP_SECONDS, MAX_OFFERS, RESET_SECONDS
from ems.vllm.waiting import MOST_STEP_SECONDS, STEP_SECONDS, STEP_SHARE, StepWaits
from tests.e2e.engines import Node, running_node, wait_for
from tests.vllm.scheduler_side import (
    BLOCK,
    EXPLAIN,
    MODEL,
    NAMESPACE,
    TOKENS,
    Blocks,
    Params,
    Side,
    empty_step,
    engine_blocks,
    request,
    step,
)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node("--size", "8MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 8 << 20, "the memory is touched")
        yield running


@pytest.fixture
def store(node: Node) -> Iterator[Callable[[int], None]]:
    """Stores so many leading blocks."""
    client = PoolClient(node.socket, "writer")

    def some(blocks: int) -> None:
        chain = KeyChain(MODEL.identity, BLOCK)
        chain.extend(TOKENS)
        client.commit(client.reserve(NAMESPACE, NO_PARENT, chain[0:blocks]))

    yield some
    client.close()


Make = Callable[..., Side]


@pytest.fixture
def make(node: Node) -> Iterator[Make]:
    made: list[Side] = []

    def side(role: str = "kv_both", *, in_lockstep: bool = False, **extra: object) -> Side:
        settings, said = read_settings(role, {"socket": str(node.socket), "autostart": False, **extra}, {})
        assert not said
        made.append(Side(settings, MODEL, in_lockstep=in_lockstep))
        return made[-1]

    yield side
    for each in made:
        each.close()


def test_a_hit_is_explained_and_counted(make: Make, store: Callable[[int], None]) -> None:
    store(3)
    side, one = make(), request(params=EXPLAIN)
    side.on_new_request(one)
    assert side.found(one) == 3 * BLOCK
    side.allocated(one, Blocks([1, 2, 3, 4]), 3 * BLOCK)
    side.received(["r"], (), set())
    told = side.end(one)

    assert (told["from_pool"], told["loaded_blocks"], told["tier"]) == (48, 3, "DRAM")
    assert (told["found"], told["computed"], told["reason"]) == (48, 16, "never_stored")
    data = side.told()
    assert (data["lookups"], data["asked_tokens"], data["hit_tokens"], data["misses"]) == (1, 64, 48, {})
    assert data["state"]["pool_usable"] is True


def test_blocks_that_could_not_be_loaded_are_explained(make: Make, store: Callable[[int], None]) -> None:
    store(3)
    side, one = make(), request(params=EXPLAIN)
    side.on_new_request(one)
    side.found(one)
    side.allocated(one, Blocks([1, 2, 3, 4]), 3 * BLOCK)
    side.received(["r"], (), {2, 3})
    told = side.end(one)

    assert (told["from_pool"], told["computed"], told["reason"]) == (16, 48, "load_failed")


@pytest.mark.parametrize(
    "settings", [{"num_min_reuse_tokens": 49}, {"num_min_load_blocks": "3"}], ids=["tokens", "blocks"]
)
def test_what_is_below_the_thresholds_is_left_alone(
    make: Make, node: Node, store: Callable[[int], None], settings: Params
) -> None:
    store(3)
    side, one = make(**settings), request(params=EXPLAIN)
    side.on_new_request(one)

    assert side.found(one) == 0
    assert side.end(one)["reason"] == "below_minimum"
    wait_for(lambda: node.stats()["leases"] == 0, "the lease is given back")


@pytest.mark.parametrize("told", [True, False], ids=["of the new request", "of nothing before"])
def test_a_request_that_wants_all_of_its_tokens_computed_loads_nothing(
    make: Make, node: Node, store: Callable[[int], None], told: bool
) -> None:
    """As one does that wants log-probabilities of its prompt; not all releases leave its hit out by themselves."""
    store(3)
    side, one = make(), request(params=EXPLAIN)
    one.skip_reading_prefix_cache = True
    if told:
        side.on_new_request(one)
    assert side.match(one, 0) == (0, False)
    assert side.end(one).get("reason", "not_loaded") == "not_loaded"
    wait_for(lambda: node.stats()["leases"] == 0, "the lease is given back")


def test_a_handoff_knows_no_thresholds(make: Make, store: Callable[[int], None]) -> None:
    store(3)
    side = make("kv_consumer", num_min_reuse_tokens=2048)
    one = request(params={"do_remote_prefill": True, "ems_tokens": 48})
    side.on_new_request(one)

    assert side.found(one) == 48


def test_the_prefills_explanation_comes_back_with_the_decodes(make: Make) -> None:
    side, one = make("kv_consumer"), request(params={"ems_explain": {"reason": "absent"}})
    side.on_new_request(one)
    side.found(one)

    assert side.end(one)["prefill"] == {"reason": "absent"}


def test_a_side_that_only_stores_says_so(make: Make) -> None:
    side = make("kv_consumer", consumer_is_to_load=False, consumer_is_to_put=True)
    one = request(params=EXPLAIN)
    side.on_new_request(one)

    assert side.match(one, 0) == (0, False)
    assert side.end(one)["reason"] == "does_not_load"


def test_all_requests_are_explained_in_the_log_if_the_settings_say_so(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.ems.scheduler")
    side, one = make(explain=True), request("fresh", [7] * 64)
    side.on_new_request(one)
    side.found(one)

    assert side.end(one) == {}
    assert any(
        message.startswith(
            "EMS explains request fresh: 64 tokens in the prompt, 0 from the engine's cache, 0 (0 blocks)"
        )
        for message in caplog.messages
    )


def test_a_load_that_takes_longer_than_computing_is_not_made(make: Make, store: Callable[[int], None]) -> None:
    store(3)
    side, one = make(), request(params=EXPLAIN)
    slow = Transferred(load=True, leading=True, blocks=3, failed=0, bytes=768, seconds=100.0)
    side.received((), (), set(), StepReport({}, [slow] * 10))
    for _ in range(10):
        side.build_metadata(step(request("other"), 1000))
        assert side.take_events() == []
    side.on_new_request(one)

    assert side.found(one) == 0
    assert side.end(one)["reason"] == "cheaper_to_compute"
    assert side.told()["state"]["refused"] == 1


@pytest.mark.parametrize("fault", ["lookup", "worker"])
def test_an_ill_pool_is_left_alone(make: Make, node: Node, store: Callable[[int], None], fault: str) -> None:
    """Nothing reaches the node, nothing is offered to it, and no request waits for it."""
    store(3)
    side = make()
    waiting, running = request("waiting"), request("running", [5] * 64)
    for one in (waiting, running):
        side.on_new_request(one)
    assert (side.found(waiting), side.found(running)) == (48, 0)
    if fault == "worker":
        side.received((), (), set(), StepReport({}, [], {"PoolTimeout": 1}))
    else:
        side._observer.failed(PoolTimeout("late"))
    assert side.match(waiting, 0) == (0, False)
    wait_for(lambda: node.stats()["leases"] == 0, "what was promised is given back")
    before = node.counters["lookups"]

    late = request("late", params=EXPLAIN)
    side.on_new_request(late)
    assert side.match(late, 0) == (0, False)
    assert side.build_metadata(step(running, 64)).saves == []
    assert side.end(late)["reason"] == "pool_down"
    assert side.finished(running, ([1, 2, 3, 4],)) == (False, None)
    assert node.counters["lookups"] == before
    assert side.told()["state"]["pool_usable"] is False


def test_the_scheduler_waits_for_no_call_to_the_pool(
    make: Make, node: Node, store: Callable[[int], None], calls_take_a_minute: float
) -> None:
    """A hundred requests in the queue of an engine whose node hangs: arrivals, looks, an end."""
    store(3)
    side = make(lookup_timeout_ms=60_000)
    ready = request("ready")
    side.on_new_request(ready)
    assert side.found(ready) == 48
    pid = int(node.stats()["pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        queue, took = [request(f"r{number}") for number in range(100)], []
        for call in (side.on_new_request, lambda one: side.match(one, 0), lambda one: side.match(one, 0)):
            for one in queue:
                begun = time.perf_counter()
                call(one)
                took.append(time.perf_counter() - begun)
        for one in queue:
            begun = time.perf_counter()
            side.finished(one, ([1],))
            took.append(time.perf_counter() - begun)
        assert max(took) < calls_take_a_minute, "a call waited for the node"
    finally:
        os.kill(pid, signal.SIGCONT)
    side.finished(ready, ([1],))
    wait_for(lambda: node.stats()["leases"] == 0, "what was promised is given back")


def test_requests_behind_the_first_are_looked_up_as_these_leave(make: Make, store: Callable[[int], None]) -> None:
    store(3)
    side = make()
    queue = [request(f"q{number}") for number in range(EAGER_LEASES + 2)]
    for one in queue:
        side.on_new_request(one)
    for one in queue[:2]:
        side.found(one)
        side.finished(one, ([1],))
    side.build_metadata(step(request("other"), 1))

    def answered() -> bool:
        side._take_answers()
        known = side._book.get(queue[-1].request_id)
        return known is not None and known.found.chunks == 3

    wait_for(answered, "the last of the queue is answered before the scheduler asks")
    for one in queue[2:]:
        side.finished(one, ([1],))


@pytest.mark.usefixtures("clock")
def test_the_engine_does_not_ask_for_more_than_are_looked_up(make: Make) -> None:
    """VLLM would ask for each of thousands in each step; it stops where there is no block for one."""
    side, blocks, queue = make(), engine_blocks(8), [request(f"q{number}") for number in range(EAGER_LEASES + 1)]
    side.bind(blocks)
    for one in queue:
        side.on_new_request(one)
    for one in queue[:-1]:
        assert side.match(one, 0) == (None, False)
        assert blocks.get_num_free_blocks() == 7
    assert side.match(queue[-1], 0) == (0, False)
    assert blocks.get_num_free_blocks() == 0
    side.build_metadata(empty_step())
    assert blocks.get_num_free_blocks() == 7, "only what was looked at gets none"
    side.match(queue[0], 0)
    side.match(queue[-1], 0)
    side.match(queue[1], 0)
    assert blocks.get_num_free_blocks() == 7
    for one in queue:
        assert side.finished(one, ([1],)) == (False, None)


def test_without_the_gate_an_ill_pool_is_asked_all_the_same(make: Make, store: Callable[[int], None]) -> None:
    store(3)
    side, one = make(health_gate=False), request()
    side._observer.failed(PoolTimeout("late"))
    side.on_new_request(one)

    assert side.found(one) == 48


def test_once_it_is_well_the_pool_is_used_again(make: Make, store: Callable[[int], None]) -> None:
    store(3)
    side = make(health_check_ms=20)
    side._observer.failed(PoolTimeout("late"))
    wait_for(lambda: side._observer.usable, "the gate opens")
    one = request()
    side.on_new_request(one)

    assert side.found(one) == 48


@pytest.mark.parametrize("prompt_tokens", [5, BLOCK, BLOCK + 3], ids=["first block", "whole block", "second block"])
def test_a_part_of_a_block_is_named_by_computed_tokens_only(make: Make, prompt_tokens: int) -> None:
    """The token that was sampled last has no state yet, also where the part lies in the request's first block."""
    side, one = make(), request(tokens=list(range(300, 300 + prompt_tokens)))
    side.on_new_request(one)
    assert side.found(one) == 0
    side.build_metadata(step(one, prompt_tokens))
    one.all_token_ids = [*one.prompt_token_ids, 900, 901, 902]
    one.num_tokens, one.num_computed_tokens = prompt_tokens + 3, prompt_tokens + 2
    idle = step(one, 0)
    idle.scheduled_new_reqs = []
    side.finished(one, ([1, 2, 3, 4],))
    (save,) = side.build_metadata(idle).saves

    assert save.partial
    begin = (prompt_tokens + 2) // BLOCK * BLOCK
    expected = [*one.prompt_token_ids, 900, 901][begin:]
    assert save.tails[-1].tokens == b"".join(token.to_bytes(4, "little") for token in expected)


@pytest.mark.parametrize("given", [None, [7] * 40], ids=["embeddings alone", "beside token ids"])
def test_a_prompt_of_embeddings_is_looked_up_as_it_is_stored(make: Make, given: list[int] | None) -> None:
    """In place of embeddings vLLM counts zeros, whatever tokens the prompt has there; tokens of answers count."""
    side, one = make(), request(tokens=[0] * 40)
    one.prompt_token_ids, one.prompt_embeds = given, torch.ones(40, 2)
    one.prompt_is_token_ids, one._prompt_embeds_per_block_hashes = given and [False] * 40, {}
    side.on_new_request(one)
    assert side.found(one) == 0
    (save,) = side.build_metadata(step(one, 40)).saves
    assert list(side._job(one, 0).tokens) == one.all_token_ids
    assert [tail.tokens for tail in save.tails] == [bytes(4 * size) for size in (16, 16, 8)]
    names = []
    for answer in (300, 301):
        one.all_token_ids = [0] * 40 + [answer] * 9
        one.num_tokens = one.num_computed_tokens = 49
        names.append(side._chain(one, 3)[0].packed(2, 3))
        side._book.get(one.request_id).chain = None  # type: ignore[union-attr]
    assert names[0] != names[1]


ROUNDING = 1e-9
"""What may be left of a wait that is over: times are floats, and how they round depends on how long the host is up."""


class Clock:
    """The time while nobody answers: a wait for an answer lasts as long as it may."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.names: list[str] = []
        """Whose answers were waited for."""
        self.waits: list[float] = []
        """How long."""

    def answers(self, wait: float = 0.0, of: str = "") -> list[LookupAnswer]:
        if wait > ROUNDING:
            self.names.append(of)
            self.waits.append(wait)
        self.now += wait
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the scheduler side, which waits for answers move on."""
    clock = Clock()
    monkeypatch.setattr("ems.vllm.scheduler_shell.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr("ems.vllm.scheduler.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(Lookups, "answers", clock.answers)
    return clock


def test_an_engine_without_work_waits_a_moment_in_each_step(make: Make, clock: Clock) -> None:
    side, one, other = make(), request(), request("other")
    side.on_new_request(one)
    side.on_new_request(other)
    for each in (one, other, one):
        assert side.match(each, 0) == (None, False)
    assert clock.names == ["r"]
    assert clock.waits == pytest.approx([STEP_SECONDS])

    side.build_metadata(empty_step())
    side.match(other, 0)
    assert clock.names[1:] == ["other"]
    assert clock.waits[1:] == pytest.approx([STEP_SECONDS])


def test_an_engine_with_work_waits_only_for_what_takes_long_to_compute(make: Make, clock: Clock) -> None:
    side, busy, waiting = make(), request("busy"), request("waiting")
    side.on_new_request(busy)
    side.on_new_request(waiting)
    side.build_metadata(step(busy, 64))
    side._observer.seconds_a_token = 0.0
    side.match(waiting, 0)
    assert not clock.waits, "nobody knows how long that is"

    side._observer.seconds_a_token = 0.2 / 64
    side.match(waiting, 0)
    assert clock.waits == pytest.approx([0.2 * STEP_SHARE])
    side.build_metadata(step(busy, 1))
    clock.now += 0.001
    side.match(waiting, 0)
    assert len(clock.waits) == 1, "a request has its time once"

    side.finished(busy, ([1, 2, 3, 4],))
    side.match(waiting, 0)
    assert clock.waits[1:] == pytest.approx([STEP_SECONDS])


def test_an_engine_with_work_does_not_wait_for_what_comes_up(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, busy, one = make(), request("busy"), request()
    for each in (busy, one):
        side.on_new_request(each)
    side.build_metadata(step(busy, 64))
    side._observer.seconds_a_token = 1.0
    monkeypatch.setattr(Lookups, "comes_up", lambda _lookups, request_id: request_id == "r")
    side.match(one, 0)
    assert not clock.waits


@pytest.mark.parametrize("who", ["other engines", "a load", "a prefill elsewhere", "another connector"])
def test_an_engine_with_work_does_not_wait_where_others_wait_for_it(make: Make, clock: Clock, who: str) -> None:
    side, busy, one = make(in_lockstep=who == "other engines"), request("busy"), request()
    if who == "a prefill elsewhere":
        one.kv_transfer_params = {ANNOUNCED: 64}
    if who == "another connector":
        one.kv_transfer_params = {"remote_engine_id": "prefill"}
    for each in (busy, one):
        side.on_new_request(each)
    side.build_metadata(step(busy, 64))
    side._observer.seconds_a_token = 1.0
    side._book.loading = int(who == "a load")
    side.match(one, 0)
    assert not clock.waits


def test_a_step_waits_for_each_a_small_part_of_what_computing_takes(make: Make, clock: Clock) -> None:
    """Of what is behind the tokens that the engine has, counted from when the pool was asked."""
    side, long, short = make(), request("long", [1] * 64), request("short", [2] * 64)
    side._observer.seconds_a_token = 0.2 / 64
    for each in (long, short):
        side.on_new_request(each)
    side.match(short, 48)
    assert clock.names == ["short"]
    assert clock.waits == pytest.approx([0.2 / 4 * STEP_SHARE])
    side.match(long, 0)
    assert clock.names[1:] == ["long"]
    assert clock.waits[1:] == pytest.approx([0.2 * 3 / 4 * STEP_SHARE]), "a twentieth in all"

    side.build_metadata(empty_step())
    side.match(long, 0)
    assert clock.names[2:] == ["long"]
    assert clock.waits[2:] == pytest.approx([STEP_SECONDS]), "a request has its time once"


@pytest.mark.parametrize("who", ["nobody", "other engines", "a load", "a prefill elsewhere"])
def test_a_step_waits_long_only_where_nobody_waits_for_it(make: Make, clock: Clock, who: str) -> None:
    side, one = make(in_lockstep=who == "other engines"), request()
    side._observer.seconds_a_token = 1.0
    if who == "a prefill elsewhere":
        one.kv_transfer_params = {ANNOUNCED: 64}
    side._book.loading = int(who == "a load")
    side.on_new_request(one)
    side.match(one, 0)
    assert clock.waits == pytest.approx([MOST_STEP_SECONDS if who == "nobody" else STEP_SECONDS])


def test_a_step_does_not_wait_longer_for_many(make: Make, clock: Clock) -> None:
    side = make()
    side._observer.seconds_a_token = 1.0
    for number in range(20):
        side.match(request(str(number), [number] * 64), 0)
        clock.now += 0.003
    assert 0 < sum(clock.waits) <= MOST_STEP_SECONDS


def test_nobody_waits_for_a_pool_that_is_down(make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    side, one = make(), request()
    side.on_new_request(one)
    monkeypatch.setattr(Observer, "usable", False)
    assert side.match(one, 0) == (0, False)
    assert not clock.waits


def test_requests_that_come_together_begin_together(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is told to ask again waits until the step of the others is over."""
    side, answers = make(), Lookups.answers

    def late(lookups: Lookups, wait: float = 0.0, of: str = "") -> list[LookupAnswer]:
        return answers(lookups, 60.0, of) if wait else []

    monkeypatch.setattr(Lookups, "answers", late)
    monkeypatch.setattr(StepWaits, "patience", lambda *_, **__: 1.0)
    together = [request(name, [number] * 64) for number, name in enumerate("abc")]
    for each in together:
        side.on_new_request(each)
    assert [side.match(each, 0) for each in together] == [(0, False)] * 3


def test_nobody_waits_for_what_was_answered(
    make: Make, store: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store(3)
    side, one = make(), request()
    side.on_new_request(one)
    assert side.found(one) == 3 * BLOCK
    monkeypatch.setattr(Lookups, "answers", (clock := Clock()).answers)

    assert side.match(one, 0)[0] == 3 * BLOCK
    assert not clock.waits


def test_a_hit_that_the_engine_never_takes_is_not_offered_for_ever(make: Make, store: Callable[[int], None]) -> None:
    """A load must leave blocks free that computing need not, so that some prompts can be computed and not loaded."""
    store(4)
    side, one, busy = make(), request(), request("busy", [7] * 64)
    for each in (busy, one):
        side.on_new_request(each)
    side.build_metadata(step(busy, 64))
    for _ in range(2 * MAX_OFFERS):
        assert side.found(one) == 4 * BLOCK, "there may be room when others have ended"
    side.finished(busy, ([1, 2, 3, 4],))
    for _ in range(MAX_OFFERS):
        assert side.found(one) == 4 * BLOCK
    assert side.matched(one) == (0, False)


def test_what_another_connector_was_to_fill_is_not_stored_when_the_request_is_aborted(make: Make) -> None:
    """VLLM counts these tokens as computed from when their load begins."""
    side, one = make(), request(tokens=[9] * 64)
    side.on_new_request(one)
    assert side.found(one) == 0
    side.allocated(one, Blocks([1, 2, 3, 4]), 0)
    assert not side.finished(one, ([1, 2, 3, 4],))[0]
    assert side.build_metadata(empty_step()).saves == []


class Evictions(BlockPool):
    """Notes what is evicted."""

    def __init__(self) -> None:
        super().__init__(num_gpu_blocks=64, enable_caching=True, hash_block_size=BLOCK)
        self.evicted: list[set[int]] = []

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted.append(block_ids)


def loading_in_step(make: Make, store: Callable[[int], None]) -> tuple[Side, Any, Evictions]:
    """A request whose load is part of the step that is under way."""
    store(4)
    side, one, pool = make(load_async=False), request(), Evictions()
    side.block_pool = pool
    side.on_new_request(one)
    assert side.matched(one) == (4 * BLOCK - 1, False), "the step computes the last token"
    side.allocated(one, Blocks([1, 2, 3, 4]), 4 * BLOCK - 1)
    assert [load.in_step for load in side.build_metadata(step(one, 1)).loads] == [True]
    return side, one, pool


@pytest.mark.parametrize("ended", [False, True], ids=["it goes on", "it was aborted meanwhile"])
def test_the_engine_finds_nothing_behind_a_load_that_failed_within_a_step(
    make: Make, store: Callable[[int], None], ended: bool
) -> None:
    """VLLM finds these blocks from when their load begins, also once the request is gone that would compute them."""
    side, one, pool = loading_in_step(make, store)
    if ended:
        side.finished(one, ([1, 2, 3, 4],))
    side.received([], (), {3}, StepReport({"r": 1}, [], {}))
    assert pool.evicted == [{3, 4}]


def test_blocks_that_were_loaded_within_a_step_are_found(make: Make, store: Callable[[int], None]) -> None:
    side, _, pool = loading_in_step(make, store)
    side.received([], (), set(), StepReport({"r": 1}, [], {}))
    assert pool.evicted == []


def test_nobody_is_computed_behind_blocks_that_a_step_is_loading(make: Make, store: Callable[[int], None]) -> None:
    side, _, _ = loading_in_step(make, store)
    shares, other = request("shares"), request("other", [7] * 64)
    for each in (shares, other):
        side.on_new_request(each)
    assert side.match(shares, BLOCK) == (None, False)
    assert side.matched(other) == (0, False), "it shares nothing"
    side.received([], (), set(), StepReport({"r": 1}, [], {}))
    assert side.matched(shares, BLOCK) == (3 * BLOCK - 1, False)


def taught(side: Side, seconds: float) -> Side:
    """An engine that has loaded some prompts of four blocks, each in so many ``seconds``, and can join loads."""
    loads = [Transferred(load=True, leading=True, blocks=4, failed=0, bytes=1024, seconds=seconds)] * LEAST_SAMPLES
    before = request("before")
    side.on_new_request(before)
    assert side.matched(before) == (4 * BLOCK, True)
    side.allocated(before, Blocks([1, 2, 3, 4]), 4 * BLOCK)
    side.received(["before"], (), set(), StepReport({}, loads, {}))
    side.finished(before, ([1, 2, 3, 4],))
    return side


def test_an_engine_with_nothing_else_to_do_loads_within_the_step(make: Make, store: Callable[[int], None]) -> None:
    store(4)
    side, one = taught(make(), 0.001), request()
    side.build_metadata(empty_step())
    side.on_new_request(one)
    assert side.matched(one) == (4 * BLOCK - 1, False)
    side.allocated(one, Blocks([1, 2, 3, 4]), 4 * BLOCK - 1)
    assert [load.in_step for load in side.build_metadata(step(one, 1)).loads] == [True]
    side.received([], (), set(), StepReport({"r": 1}, [], {}))

    other = request("other")
    side.on_new_request(other)
    assert side.matched(other) == (4 * BLOCK, True), "the first one runs"


@pytest.mark.parametrize(
    "why",
    ["another waits", "it takes long", "not known how long", "asked for", "several ranks", "another node", "it failed"],
)
def test_a_load_that_would_keep_somebody_waiting_is_made_between_steps(
    make: Make, node: Node, store: Callable[[int], None], why: str
) -> None:
    store(4)
    if why == "several ranks":
        settings, _ = read_settings("kv_both", {"socket": str(node.socket), "autostart": False}, {})
        side = Side(settings, MODEL, 2)
    else:
        side = make(**({"load_async": True} if why == "asked for" else {}))
    if why != "not known how long":
        taught(side, 2 * IN_STEP_SECONDS if why == "it takes long" else IN_STEP_SECONDS / 2)
    if why == "another node":
        side._loaded_from = "a node of before"
    if why == "it failed":
        side._loaded_from = ""
        failing = request("failing")
        side.on_new_request(failing)
        assert side.matched(failing) == (4 * BLOCK, True)
        side.allocated(failing, Blocks([1, 2, 3, 4]), 4 * BLOCK)
        side.received(["failing"], (), {2}, None)
        side.finished(failing, ([1, 2, 3, 4],))
    one = request()
    side.on_new_request(one)
    if why == "another waits":
        side.on_new_request(request("another", [7] * 64))
    assert side.matched(one) == (4 * BLOCK, True)
    side.close()


def test_most_steps_have_nothing_to_tell_and_say_so_briefly(make: Make) -> None:
    side, one = make(), request("quiet", [11] * 64)
    side.on_new_request(one)
    assert side.matched(one) == (0, False)
    side.allocated(one, Blocks([1, 2, 3, 4]), 0)
    first = side.build_metadata(step(one, 64))
    assert first.saves
    assert side.take_stats() is not None

    cached = SimpleNamespace(req_ids=["quiet"], new_block_ids=[None], num_computed_tokens=[64], resumed_req_ids=set())
    decodes = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={"quiet": 1}, preempted_req_ids=None
    )
    assert side.build_metadata(decodes) is QUIET
    assert side.build_metadata(empty_step()) is not QUIET, "the worker waits a moment where nothing is computed"
    assert side.take_stats() is None
    for sent in (first, QUIET):
        assert pickle.loads(pickle.dumps(sent)) == sent  # noqa: S301 - what vLLM does with it
    assert pickle.loads(pickle.dumps(QUIET)) is QUIET  # noqa: S301


def resumed(one: Any, tokens: int) -> Any:
    """A step that takes a request's blocks away and begins it anew with others."""
    cached = SimpleNamespace(
        req_ids=[one.request_id],
        new_block_ids=[([5, 6, 7, 8],)],
        num_computed_tokens=[0],
        resumed_req_ids={one.request_id},
    )
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={one.request_id: tokens},
        preempted_req_ids={one.request_id},
    )


def test_what_is_computed_after_a_reset_is_not_stored_under_earlier_names(make: Make) -> None:
    """The engine may preempt what runs, reset and resume in one step."""
    side, one = make(), request("reset", list(range(1000, 1064)))
    side.on_new_request(one)
    assert side.found(one) == 0
    side.allocated(one, Blocks([1, 2, 3, 4]), 0)
    side.build_metadata(step(one, 64))

    side.reset()
    side.match(one, 0)
    side.allocated(one, Blocks([5, 6, 7, 8]), 0)
    assert side.build_metadata(resumed(one, 64)).saves == []
    side.finished(one, ([5, 6, 7, 8],))
    assert side.build_metadata(empty_step()).saves == []


def saving(make: Make, blocks: BlockPool, name: str = "saving", first: int = 2000) -> tuple[Side, Any]:
    """A request that has ended and whose blocks are still to be copied, by a worker that has not said anything."""
    side, one = make(), request(name, list(range(first, first + 64)))
    side.bind(blocks)
    held = blocks.get_new_blocks(4)
    ids = [block.block_id for block in held]
    side.on_new_request(one)
    assert side.found(one) == 0
    side.allocated(one, Blocks(ids), 0)
    side.build_metadata(step(one, 64))
    assert side.finished(one, (ids,))[0] is False
    blocks.free_blocks(reversed(held))
    return side, one


def saved(*numbers: int) -> StepReport:
    return StepReport({}, [], {}, dict.fromkeys(numbers, 1))


def test_blocks_are_held_until_the_save_of_an_ended_request_is_over(make: Make) -> None:
    blocks = engine_blocks(8)
    side, _ = saving(make, blocks)
    assert blocks.get_num_free_blocks() == 3
    assert side.saving
    side.received((), (), set(), saved(1))
    assert blocks.get_num_free_blocks() == 7
    assert not side.saving


@pytest.mark.parametrize("way", ["leave its window", "are taken away"])
def test_blocks_of_a_request_that_goes_on_are_held_until_they_are_saved(make: Make, way: str) -> None:
    """No step waits for saves of blocks that the engine drops, and none of them is called off."""
    blocks = engine_blocks(8)
    side, one = make(), request("runs", list(range(5000, 5064)))
    side.bind(blocks)
    mine = blocks.get_new_blocks(4)
    ids = [block.block_id for block in mine]
    side.on_new_request(one)
    assert side.found(one) == 0
    side.allocated(one, Blocks(ids), 0)
    (save,) = side.build_metadata(step(one, 64)).saves
    following = step(request("other", [7] * 64), 64)
    dropped = 2 if way == "leave its window" else 4
    if way == "are taken away":
        following.preempted_req_ids = {"runs"}
    blocks.free_blocks(mine[:dropped])
    assert not side.build_metadata(following).call_off
    assert blocks.get_num_free_blocks() == 3, "nobody gets them"
    side.received((), (), set(), saved(save.number))
    assert blocks.get_num_free_blocks() == 3 + dropped


def test_pending_saves_do_not_keep_the_engine_from_emptying_its_cache(make: Make) -> None:
    blocks = engine_blocks(8)
    side, _ = saving(make, blocks)
    assert blocks.reset_prefix_cache() is True
    assert blocks.get_num_free_blocks() == 7
    assert side.saving, "the engine goes on with steps until the workers know"

    assert side.build_metadata(empty_step()).call_off, "they end before the blocks are written, by a load perhaps"
    assert not side.build_metadata(step(request("other", [7] * 64), 64)).call_off
    free = blocks.get_num_free_blocks()
    side.received((), (), set(), saved(1))
    assert blocks.get_num_free_blocks() == free, "nothing is given back twice"


def test_a_save_that_has_not_begun_is_not_begun_once_its_blocks_are_given_back(make: Make) -> None:
    """What an answer added is saved in the step after its end."""
    blocks = engine_blocks(8)
    side, one = make(), request("answer", list(range(3000, 3040)))
    side.bind(blocks)
    side.on_new_request(one)
    assert side.found(one) == 0
    side.build_metadata(step(one, 40))
    one.all_token_ids = list(range(3000, 3064))
    one.num_tokens = one.num_computed_tokens = 64
    held = blocks.get_new_blocks(4)
    side.finished(one, ([block.block_id for block in held],))
    blocks.free_blocks(reversed(held))
    assert blocks.reset_prefix_cache() is True
    assert side.build_metadata(empty_step()).saves == []
    side.received((), (), set(), saved(1))
    assert not side.saving


def test_a_reset_that_fails_for_others_costs_no_save(make: Make) -> None:
    """A connector beside this one may still send blocks, or a request be computed."""
    blocks = engine_blocks(8)
    side, _ = saving(make, blocks)
    blocks.touch(blocks.blocks[2:3])
    free = blocks.get_num_free_blocks()
    assert blocks.reset_prefix_cache() is False
    assert blocks.get_num_free_blocks() == free
    assert not side.build_metadata(empty_step()).call_off
    assert side.saving


def test_saves_hold_up_a_pause_for_a_moment_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    blocks = engine_blocks(8)
    side, _ = saving(make, blocks)
    monkeypatch.setattr("ems.vllm.scheduler.time.monotonic", lambda: now)
    side.paused(paused=True)
    assert not side.build_metadata(empty_step()).call_off
    now += RESET_SECONDS
    assert side.build_metadata(empty_step()).call_off
    assert blocks.get_num_free_blocks() == 7
    assert not side.saving
    side.paused(paused=False)
    side.received((), (), set(), saved(1))


def test_a_rank_that_is_still_copying_keeps_the_blocks(make: Make, node: Node) -> None:
    blocks = engine_blocks(8)
    settings, _ = read_settings("kv_both", {"socket": str(node.socket), "autostart": False}, {})
    side, _ = saving(lambda: Side(settings, MODEL, 2), blocks, "ranks", 2500)
    side.received((), (), set(), saved(1))
    assert blocks.get_num_free_blocks() == 3
    side.received((), (), set(), saved(1))
    assert blocks.get_num_free_blocks() == 7
    side.close()


def test_a_node_is_told_where_keys_of_named_weights_begin(node: Node) -> None:
    def told() -> str:
        side.found(request())
        client.open(NAMESPACE)
        return str(client.administer(Show(NAMESPACE.name))["facts"].get("chain"))

    given = {"socket": str(node.socket), "autostart": False, "weights_version": "one"}
    model = msgspec.structs.replace(MODEL, facts={"tenant": "default", "model": "model"})
    side, client = Side(read_settings("kv_both", given, {})[0], model), PoolClient(node.socket, "administrator")
    assert told() == "weights/one"
    side.reset()
    assert told() == "weights/one"
    side.weights_declared("two")
    assert told() == "weights/two"
    client.close()
    side.close()


def test_engines_share_again_once_their_new_weights_have_a_name(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.ems.scheduler")
    sides = [make(), make(weights_version="run-7/step-2")]
    names = [side._lookups.chain_name for side in sides]
    assert names[0] == MODEL.identity != names[1]
    sides[0].reset()
    assert len({side._lookups.chain_name for side in sides}) == 2
    sides[0].weights_declared("run-7/step-2")
    assert len({side._lookups.chain_name for side in sides}) == 1

    sides[0].build_metadata(step(request("computed", [7] * 64), 64))
    sides[0].weights_declared("run-7/step-3")
    assert sides[0]._lookups.chain_name not in names, "it holds what the weights of before computed"
    assert any("declared while the engine holds KV of other weights" in line for line in caplog.messages)
    sides[0].block_pool.reset_prefix_cache()
    sides[0].weights_declared("run-7/step-3")
    sides[1].weights_declared("run-7/step-3")
    assert len({side._lookups.chain_name for side in sides}) == 1


def test_a_request_that_waits_is_looked_up_in_the_new_epoch(make: Make, node: Node) -> None:
    client = PoolClient(node.socket, "writer")
    chain = KeyChain(f"{MODEL.identity}/weights/two", BLOCK)
    chain.extend(TOKENS)
    client.commit(client.reserve(NAMESPACE, NO_PARENT, chain[0:4]))
    client.close()
    side, one = make(), request("waits")
    side.on_new_request(one)
    side.reset()
    side.weights_declared("two")
    assert side.found(one) == 4 * BLOCK


def test_a_request_that_is_resumed_at_once_looks_up_nothing(make: Make, store: Callable[[int], None]) -> None:
    store(3)
    side, one = make(), request("resumed")
    side.on_new_request(one)
    side.found(one)
    side.allocated(one, Blocks([1, 2, 3, 4]), 0)
    side.build_metadata(step(one, 64))
    side.match(one, 0)
    side.allocated(one, Blocks([5, 6, 7, 8]), 0)
    side.build_metadata(resumed(one, 64))

    known = side._book.get("resumed")
    assert known is not None
    assert known.phase is Phase.SETTLED
    assert side._running == {"resumed"}


def test_an_answer_is_stored_though_the_next_step_was_launched_before_it_ended(make: Make) -> None:
    """Where steps overlap the engine learns of a stop token when it computes one token more."""
    side, one = make(), request(tokens=[5] * 20)
    assert side.compute(one).saves
    one.all_token_ids = [5] * 60
    one.num_tokens, one.num_computed_tokens, one.num_in_flight_tokens = 60, 60, 1
    side.finished(one, ([1, 2, 3, 4],))

    (save,) = side.build_metadata(empty_step()).saves
    assert save.partial
    assert (save.first, len(save.tails), len(save.tails[-1].tokens)) == (1, 3, 4 * 11), (
        "the step under way writes token 59"
    )


def test_blocks_that_another_connector_lost_are_not_missing_in_our_loads(
    make: Make, store: Callable[[int], None]
) -> None:
    store(4)
    side, one = make(load_async=True), request(params=EXPLAIN)
    side.received(["theirs"], (), {2})
    side.on_new_request(one)
    assert side.found(one) == 4 * BLOCK
    side.allocated(one, Blocks([1, 2, 3, 4]), 4 * BLOCK)
    side.build_metadata(empty_step())
    side.received(["r"], (), set())

    assert side.end(one)["reason"] == "nothing_missed"


def test_a_node_that_cannot_be_started_is_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = threading.Semaphore(0)

    def no_room(_config: object) -> bool:
        tried.release()
        raise ConfigError("no room")

    monkeypatch.setattr("ems.vllm.node.ensure_node", no_room)
    settings, _ = read_settings("kv_both", {"socket": str(node.socket), "health_check_ms": 20}, {})
    side = Side(settings, MODEL)
    node.kill()

    assert tried.acquire(timeout=30)
    assert tried.acquire(timeout=30)
    assert "EMS cannot start a pool node: no room" in caplog.messages
    side.close()
