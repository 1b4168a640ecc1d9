"""The scheduler's side: tells vLLM which chunks the pool has, and the workers where they are.

vLLM's key of a chunk is a hash of its own; here a chunk has the key that ``EmsStoreConnector`` gives it, made of the
request's tokens, so that engines of both kinds share pages.  What always holds: the scheduler's thread makes no call to
the node; what it was told of is leased until its load is over, the request has ended, or it was scheduled without a
load; after a reset no chunk that was stored before is found.
"""

from __future__ import annotations

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
    get_offload_group_idx,
)

from ems.errors import EmsError
from ems.pool.client.answers import Lease, Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.pool.layout import REF_BYTES
from ems.transfers.lane import Lane
from ems.vllm import compat
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.epoch import KeyEpoch
from ems.vllm.model import BlockModel
from ems.vllm.offloading.search import Found, Group, search
from ems.vllm.offloading.worker import ChunkRun, PagesToLoad, PagesToStore
from ems.vllm.requests import Pages
from ems.vllm.tokens import extra_keys, token_ids

logger = init_logger("vllm.ems.offloading")

STEP_SECONDS = 0.002
"""How long one step waits for answers, all in all: most come sooner, and a request needs no second step then."""
MOST_WAITING = 64
"""Requests that are looked up before they can be scheduled: each holds leases."""


class _Lookup:
    """A question about a request's chunks; ``found`` is None until the answer is there."""

    def __init__(self, request: Any, chain_name: str, groups: Sequence[Group]) -> None:
        self.asked_at = time.monotonic()
        self.answered = threading.Event()
        self.found: Found | None = None
        self.over = False
        """Whether nothing that was found is of use any more; set on the scheduler's thread."""
        self._request = request
        self._tokens = token_ids(request, 0, request.num_tokens)  # of this moment: the request may grow
        self.chains = {group.tokens: KeyChain(chain_name, group.tokens) for group in groups}

    def name_chunks(self) -> None:
        for size, chain in self.chains.items():
            chain.extend(self._tokens, extra_keys(self._request, size))


class _Request:
    """What is known of one of vLLM's requests."""

    def __init__(self, request: Any, chain_name: str) -> None:
        self.request = request
        self.chain_name = chain_name
        self.chains: dict[int, KeyChain] = {}
        self.lookup: _Lookup | None = None
        self.loading = False

    def chain(self, size: int, chunks: int) -> KeyChain:
        """Keys of at least so many chunks of ``size`` tokens."""
        chain = self.chains.setdefault(size, KeyChain(self.chain_name, size))
        if len(chain) < chunks:
            chain.extend(token_ids(self.request, 0, chunks * size), extra_keys(self.request, size), chunks)
        return chain


class EmsOffloadingManager(OffloadingManager):
    """Chunks of ``groups`` of ``model`` in the pool of ``settings``."""

    def __init__(self, settings: ConnectorSettings, model: BlockModel, groups: Sequence[Group]) -> None:
        self._settings = settings
        self._planes = model.planes
        self._namespaces = [Namespace(name, 0) for name in model.namespaces]  # who only looks needs no size of a page
        self._groups = {group.number: group for group in groups}
        self._epoch = KeyEpoch(model.identity, settings.weights_version, partial(secrets.token_hex, 16))
        self._client = PoolClient(settings.socket, "vllm-offloading", credentials=settings.credentials)
        for name, facts in model.descriptions().items():
            self._client.describe(name, facts)
        self._requests: dict[str, _Request] = {}
        self._ended: dict[str, _Request] = {}
        """Requests that ended before their loads."""
        self._waiting = 0
        """Requests that were looked up and hold what was found."""
        self._waited = 0.0
        self._failing = False
        self._lane: Lane[_Lookup, None] = Lane("ems-offloading-lookup", self._run)
        self._lane.start()

    # Requests

    def arrived(self, request: Any) -> None:
        """The connector's ``on_new_request``, of which vLLM tells a manager no tokens."""
        self._requests[request.request_id] = _Request(request, self._epoch.chain_name)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._epoch.empty = False
        request = self._requests.get(req_context.req_id)
        chunk = self._chunk(key, req_context)
        if request is None or chunk is None or not self._settings.loads:
            return LookupResult.MISS
        lookup = request.lookup
        if lookup is None:
            if self._waiting >= MOST_WAITING:
                return LookupResult.RETRY
            self._waiting += 1
            lookup = request.lookup = _Lookup(request.request, request.chain_name, list(self._groups.values()))
            self._lane.put(lookup)
        if lookup.over:
            return LookupResult.MISS
        if not lookup.answered.is_set():
            begun = time.monotonic()
            if self._waited < STEP_SECONDS:
                lookup.answered.wait(STEP_SECONDS - self._waited)
                self._waited += time.monotonic() - begun
            if not lookup.answered.is_set():
                late = begun - lookup.asked_at > self._settings.lookup_timeout
                return LookupResult.MISS if late else LookupResult.RETRY
        group = self._groups[get_offload_group_idx(key)]
        hit = lookup.found is not None and lookup.found.has(group, chunk)
        return LookupResult.HIT if hit else LookupResult.MISS

    def allocated(self, request: Any, _blocks: Any, external: int) -> None:
        """The connector's ``update_state_after_alloc``: a request that goes on without a load needs no lookup any more.

        vLLM tells a manager of requests that begin, and not of those that go on after a preemption.
        """
        known = self._requests.get(request.request_id)
        if known is not None and not external:
            self._ask_anew(known)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        return compat.HOST_HIT

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._waited = 0.0
        for request_id in (*context.new_req_ids, *context.preempted_req_ids):
            request = self._requests.get(request_id)
            if request is not None and not request.loading:
                self._ask_anew(request)

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.pop(req_context.req_id, None)
        if request is not None and request.loading:
            self._ended[req_context.req_id] = request  # its blocks are still being filled
        elif request is not None:
            self._let_go(request)

    def _ask_anew(self, request: _Request) -> None:
        """What was found is used, or is not going to be: should vLLM ask again, the pool is asked again."""
        self._let_go(request)
        request.lookup = None

    def _let_go(self, request: _Request) -> None:
        lookup = request.lookup
        if lookup is not None and not lookup.over:
            self._waiting -= 1
            lookup.over = True
            self._lane.put(lookup)  # behind the search that may still be under way

    def _chunk(self, key: OffloadKey, context: ReqContext) -> int | None:
        """The number of a chunk; None for a part of one, which vLLM asks for by a key of its own."""
        size = self._groups[get_offload_group_idx(key)].tokens
        end = context.get_offload_key_position(key)
        return None if end is None or end % size else end // size - 1

    # Loads and stores

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PagesToLoad:
        request = self._requests[req_context.req_id]
        lookup = request.lookup
        assert lookup is not None, "vLLM loads what a lookup found"
        assert lookup.found is not None, "vLLM loads what a lookup found"
        request.loading = True
        pages: list[list[Pages]] = []
        chunks = self._by_group(keys, req_context)
        for group in self._groups.values():
            wanted = chunks.get(group.number, [])
            pages.append([self._pages(lookup, group, plane, wanted) for plane in group.planes])
        return PagesToLoad(lookup.found.node, pages)

    def _pages(self, lookup: _Lookup, group: Group, plane: int, chunks: Sequence[int]) -> Pages:
        assert lookup.found is not None
        shards, chain, refs = self._planes[plane].shards, lookup.chains[group.tokens], lookup.found.refs
        keys = b"".join(chain.packed(chunk, chunk + 1) for chunk in chunks)
        # A chunk that no lookup found is at no place: its load fails, and the engine computes it.
        nowhere = bytes(REF_BYTES * shards)
        return Pages(
            plane, chunks[0] if chunks else 0, keys, b"".join(refs.get((plane, chunk), nowhere) for chunk in chunks)
        )

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        request = self._ended.pop(req_context.req_id, None) or self._requests.get(req_context.req_id)
        if request is not None:
            # Should the load have failed, vLLM asks again, and the same pages would fail for ever.
            request.loading = False
            self._let_go(request)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        self._epoch.empty = False
        request = self._requests.get(req_context.req_id)
        if request is None or not self._settings.saves:
            return PrepareStoreOutput([], PagesToStore([]), [])
        wanted = [key for key in keys if self._chunk(key, req_context) is not None]
        runs: dict[tuple[int, int, int], list[int]] = {}
        for number, chunks in self._by_group(wanted, req_context).items():
            for first, end in _runs(chunks):
                runs.setdefault((first, end, self._groups[number].tokens), []).append(number)
        to_store = [
            ChunkRun(first, chain.parent(first), chain.tails(first, end), tuple(groups))
            for (first, end, size), groups in sorted(runs.items())
            for chain in [request.chain(size, end)]
        ]
        return PrepareStoreOutput(wanted, PagesToStore(to_store), [])

    def _by_group(self, keys: Collection[OffloadKey], context: ReqContext) -> dict[int, list[int]]:
        """Numbers of chunks in order, by group."""
        found: dict[int, list[int]] = {}
        for key in keys:
            chunk = self._chunk(key, context)
            if chunk is not None:
                found.setdefault(get_offload_group_idx(key), []).append(chunk)
        return {number: sorted(chunks) for number, chunks in found.items()}

    # Weights

    def reset_cache(self) -> None:
        """The engine's own cache was emptied, and the weights may be others from now on."""
        self._epoch.reset()
        self._epoch.empty = True
        self._begin_epoch()

    def weights_declared(self, version: str) -> None:
        if not self._epoch.declare(version):
            logger.warning(
                "EMS shares nothing with other engines: weights version %s was declared while the engine holds KV of "
                "other weights; reset its cache with reset_connector=True, then declare the version",
                version,
            )
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        for request_id, request in list(self._requests.items()):
            if request.chain_name != self._epoch.chain_name and not request.loading:
                self._let_go(request)
                self._requests[request_id] = _Request(request.request, self._epoch.chain_name)

    def shutdown(self) -> None:
        self._lane.end()
        self._client.close()

    # The thread

    def _run(self) -> None:
        while (lookup := self._lane.next()) is not None:
            try:
                self._handle(lookup)
            except Exception:  # the root of what this thread does, see below
                # Root of this thread: a defect here must cost hits, never the engine.
                logger.exception("EMS lookup failed, the request is computed")
            finally:
                lookup.answered.set()

    def _handle(self, lookup: _Lookup) -> None:
        if lookup.over:
            found, lookup.found = lookup.found, None
            for lease in found.leases if found is not None else ():
                self._client.release(lease)
            return
        found = Found()
        try:
            lookup.name_chunks()
            search(found, list(self._groups.values()), self._planes, lookup.chains, self._look)
        except EmsError as error:
            found.refs = {}
            if not self._failing:
                logger.warning("EMS cannot look for chunks, serving on without it: %s", error)
            self._failing = True
        else:
            self._failing = False
        if found.mixed:  # pages of two lives of a node cannot be loaded together
            found.refs = {}
        lookup.found = found

    def _look(self, plane: int, keys: bytes) -> tuple[int, Lease | None]:
        hits = self._client.lookup(self._namespaces[plane], keys, lease=True, timeout=self._settings.call_timeout)
        return hits.count, hits.lease


def _runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Where runs of consecutive numbers begin and end."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and runs[-1][1] == chunk:
            runs[-1] = (runs[-1][0], chunk + 1)
        else:
            runs.append((chunk, chunk + 1))
    return runs
