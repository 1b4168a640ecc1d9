"""The scheduler's side: tells vLLM which chunks the pool has, and the workers where they are.

What always holds: the scheduler's thread makes no call to the node; what it was told of is leased until its load is
over, the request has ended, or it was scheduled without a load; after a reset no chunk that was stored before is found.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from ems.errors import EmsError, PoolTimeout
from ems.pool.client.answers import Lease, Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.layout import REF_BYTES
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.epoch import KeyEpoch
from ems.vllm.offloading.keys import ChunkKeys, group_of, packed
from ems.vllm.offloading.search import Found, Group, search
from ems.vllm.offloading.transfer import PagesToLoad, PagesToStore

logger = init_logger("vllm.ems.offloading")

STEP_SECONDS = 0.002
"""How long one step waits for answers, all in all: most come sooner, and a request needs no second step then."""
AWAY_SECONDS = 5.0
"""How long nothing is asked of a node that did not answer."""
MOST_WAITING = 64
"""Requests that are looked up before they can be scheduled: each holds leases."""


class _Request:
    """What is known of a request's chunks; ``found`` is None until the answer is there."""

    def __init__(self, keys: ChunkKeys) -> None:
        self.keys = keys
        self.chunks: dict[int, list[bytes]] = {}
        """What is looked for; the request may grow meanwhile."""
        self.asked_at = 0.0
        self.answered = threading.Event()
        self.found: Found | None = None
        self.loading = False
        self.over = False
        """Whether nothing that was found is of use any more."""


class EmsOffloadingManager(OffloadingManager):
    """Chunks of ``groups`` in ``namespaces`` (by rank, then group) of the pool of ``settings``."""

    def __init__(
        self,
        settings: ConnectorSettings,
        identity: str,
        groups: Sequence[Group],
        namespaces: Sequence[Sequence[Namespace]],
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._tokens = {group.number: group.tokens for group in groups}
        self._namespaces = namespaces
        self._epoch = KeyEpoch(identity, settings.weights_version, partial(secrets.token_hex, 16))
        self._client = PoolClient(settings.socket, "vllm-offloading", credentials=settings.credentials)
        self._requests: dict[str, _Request] = {}
        self._ended: dict[str, _Request] = {}
        """Requests that ended before their loads."""
        self._waiting = 0
        """Requests that were looked up and hold what was found."""
        self._waited = 0.0
        self._failing = False
        self._away_until = 0.0
        self._inbox: queue.SimpleQueue[_Request | list[Lease] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ems-offloading-lookup", daemon=True)
        self._thread.start()

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._requests[req_context.req_id] = self._begun(req_context)
        return RequestOffloadingContext()

    def _begun(self, context: ReqContext) -> _Request:
        # vLLM writes down there where each chunk ends; its reader answers for one key at a time only.
        ends: dict[Any, int] = context._offload_key_positions  # noqa: SLF001
        return _Request(ChunkKeys(self._epoch.chain_name, self._tokens, ends))

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = self._requests.get(req_context.req_id)
        if request is None or request.over or not self._settings.loads:
            return LookupResult.MISS
        if not request.asked_at:
            if self._waiting >= MOST_WAITING:
                return LookupResult.RETRY
            self._waiting += 1
            request.asked_at, request.chunks = time.monotonic(), request.keys.chunks()
            self._inbox.put(request)
        if not request.answered.is_set():
            begun = time.monotonic()
            if self._waited < STEP_SECONDS:
                request.answered.wait(STEP_SECONDS - self._waited)
                self._waited += time.monotonic() - begun
            if not request.answered.is_set():
                late = begun - request.asked_at > self._settings.lookup_timeout
                return LookupResult.MISS if late else LookupResult.RETRY
        return LookupResult.HIT if request.found is not None and key in request.found.refs else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._waited = 0.0
        for request_id in (*context.new_req_ids, *context.preempted_req_ids):
            request = self._requests.get(request_id)
            if request is not None and not request.loading:
                self._ask_anew(request_id, request)

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.pop(req_context.req_id, None)
        if request is not None and request.loading:
            self._ended[req_context.req_id] = request  # its blocks are still being filled
        elif request is not None:
            self._let_go(request)

    def _ask_anew(self, request_id: str, request: _Request) -> None:
        """What was found is used, or is not going to be: should vLLM ask again, the pool is asked again."""
        self._let_go(request)
        self._requests[request_id] = _Request(request.keys)

    def _let_go(self, request: _Request) -> None:
        if request.asked_at and not request.over:
            self._waiting -= 1
            request.over = True
            self._inbox.put(request)  # behind the search that may still be under way

    # Loads and stores

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PagesToLoad:
        request = self._requests[req_context.req_id]
        found = request.found
        assert found is not None, "vLLM loads what a lookup found"
        request.loading = True
        by_group = self._by_group(keys)
        # A chunk that no lookup found is at no place: its load fails, and the engine computes it.
        nowhere = [bytes(REF_BYTES)] * len(self._namespaces)
        return PagesToLoad(
            found.node,
            [packed(map_keys(request.keys, of_group)) for of_group in by_group],
            [
                [packed([found.refs.get(key, nowhere)[rank] for key in of_group]) for of_group in by_group]
                for rank in range(len(self._namespaces))
            ],
        )

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if (ended := self._ended.pop(req_context.req_id, None)) is not None:
            self._let_go(ended)
        elif (request := self._requests.get(req_context.req_id)) is not None:
            # Should the load have failed, vLLM asks again, and the same pages would fail for ever.
            request.loading = False
            self._let_go(request)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        request = self._requests.get(req_context.req_id) or self._begun(req_context)
        wanted = list(keys) if self._settings.saves else []
        by_group = self._by_group(wanted)
        to_store = PagesToStore(
            [packed(map_keys(request.keys, of_group)) for of_group in by_group],
            [packed([request.keys.parent(key) for key in of_group]) for of_group in by_group],
        )
        return PrepareStoreOutput(wanted, to_store, [])

    def _by_group(self, keys: Collection[OffloadKey]) -> list[list[bytes]]:
        places = {group.number: place for place, group in enumerate(self._groups)}
        found: list[list[bytes]] = [[] for _ in self._groups]
        for key in keys:
            found[places[group_of(key)]].append(key)
        return found

    def reset_cache(self) -> None:
        """The weights may be others from now on."""
        self._epoch.reset()
        for request_id, request in list(self._requests.items()):
            self._let_go(request)
            ends = request.keys.ends
            self._requests[request_id] = _Request(ChunkKeys(self._epoch.chain_name, self._tokens, ends))

    def shutdown(self) -> None:
        self._inbox.put(None)
        self._client.close()

    # The thread

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            assert isinstance(item, _Request)
            try:
                self._handle(item)
            except Exception:  # the root of what this thread does, see below
                # Root of this thread: a defect here must cost hits, never the engine.
                logger.exception("EMS lookup failed, the request is computed")
            finally:
                item.answered.set()

    def _handle(self, request: _Request) -> None:
        if request.over:
            found, request.found = request.found, None
            for lease in found.leases if found is not None else ():
                self._client.release(lease)
            return
        found = Found()
        try:
            if time.monotonic() < self._away_until:
                raise PoolTimeout("the pool node did not answer a moment ago")
            search(found, self._groups, request.chunks, len(self._namespaces), partial(self._look, request))
        except EmsError as error:
            found.refs = {}
            if not self._failing:
                logger.warning("EMS cannot look for chunks, serving on without it: %s", error)
            self._failing = True
            if isinstance(error, PoolTimeout) and time.monotonic() >= self._away_until:
                self._away_until = time.monotonic() + AWAY_SECONDS
        else:
            self._failing = False
        if found.mixed:  # pages of two lives of a node cannot be loaded together
            found.refs = {}
        request.found = found

    def _look(self, request: _Request, place: int, rank: int, keys: list[bytes]) -> tuple[int, Lease | None]:
        wanted = packed(map_keys(request.keys, keys))
        hits = self._client.lookup(
            self._namespaces[rank][place], wanted, lease=True, timeout=self._settings.call_timeout
        )
        return hits.count, hits.lease


def map_keys(keys: ChunkKeys, of_vllm: Collection[bytes]) -> list[bytes]:
    """The pool's keys of vLLM's."""
    return [keys.pool_key(key) for key in of_vllm]
