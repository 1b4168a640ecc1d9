"""Lookups beside the scheduler: answers, waiting for a hand-off, faults, and nothing that waits for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ems.errors import EmsError, PoolUnavailable
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import NO_PARENT, KeyChain
from ems.pool.layout import REF_BYTES
from ems.pool.reasons.words import Reason
from ems.pool.tiers.answers import Stored
from ems.pool.tiers.directory import FolderBlobs
from ems.pool.tiers.packs import PackTier
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.lookups import LookupAnswer, LookupJob, Lookups
from ems.vllm.planes import Plane
from ems.vllm.reporting.observer import Observer
from ems.vllm.requests import NOTHING
from ems.vllm.waiting import Waiting
from tests.e2e.engines import Node, first, running_node, wait_for
from tests.kit.tiers import KEYS

NAMESPACE = Namespace("default/model/layout", 256)
TOKENS = list(range(64))


def nothing_else(_size: int) -> Sequence[object]:
    return ()


def test_what_a_tier_has_is_found(tmp_path: Path) -> None:
    tier = PackTier("dir", FolderBlobs(tmp_path), KEYS)
    chain = KeyChain(NAMESPACE.name, 16)
    chain.extend(TOKENS)
    pages = [Stored(one, NO_PARENT, None, memoryview(bytes(256))) for one in chain]
    tier.store(NAMESPACE.name, pages)
    with running_node("--size", "8MB", "--tier", f"dir:{tmp_path}") as node:
        wait_for(lambda: node.stats()["bytes_touched"] == 8 << 20, "the memory is touched")
        wait_for(lambda: node.stats()["tiers"][0]["tier_scanned"], "the tier is known")
        side = Side(node)
        side.ask()
        answer = side.answer()
        side.close()
    assert answer.found.tokens == 64


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "8MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 8 << 20, "the memory is touched")
        yield running


class Side:
    """A scheduler's lookups and a writer beside it."""

    def __init__(
        self,
        node: Node,
        start_node: Callable[[], None] = lambda: None,
        *,
        call_timeout: float = 60.0,
        handoff_timeout: float = 2.0,
        started: bool = True,
    ) -> None:
        self.client = PoolClient(node.socket, "scheduler")
        self.writer = PoolClient(node.socket, "writer")
        self.watch = SimpleNamespace(
            usable=True, seconds_a_token=0.0, failed=lambda _error: False, start_node=start_node
        )
        self.lookups = Lookups(
            ConnectorSettings(
                saves=True,
                socket=node.socket,
                directory=node.socket.parent,
                handoff_timeout=handoff_timeout,
                tier_timeout=60.0,
                call_timeout=call_timeout,
            ),
            self.client,
            [Plane(NAMESPACE.name)],
            16,
            NAMESPACE.name,
            cast("Observer", self.watch),
        )
        if started:
            self.lookups.start()
        self.chain = KeyChain(NAMESPACE.name, 16)
        self.chain.extend(TOKENS)

    def ask(self, expected: int = 0, extra: Callable[[int], Sequence[object]] = nothing_else) -> None:
        self.lookups.ask(LookupJob("r", TOKENS, extra, Waiting(time.monotonic(), expected)))

    def answer(self) -> LookupAnswer:
        return first(self.lookups.answers, "the lookup is answered", 60)

    def close(self) -> None:
        self.lookups.close()
        self.client.close()
        self.writer.close()


@pytest.fixture
def side(node: Node) -> Iterator[Side]:
    made = Side(node)
    yield made
    made.close()


def test_the_answer_to_one_request_is_waited_for_and_others_are_taken_along(side: Side) -> None:
    for name in ("other", "r"):
        side.lookups.ask(LookupJob(name, TOKENS, nothing_else, Waiting(time.monotonic(), 0)))
    answers = side.lookups.answers(60.0, "r")
    assert [answer.request_id for answer in answers] == ["other", "r"]
    assert side.lookups.answers(0.001, "r") == []


def test_a_request_that_the_scheduler_asks_for_at_once_is_looked_at_once(node: Node) -> None:
    side = Side(node, started=False)
    side.ask()
    side.lookups.hurry("r")
    before = node.counters["lookups"]
    side.lookups.start()
    assert side.answer().found == NOTHING
    side.lookups.hurry("r")
    side.close()
    assert node.counters["lookups"] == before + 1


def test_a_lookup_leases_what_it_finds(side: Side, node: Node) -> None:
    side.writer.commit(side.writer.reserve(NAMESPACE, NO_PARENT, side.chain[0:3]))
    side.ask()
    answer = side.answer()

    assert (answer.found.tokens, answer.found.chunks) == (48, 3)
    assert answer.chain is not None
    assert list(answer.chain) == list(side.chain)
    assert node.stats()["leases"] == 1
    (lease,) = answer.found.leases
    side.lookups.release(lease)
    wait_for(lambda: node.stats()["leases"] == 0, "the lease is released")


def store_tail(side: Side, tokens: list[int]) -> None:
    """Store a page with ``tokens`` behind three full blocks."""
    tail = side.chain.tail(3, tokens)
    keys: list[bytes] = [*side.chain[0:3], tail.key]
    side.writer.commit(side.writer.reserve(NAMESPACE, NO_PARENT, keys, tails=[None, None, None, tail]))


def test_a_part_of_a_block_is_found_by_the_tokens_that_it_shares(side: Side, node: Node) -> None:
    store_tail(side, [*TOKENS[48:53], 1, 2, 3])
    store_tail(side, [*TOKENS[48:57], 7])
    store_tail(side, [9, 9, 9])
    side.ask()
    found = side.answer().found

    assert (found.tokens, found.chunks) == (57, 3)
    assert found.pages[0].keys[48:] == side.chain.tail(3, [*TOKENS[48:57], 7]).key
    assert len(found.pages[0].packed_refs) == 4 * REF_BYTES
    assert node.stats()["leases"] == 2
    for lease in found.leases:
        side.lookups.release(lease)
    wait_for(lambda: node.stats()["leases"] == 0, "the leases are released")


def test_a_part_of_a_block_is_not_found_under_another_name(side: Side) -> None:
    """Equal tokens behind another prefix, or with another adapter, are other state."""
    store_tail(side, TOKENS[48:57])
    side.ask(extra=lambda _size: [None, None, None, ("lora", "adapter")])

    assert side.answer().found.tokens == 48


def test_what_else_names_a_block_changes_its_key(side: Side) -> None:
    side.ask(extra=lambda _size: [None, ("lora", "adapter"), None, None])
    chain = side.answer().chain
    assert chain is not None
    keys, plain = list(chain), list(side.chain)

    assert keys[0] == plain[0]
    assert all(one != other for one, other in zip(keys[1:], plain[1:], strict=True))


def test_a_handoff_gets_the_blocks_once_they_are_committed(side: Side) -> None:
    reserved = side.writer.reserve(NAMESPACE, NO_PARENT, side.chain[0:4])
    side.ask(expected=64)
    with pytest.raises(pytest.fail.Exception):
        wait_for(lambda: bool(side.lookups.answers()), "no answer while the blocks are written", 0.3)
    side.writer.commit(reserved)

    assert side.answer().found.tokens == 64


def test_a_handoff_that_nobody_asks_for_waits_in_the_queue_and_is_over_when_its_request_is(node: Node) -> None:
    side = Side(node, handoff_timeout=0.05)
    side.writer.reserve(NAMESPACE, NO_PARENT, side.chain[0:4])
    side.ask(expected=64)
    side.lookups.ask(LookupJob("other", TOKENS, nothing_else, Waiting(time.monotonic(), 64)))
    with pytest.raises(pytest.fail.Exception):
        wait_for(lambda: bool(side.lookups.answers()), "no answer while nobody asks", 0.2)
    side.lookups.forget("other")
    side.lookups.hurry("r")
    assert (answer := side.answer()).request_id == "r"
    assert answer.found == NOTHING
    side.lookups.forget("r")
    before = node.counters["lookups"]
    with pytest.raises(pytest.fail.Exception):
        wait_for(lambda: node.counters["lookups"] > before, "nothing is asked any more", 0.2)
    side.close()


def test_more_that_is_stored_while_an_answer_waits_is_answered_again(side: Side) -> None:
    side.ask()
    assert side.answer().found == NOTHING
    side.writer.commit(side.writer.reserve(NAMESPACE, NO_PARENT, side.chain[0:4]))
    assert side.answer().found.tokens == 64


def test_a_handoff_whose_writer_dies_gives_up(side: Side) -> None:
    side.writer.reserve(NAMESPACE, NO_PARENT, side.chain[0:4])
    side.ask(expected=64)
    side.writer.close()

    assert side.answer().found == NOTHING


def test_others_are_answered_while_a_handoff_waits(side: Side) -> None:
    side.writer.reserve(NAMESPACE, NO_PARENT, side.chain[0:4])
    side.ask(expected=64)
    side.lookups.ask(LookupJob("other", TOKENS[:16], nothing_else, Waiting(time.monotonic(), 0)))

    assert side.answer().request_id == "other"


def test_a_dead_node_is_a_miss_and_is_started_again(node: Node) -> None:
    started: list[bool] = []
    side = Side(node, start_node=lambda: started.append(True))
    try:
        node.kill()
        side.ask()
        answer = side.answer()
        assert answer.found == NOTHING
        assert answer.chain is not None
        assert len(answer.chain) == 4
        wait_for(lambda: started == [True], "the node is started")
    finally:
        side.close()


def test_a_node_that_hangs_is_a_miss_within_the_deadline(node: Node, calls_take_a_minute: float) -> None:
    side = Side(node, call_timeout=0.5)
    side.ask()
    side.answer()
    pid = int(node.stats()["pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        side.ask()
        assert side.answer().found == NOTHING
        assert time.monotonic() - began < calls_take_a_minute
    finally:
        os.kill(pid, signal.SIGCONT)
        side.close()


def test_who_asks_for_it_learns_of_a_gap(side: Side) -> None:
    """The first block is missing, the last is there."""
    side.writer.commit(side.writer.reserve(NAMESPACE, side.chain[2:3][0], side.chain[3:4]))
    for explain in (False, True):
        side.lookups.ask(LookupJob("r", TOKENS, nothing_else, Waiting(time.monotonic(), 0), explain=explain))
        answer = side.answer()
        assert answer.found == NOTHING
        assert answer.reason is (Reason.GAP if explain else Reason.NEVER_STORED)
        assert answer.detail == ("never_stored" if explain else "")


def test_a_plain_miss_is_no_gap(side: Side) -> None:
    side.writer.commit(side.writer.reserve(NAMESPACE, NO_PARENT, side.chain[0:2]))
    side.lookups.ask(LookupJob("r", TOKENS, nothing_else, Waiting(time.monotonic(), 0), explain=True))
    answer = side.answer()

    assert (answer.found.chunks, answer.reason, answer.detail) == (2, Reason.NEVER_STORED, "")


def test_a_block_that_was_given_up_says_so_and_when(side: Side) -> None:
    side.writer.abort(side.writer.reserve(NAMESPACE, NO_PARENT, side.chain[0:2]))
    side.lookups.ask(LookupJob("r", TOKENS, nothing_else, Waiting(time.monotonic(), 0), explain=True))
    answer = side.answer()

    assert (answer.found, answer.reason) == (NOTHING, Reason.UNFINISHED)
    assert answer.detail.endswith(" s ago")


def test_a_fault_of_the_pool_is_told_and_is_the_reason_of_the_miss(
    side: Side, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[EmsError] = []

    def failed(error: EmsError) -> bool:
        told.append(error)
        return True

    side.watch.failed = failed
    node.kill()
    side.ask()

    assert side.answer().reason is Reason.LOOKUP_FAILED
    assert [type(error) for error in told] == [PoolUnavailable]
    assert caplog.messages == []


def test_a_defect_costs_one_hit_and_not_the_thread(side: Side) -> None:
    def broken(_size: int) -> Sequence[object]:
        raise RuntimeError("broken")

    side.ask(extra=broken)
    assert side.answer() == LookupAnswer("r", None, NOTHING, Reason.LOOKUP_FAILED)
    side.ask()
    assert side.answer().chain is not None


def test_another_beginning_of_the_chain_finds_nothing_that_was_stored(side: Side) -> None:
    side.writer.commit(side.writer.reserve(NAMESPACE, NO_PARENT, side.chain[0:4]))
    side.lookups.chain_name = f"{NAMESPACE.name}/salt"
    side.ask()

    assert side.answer().found == NOTHING


def test_an_answer_to_a_request_that_is_over_is_nobodys(side: Side, node: Node) -> None:
    """Not even that of another request of the same name."""
    side.writer.commit(side.writer.reserve(NAMESPACE, NO_PARENT, side.chain[0:4]))
    side.ask()
    wait_for(lambda: node.stats()["leases"] > 0, "the lookup has its answer")
    side.lookups.forget("r")

    assert side.lookups.answers(0.5) == []
    wait_for(lambda: node.stats()["leases"] == 0, "what was promised is given back")


def test_who_waits_is_looked_at_while_others_come_in(node: Node) -> None:
    side = Side(node, started=False)
    side.writer.reserve(NAMESPACE, NO_PARENT, side.chain[0:4])
    side.ask(expected=64)
    looks: list[str] = []
    handle = side.lookups.handle

    def one_more(item: LookupJob, now: float) -> None:
        if isinstance(item, LookupJob):
            looks.append(item.request_id)
            handle(item, now)
            item.look_at = 0.0  # overdue
            if len(looks) < 40:  # there is always another one
                side.lookups.ask(LookupJob(f"{len(looks)}", TOKENS, nothing_else, Waiting(now, 0), over=True))

    side.lookups.handle = one_more  # type: ignore[method-assign, assignment]
    side.lookups.start()
    wait_for(lambda: len(looks) >= 40, "all were looked at", 60)
    side.close()
    assert looks[:40].count("r") >= 15
