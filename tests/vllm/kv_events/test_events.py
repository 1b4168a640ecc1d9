"""KV events with a real node: after the commit, taken back after the eviction, with the engine's own hashes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventPublisherFactory
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from ems.errors import PoolRefused
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, NO_PARENT, KeyChain, page_keys
from ems.vllm.hooks import note_publisher
from ems.vllm.kv_events import events as module
from ems.vllm.kv_events.events import BlockEvents, ChangeFeed
from ems.vllm.model import BlockModel
from ems.vllm.planes import Plane
from ems.vllm.requests import Found, Pages, Save
from tests.e2e.engines import Node, running_node, wait_for

BLOCK = 16
PAGE = 1 << 20
TOKENS = list(range(4 * BLOCK + 5))
HASHES = [bytes([number]) * 32 for number in range(1, 5)]
NAMES = [maybe_convert_block_hash(BlockHash(one)) for one in HASHES]
"""As the engine's own events call these blocks."""
REQUEST = SimpleNamespace(block_hashes=HASHES, all_token_ids=TOKENS)
PLAIN = (Plane("a/model/x/0.0"),)
SHARDED = (Plane("a/model/y/0.0", shards=2), Plane("a/model/y/1.0", group=1, window=20))
logger = logging.getLogger("test.events")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "9MB", "--segment-size", "3MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 9 << 20, "the memory is touched")
        yield running


class Engine:
    """The events of an engine, and a writer beside it."""

    def __init__(self, node: Node, planes: tuple[Plane, ...], groups: int, hash_tokens: int) -> None:
        self.model = BlockModel("a/model", BLOCK, 64, groups, planes)
        self.feed = ChangeFeed(PoolClient(node.socket, "events"), self.model.namespaces, logger)
        of: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
        specs = [FullAttentionSpec(**of), SlidingWindowSpec(**of, sliding_window=20)][:groups]
        self.events = BlockEvents(self.model, specs, lambda: hash_tokens, self.feed)
        self.writer = PoolClient(node.socket, "writer")
        self.chain = KeyChain(self.model.identity, BLOCK)
        self.chain.extend(TOKENS)
        self.taken: list[Any] = []
        wait_for(lambda: self.feed._place is not None, "the feed has begun")

    def save(self, first: int, end: int, *, dropped: int = 0) -> Save:
        ids = [*range(first + 1, end + 1)]
        groups = [ids, [0] * dropped + ids[dropped:]][: self.model.groups]
        return Save(1, "r", first, self.chain.parent(first), self.chain.tails(first, end), groups)

    def commit(self, plane: int, first: int, end: int) -> None:
        one = self.model.planes[plane]
        raw = page_keys(self.chain.packed(first, end), one.shards)
        keys = [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
        self.writer.commit(self.writer.reserve(Namespace(one.namespace, PAGE), NO_PARENT, keys))

    def take(self, count: int) -> list[Any]:
        """The next ``count`` events."""

        def came() -> bool:
            self.taken += self.events.take()
            return len(self.taken) >= count

        wait_for(came, f"{count} events come")
        taken, self.taken = self.taken, []
        return taken

    def close(self) -> None:
        self.events.close()
        self.writer.close()


Make = Callable[..., Engine]


@pytest.fixture
def make(node: Node) -> Iterator[Make]:
    made: list[Engine] = []

    def engine(
        planes: tuple[Plane, ...] = PLAIN, groups: int = 1, hash_tokens: int = BLOCK, of: Node | None = None
    ) -> Engine:
        made.append(Engine(of or node, planes, groups, hash_tokens))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def test_blocks_are_announced_once_they_are_committed(make: Make) -> None:
    engine = make()
    engine.events.offered(REQUEST, engine.save(1, 3), ())
    assert engine.events.take() == []
    engine.commit(0, 1, 3)
    (event,) = engine.take(1)

    assert isinstance(event, BlockStored)
    assert event.block_hashes == NAMES[1:3]
    assert event.parent_block_hash == NAMES[0]
    assert event.token_ids == TOKENS[BLOCK : 3 * BLOCK]
    assert (event.block_size, event.medium, event.group_idx) == (BLOCK, "CPU", 0)
    assert (event.lora_id, event.lora_name, event.extra_keys) == (None, None, None)
    assert event.kv_cache_spec_kind == "full_attention"


def test_an_engine_that_makes_no_steps_publishes_all_the_same(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)
    engine = make()
    engine.events.offered(REQUEST, engine.save(0, 2), ())
    published: list[Any] = []
    engine.events.publisher = SimpleNamespace(publish=published.append)
    engine.commit(0, 0, 2)
    wait_for(lambda: bool(published), "the events are published")

    (event,) = published[0].events
    assert event.block_hashes == NAMES[:2]
    assert abs(published[0].ts - time.time()) < 3600
    assert engine.events.take() == []


def test_an_engine_that_makes_steps_publishes_with_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 1000.0)
    engine = make()
    engine.events.offered(REQUEST, engine.save(0, 2), ())
    engine.events.publisher = SimpleNamespace(publish=lambda _: pytest.fail("it was published twice"))
    engine.commit(0, 0, 2)

    assert len(engine.take(1)) == 1


def test_the_publisher_of_the_engine_is_noted_once() -> None:
    noted: list[Any] = []
    create = vars(EventPublisherFactory)["create"]
    note_publisher(noted.append)
    made = EventPublisherFactory.create(None, 3)

    assert noted == [made]
    assert vars(EventPublisherFactory)["create"] is create
    assert EventPublisherFactory.create(None) is not made
    assert noted == [made]


def test_blocks_on_disk_are_told_of_as_such(make: Make, tmp_path: Path) -> None:
    with running_node("--size", "9MB", "--segment-size", "3MB", "--tier", f"dir:{tmp_path}/tier") as node:
        engine = make(of=node)
        engine.events.offered(REQUEST, engine.save(0, 2), ())
        engine.commit(0, 0, 2)
        events = engine.take(2)

    assert [(event.medium, event.block_hashes) for event in events] == [("CPU", NAMES[:2]), ("STORAGE", NAMES[:2])]
    if module._HAS_PLACES:
        assert [event.locality for event in events] == ["LOCAL", None]
    assert [event.token_ids for event in events] == [TOKENS[: 2 * BLOCK]] * 2


def test_what_else_names_a_block_is_told(make: Make) -> None:
    engine = make()
    tagged = hasattr(kv_cache_utils, "to_event_extra_keys")
    engine.events.offered(REQUEST, engine.save(0, 1), [(("salt", "s"),) if tagged else ("s",)])
    engine.commit(0, 0, 1)
    (event,) = engine.take(1)

    assert event.parent_block_hash is None
    assert event.extra_keys == [("s",)]


def test_an_evicted_block_is_taken_back(make: Make, node: Node) -> None:
    """The pool has room for six pages: eight others push the first ones out."""
    engine = make()
    engine.events.offered(REQUEST, engine.save(0, 2), ())
    engine.commit(0, 0, 2)
    assert len(engine.take(1)[0].block_hashes) == 2
    others = KeyChain("others", 1)
    others.extend(range(8))
    for number in range(8):
        reserved = engine.writer.reserve(Namespace(PLAIN[0].namespace, PAGE), NO_PARENT, others[number : number + 1])
        engine.writer.commit(reserved)
    removed: list[Any] = []

    def gone() -> bool:
        removed.extend(name for event in engine.events.take() for name in event.block_hashes)
        return len(removed) == 2

    wait_for(gone, "both blocks are taken back")
    assert set(removed) == set(NAMES[:2])


def test_a_block_is_whole_when_all_pages_of_its_group_are(make: Make) -> None:
    """Two ranks store the first group; the engine dropped the first block of the window."""
    engine = make(SHARDED, groups=2)
    engine.events.offered(REQUEST, engine.save(0, 2, dropped=1), ())
    engine.commit(1, 0, 2)
    (window,) = engine.take(1)
    assert (window.block_hashes, window.group_idx) == ([NAMES[1]], 1)
    assert (window.kv_cache_spec_kind, window.kv_cache_spec_sliding_window) == ("sliding_window", 20)
    engine.commit(0, 0, 2)
    (full,) = engine.take(1)

    assert (full.block_hashes, full.group_idx) == (NAMES[:2], 0)


def test_what_a_lookup_found_is_announced(make: Make) -> None:
    engine = make(SHARDED, groups=2)
    found = Found(3 * BLOCK, 3, (Pages(0, 0, b"", b""), Pages(1, 2, b"", b"")), ())
    engine.events.found(REQUEST, found, engine.chain, ())
    full, window = engine.take(2)

    assert (full.block_hashes, full.group_idx) == (NAMES[:3], 0)
    assert (window.block_hashes, window.group_idx) == ([NAMES[2]], 1)
    assert window.parent_block_hash == NAMES[1]


def test_an_engine_that_hashes_finer_names_a_block_by_its_last_hash(make: Make) -> None:
    engine = make(hash_tokens=BLOCK // 2)
    engine.events.offered(REQUEST, engine.save(0, 3), ())
    engine.commit(0, 0, 3)
    (event,) = engine.take(1)

    # Four hashes are two blocks; the third has no name yet.
    assert event.block_hashes == [NAMES[1], NAMES[3]]


def test_after_a_reset_everything_is_taken_back(make: Make) -> None:
    engine = make()
    engine.events.offered(REQUEST, engine.save(0, 2), ())
    engine.commit(0, 0, 2)
    engine.take(1)
    engine.events.reset()
    (event,) = engine.take(1)

    assert isinstance(event, BlockRemoved)
    assert (event.block_hashes, event.medium, event.group_idx) == (NAMES[:2], "CPU", 0)


def test_when_the_node_is_gone_its_blocks_are_taken_back(make: Make, node: Node) -> None:
    engine = make()
    engine.events.offered(REQUEST, engine.save(0, 2), ())
    engine.commit(0, 0, 2)
    engine.take(1)
    node.kill()
    (event,) = engine.take(1)

    assert isinstance(event, BlockRemoved)
    assert event.block_hashes == NAMES[:2]


def test_a_node_that_refuses_its_changes_is_asked_seldom_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[float] = []

    def refuse(*_given: object) -> None:
        asked.append(time.monotonic())
        raise PoolRefused("the node has no such thing")

    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.2)
    feed = ChangeFeed(SimpleNamespace(changes=refuse, close=lambda: None), [], logger)  # type: ignore[arg-type]
    wait_for(lambda: len(asked) == 3, "the node is asked three times")
    feed.close()

    assert asked[2] - asked[0] >= 2 * 0.2
    assert caplog.messages == ["EMS publishes no KV events of the pool: the node has no such thing"]
    assert feed.take() == []
