"""KV events: tells vLLM's event stream which blocks the pool holds for this engine, and which no longer.

A thread asks the node several times a second what it stored and removed, and where (:class:`ChangeFeed`).  So a block
is announced after the commit of its last page, whichever rank or engine made it, and removed when it was evicted.
Blocks carry the engine's own hashes.  vLLM sends the events with its steps; where it makes none, that thread does.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from logging import Logger
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventPublisher, KVCacheEvent, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from ems.errors import EmsError
from ems.pool.client.announced import Announced, BlockEvent, Chunk, Page
from ems.pool.client.answers import PageLocation, PoolChanges
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, KeyChain, page_keys
from ems.pool.media import EXTERNAL, MEDIA, MEMORY, asked_for
from ems.transfers.lane import Lane
from ems.vllm import compat
from ems.vllm.model import BlockModel
from ems.vllm.requests import Found, Save

_PLACES = {MEMORY: {"locality": "LOCAL"}, EXTERNAL: {"locality": "REMOTE", "ownership": "mooncake"}}
"""What else says where blocks are, where vLLM's events have it.  Consumers that do not know a medium go by this."""
_HAS_PLACES = {"locality", "ownership"} <= {*BlockStored.__struct_fields__}
POLL_SECONDS = 0.25
"""How often the node is asked."""
IDLE_SECONDS = 0.5
"""An engine that made no step for so long does not get round to publishing."""
PAUSE_SECONDS = 2.0
"""How long a node that did not answer, or refused to, is left alone."""


class ChangeFeed:
    """Reads a node's changes in ``namespaces``, the planes of a model in their order."""

    def __init__(self, client: PoolClient, namespaces: Sequence[str], logger: Logger) -> None:
        self._client = client
        self._namespaces = asked_for(namespaces)
        self._logger = logger
        self._place: PageLocation | None = None
        self.before_reading: Callable[[], None] = lambda: None
        """Called before each question."""
        self._stop = threading.Event()
        self._lane: Lane[None, PoolChanges | None] = Lane("ems-events", self._run)
        self._lane.start()

    def take(self) -> list[PoolChanges | None]:
        """What changed since the last call; None where more may have changed than is known."""
        return self._lane.results() if self._lane.news else []

    def close(self) -> None:
        self._stop.set()
        self._client.close()

    def _run(self) -> None:
        said = False
        while not self._stop.is_set():
            pause = PAUSE_SECONDS
            try:
                self.before_reading()
                self._read()
                pause = POLL_SECONDS
            except EmsError as error:
                # A node that is gone took its memory along.
                self._void()
                if not (error.transient or said):
                    said = True
                    self._logger.warning("EMS publishes no KV events of the pool: %s", error)
            except Exception:  # the root of this thread: a defect must cost events, never the engine
                self._logger.exception("EMS could not read what the pool stored and removed")
                self._void()
            self._stop.wait(pause)

    def _read(self) -> None:
        read = self._client.changes(self._place, self._namespaces)
        if read.lost:
            self._lane.ended(None)
        elif read.runs:
            self._lane.ended(read)
        self._place = read.place

    def _void(self) -> None:
        if self._place is not None:
            self._place = None
            self._lane.ended(None)


class BlockEvents:
    """The events of one engine, whose KV cache groups have ``specs``.

    ``hash_tokens`` says how many tokens one of its block hashes stands for.
    """

    def __init__(
        self, model: BlockModel, specs: Sequence[Any], hash_tokens: Callable[[], int], feed: ChangeFeed
    ) -> None:
        self._model = model
        self._specs = specs
        self._hash_tokens = hash_tokens
        self._feed = feed
        self._announced = Announced(len(model.planes))
        self._untaken: list[BlockEvent] = []
        self.publisher: EventPublisher | None = None
        """The engine's, once it has one."""
        self._taken_at = time.monotonic()
        self._lock = threading.Lock()
        """Around all of it: the engine's thread and the feed's meet here."""
        feed.before_reading = self._publish_when_idle

    def offered(self, request: Any, save: Save, extra: Sequence[object]) -> None:
        """The full chunks of ``save`` are being saved; ``extra`` has the extra keys of each block."""
        keys = b"".join(tail.key for tail in save.tails[: len(save.tails) - save.partial])
        for group in range(self._model.groups):
            held = save.block_ids[group][:: self._model.page_blocks]
            windowed = any(plane.window for plane in self._model.planes if plane.group == group)
            chunks = self._chunks(request, group, save.first, keys, extra)
            with self._lock:
                self._untaken += self._announced.offered(
                    one for one, there in zip(chunks, held, strict=False) if there or not windowed
                )

    def found(self, request: Any, found: Found, chain: KeyChain, extra: Sequence[object]) -> None:
        for group in range(self._model.groups):
            planes = [pages for pages in found.pages if self._model.planes[pages.plane].group == group]
            first = max((pages.first for pages in planes), default=found.chunks)
            keys = chain.packed(first, found.chunks)
            chunks = self._chunks(request, group, first, keys, extra)
            with self._lock:
                self._untaken += self._announced.found(chunks, time.monotonic())

    def reset(self) -> None:
        with self._lock:
            self._untaken += self._announced.withdraw()

    def take(self) -> list[KVCacheEvent]:
        with self._lock:
            self._taken_at = time.monotonic()
            return self._take()

    def _take(self) -> list[KVCacheEvent]:
        for changes in self._feed.take():
            self._untaken += self._announced.withdraw() if changes is None else self._announced.changed(changes.runs)
        events, self._untaken = self._untaken, []
        runs = _together(events)
        return [self._event(run) for run in runs if _HAS_PLACES or MEDIA[run[0].medium] != EXTERNAL]

    def _publish_when_idle(self) -> None:
        with self._lock:
            idle = self.publisher is not None and time.monotonic() - self._taken_at >= IDLE_SECONDS
            events = self._take() if idle else []
        if events and self.publisher is not None:
            with suppress(RuntimeError):  # the engine ends
                self.publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def close(self) -> None:
        self._feed.close()

    def _chunks(
        self, request: Any, group: int, first: int, keys: bytes, extra: Sequence[object]
    ) -> Iterator[tuple[Chunk, list[Page]]]:
        """The chunks from ``first`` on with their ``keys``, as far as the engine has hashed their blocks."""
        size, count = self._model.block_size, self._model.page_blocks
        step = size // self._hash_tokens()
        hashes = request.block_hashes
        lora = getattr(request, "lora_request", None)
        adapter = (lora.lora_int_id, lora.lora_name) if lora else None
        planes = [
            (number, plane.shards, page_keys(keys, plane.shards))
            for number, plane in enumerate(self._model.planes)
            if plane.group == group
        ]
        for position in range(len(keys) // KEY_BYTES):
            begin = (first + position) * count
            end = begin + count
            if end * step > len(hashes):
                return
            pages = [
                (plane, named[at * KEY_BYTES : (at + 1) * KEY_BYTES])
                for plane, shards, named in planes
                for at in range(position * shards, (position + 1) * shards)
            ]
            names = tuple(hashes[(begin + 1) * step - 1 : end * step : step])
            parent = hashes[begin * step - 1] if begin else None
            tokens = array("I", request.all_token_ids[begin * size : end * size]).tobytes()
            extras = tuple(extra[number] if number < len(extra) else None for number in range(begin, end))
            yield Chunk(group, names, parent, tokens, extras, adapter), pages

    def _event(self, events: list[BlockEvent]) -> KVCacheEvent:
        chunks, first = [event.chunk for event in events], events[0].chunk
        names = [maybe_convert_block_hash(name) for chunk in chunks for name in chunk.names]
        medium = MEDIA[events[0].medium]
        place = _PLACES.get(medium, {}) if _HAS_PLACES else {}
        if not events[0].stored:
            return BlockRemoved(block_hashes=names, medium=medium, group_idx=first.group, **place)
        spec = self._specs[first.group]
        return BlockStored(
            block_hashes=names,
            parent_block_hash=None if first.parent is None else maybe_convert_block_hash(first.parent),
            token_ids=array("I", b"".join(chunk.tokens for chunk in chunks)).tolist(),
            block_size=self._model.block_size,
            lora_id=first.adapter[0] if first.adapter else None,
            lora_name=first.adapter[1] if first.adapter else None,
            medium=medium,
            extra_keys=compat.event_extra_keys([keys for chunk in chunks for keys in chunk.extra]),
            group_idx=first.group,
            kv_cache_spec_kind=str(get_kv_cache_spec_kind(spec).value),
            kv_cache_spec_sliding_window=getattr(spec, "sliding_window", None),
            **place,
        )


def _together(events: Sequence[BlockEvent]) -> Iterator[list[BlockEvent]]:
    """Runs that one event of vLLM can carry: chunks of a group in a row, or removed ones of a group, in one medium."""
    run: list[BlockEvent] = []
    for news in events:
        last, chunk = run[-1] if run else news, news.chunk
        follows = not news.stored or last.chunk.names[-1] == chunk.parent
        alike = (last.stored, last.chunk.group, last.medium) == (news.stored, chunk.group, news.medium)
        if run and not (alike and follows):
            yield run
            run = []
        run.append(news)
    if run:
        yield run


def publishes_events(vllm_config: Any) -> bool:
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)
