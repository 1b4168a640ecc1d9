"""The scheduler side with a real node and made-up requests: what it tells, and that it leaves an ill pool alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ems.errors import PoolTimeout
from ems.pool.client import Namespace, PoolClient
from ems.pool.keys import NO_PARENT, KeyChain
from ems.vllm.metadata import StepReport
from ems.vllm.model import BlockModel
from ems.vllm.planes import Plane
from ems.vllm.scheduler import SchedulerSide
from ems.vllm.settings import read_settings
from ems.vllm.stats import EmsStats
from ems.vllm.transferred import Transferred
from tests.e2e.engines import Node, running_node, wait_for

BLOCK = 16
NAMESPACE = Namespace("default/model/layout/0.0", 256)
MODEL = BlockModel("default/model/layout", BLOCK, 64, 1, (Plane(NAMESPACE.name),))
TOKENS = list(range(4 * BLOCK))
Params = dict[str, Any]


class Blocks:
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self._ids,)


def request(name: str = "r", tokens: list[int] = TOKENS, params: Params | None = None, lora: object = None) -> Any:
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=tokens,
        all_token_ids=tokens,
        num_prompt_tokens=len(tokens),
        num_tokens=len(tokens),
        num_computed_tokens=len(tokens),
        num_in_flight_tokens=0,
        kv_transfer_params=params,
        lora_request=lora,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
    )


def step(one: Any, tokens: int) -> Any:
    """A step that computes ``tokens`` tokens of a new request."""
    data = SimpleNamespace(req_id=one.request_id, block_ids=([1, 2, 3, 4],), num_computed_tokens=0)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_new_reqs=[data],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={one.request_id: tokens},
        preempted_req_ids=None,
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


class Side(SchedulerSide):
    """A scheduler side that can be asked until it knows."""

    def found(self, one: Any, local: int = 0) -> int:
        answers: list[int] = []

        def answered() -> bool:
            tokens, _ = self.match(one, local)
            answers.extend([] if tokens is None else [tokens])
            return bool(answers)

        wait_for(answered, "the lookup is answered", 10)
        return answers[0]

    def end(self, one: Any) -> Params:
        told = self.finished(one, ([1, 2, 3, 4],))[1] or {}
        return dict(told.get("ems_explain", {}))

    def told(self) -> dict[str, Any]:
        stats = self.take_stats() or EmsStats()
        return dict(stats.data)


Make = Callable[..., Side]


@pytest.fixture
def make(node: Node) -> Iterator[Make]:
    made: list[Side] = []

    def side(role: str = "kv_both", **extra: object) -> Side:
        settings, said = read_settings(role, {"socket": str(node.socket), "autostart": False, **extra}, {})
        assert not said
        made.append(Side(settings, MODEL))
        return made[-1]

    yield side
    for each in made:
        each.close()


EXPLAIN = {"ems_explain": True}


def test_a_hit_is_explained_and_counted(make: Make, store: Callable[[int], None]) -> None:
    store(3)
    side, one = make(), request(params=EXPLAIN)
    side.on_new_request(one)
    assert side.found(one) == 3 * BLOCK
    side.allocated(one, Blocks([1, 2, 3, 4]), 3 * BLOCK)
    side.received(["r"], (), set())
    told = side.end(one)

    assert (told["from_pool"], told["loaded_blocks"], told["tier"]) == (48, 3, "DRAM")
    assert (told["found"], told["computed"], told["reason"]) == (48, 16, "absent")
    data = side.told()
    assert (data["lookups"], data["asked_tokens"], data["hit_tokens"], data["misses"]) == (1, 64, 48, {})
    assert data["state"]["usable"] is True


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


def test_with_an_adapter_a_request_stays_out(make: Make) -> None:
    side, one = make(), request("lora", params=EXPLAIN, lora=object())
    side.on_new_request(one)

    assert side.match(one, 0) == (0, False)
    assert side.end(one)["reason"] == "adapter"


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
    assert side.told()["state"]["usable"] is False


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

    assert save.tail is not None
    begin = (prompt_tokens + 2) // BLOCK * BLOCK
    expected = [*one.prompt_token_ids, 900, 901][begin:]
    assert save.tail.tokens == b"".join(token.to_bytes(4, "little") for token in expected)
