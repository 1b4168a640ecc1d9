"""The scheduler's side: tells vLLM which chunks the pool has, and the workers where they are.

What is found, waited for and leased is decided where ``EmsStoreConnector`` has it decided: by the lookups and the book
of requests.  vLLM's key of a chunk is a hash of its own; here a chunk has the key that ``EmsStoreConnector`` gives it,
made of the request's tokens, so that engines of both kinds share pages.  What always holds: the scheduler's thread
makes no call to the node; what it was told of is leased until its load is over, the request has ended, or it was
scheduled without a load; after a reset no chunk that was stored before is found.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import msgspec
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

from ems.pool.keys import KEY_BYTES, KeyChain
from ems.pool.layout import REF_BYTES
from ems.vllm import compat
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.epoch import KeyEpoch, declare
from ems.vllm.lookups import LookupJob, Lookups
from ems.vllm.model import BlockModel
from ems.vllm.node import make_client
from ems.vllm.offloading.worker import ChunkRun, PagesToLoad, PagesToStore
from ems.vllm.planes import Plane
from ems.vllm.reporting.observer import Observer
from ems.vllm.requests import NEVER, NOTHING, Ask, Found, Load, Pages, Phase, Release, RequestBook, of_chunks
from ems.vllm.tokens import extra_keys, token_ids

logger = init_logger("vllm.ems.offloading")

ANSWER_SECONDS = 0.002
"""How long one step waits for an answer: most come sooner, and a request needs no second step then."""


class EmsOffloadingManager(OffloadingManager):
    """Chunks of the KV cache groups ``groups`` of ``model`` in the pool of ``settings``.

    With ``drops_last`` vLLM may leave out the last chunk that it finds, as it does of a draft model's layers.
    """

    def __init__(
        self, settings: ConnectorSettings, model: BlockModel, groups: Sequence[int], *, drops_last: bool = False
    ) -> None:
        self._settings = settings
        self._model = model
        self._groups = {group: [plane for plane in model.planes if plane.group == group] for group in groups}
        self._epoch = KeyEpoch(model.identity, settings.weights_version, partial(secrets.token_hex, 16))
        self._client = make_client(settings, "vllm-offloading")
        for name, facts in model.descriptions().items():
            self._client.describe(name, facts)
        self._observer = Observer(settings, model.block_size, logger)
        self._book = RequestBook(settings, model.block_size, model.planes, model.groups, page_blocks=model.page_blocks)
        planes = [self._with_one_before(plane) if drops_last else plane for plane in model.planes]
        self._lookups = Lookups(
            settings, self._client, planes, model.chunk_tokens, self._epoch.chain_name, self._observer, tails=False
        )
        self._lookups.start()
        self._requests: dict[str, Any] = {}
        self._chains: dict[tuple[str, int], KeyChain] = {}
        """Keys of what is stored, by request and tokens of a chunk."""
        self._found: dict[str, Found | None] = {}
        """What was found of the requests that vLLM asked for in this step; None: it has to ask again."""
        self._allocated: set[str] = set()
        """Requests that got blocks in this step."""
        self._waited = False
        """Whether this step has waited for an answer."""

    def _with_one_before(self, plane: Plane) -> Plane:
        """A plane of a window that begins a chunk earlier, so that it is whole without the last one."""
        seen = plane.window and not plane.state
        return msgspec.structs.replace(plane, window=plane.window + self._chunk_tokens(plane)) if seen else plane

    def _chunk_tokens(self, plane: Plane) -> int:
        return self._model.chunk_tokens // plane.parts

    # Requests

    def arrived(self, request: Any) -> None:
        """The connector's ``on_new_request``, of which vLLM tells a manager no tokens."""
        self._requests[request.request_id] = request
        self._enter(request)

    def _enter(self, request: Any) -> None:
        if self._observer.usable:
            self._do(self._book.arrive(request.request_id, request.num_tokens, 0))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._epoch.empty = False
        request, chunk = self._requests.get(req_context.req_id), self._chunk(key, req_context)
        if request is None or chunk is None:
            return LookupResult.MISS
        if request.request_id not in self._found:
            self._found[request.request_id] = self._match(request)
        found = self._found[request.request_id]
        if found is None:
            return LookupResult.RETRY
        group = get_offload_group_idx(key)
        parts = [pages for pages in found.pages if self._model.planes[pages.plane].group == group]
        hit = parts and all(0 <= chunk - pages.first < len(pages.keys) // KEY_BYTES for pages in parts)
        return LookupResult.HIT if hit else LookupResult.MISS

    def _match(self, request: Any) -> Found | None:
        """What the pool has of a request; None: ask again."""
        request_id = request.request_id
        if self._book.get(request_id) is None:
            self._enter(request)
        self._lookups.hurry(request_id)
        known = self._book.get(request_id)
        waits = known is not None and known.phase is Phase.ASKED and not self._waited
        self._waited |= waits
        for answer in self._lookups.answers(ANSWER_SECONDS if waits else 0.0):
            if answer.chain is None:
                self._do(self._book.leave_out(answer.request_id))
            else:
                self._do(self._book.answered(answer.request_id, answer.chain, answer.found))
        if not self._observer.usable:
            self._do(self._book.decline(request_id))
        if self._client.waits_out_restart:
            self._book.restarted_at = time.monotonic()
        tokens, effects = self._book.match(request_id, request.num_tokens, 0, time.monotonic())
        self._do(effects)
        if tokens is None:
            self._lookups.hurry(request_id)
            return None
        known = self._book.get(request_id)
        return NOTHING if known is None else known.found

    def allocated(self, request: Any, _blocks: Any, external: int) -> None:
        """The connector's ``update_state_after_alloc``: a request that goes on without a load needs no lookup any more.

        vLLM tells a manager of requests that begin, and not of those that go on after a preemption.
        """
        self._allocated.add(request.request_id)
        if not external:
            self._do(self._book.allocated(request.request_id, (), 0))

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        return compat.HOST_HIT

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for request_id in context.preempted_req_ids:
            if request_id not in self._allocated:  # else it goes on in this very step
                self._book.preempted(request_id)
        self._found.clear()
        self._allocated.clear()
        self._waited = False
        self._book.begin_step()
        if self._observer.usable:
            self._do(self._book.start_lookups())

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._requests.pop(req_context.req_id, None) is not None:
            self._do(self._book.finished(req_context.req_id))
            self._chains = {name: chain for name, chain in self._chains.items() if name[0] != req_context.req_id}

    def _do(self, effects: Sequence[Ask | Load | Release]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                request = self._requests[effect.request_id]
                tokens = token_ids(request, 0, request.num_tokens)  # of this moment: the request may grow
                extra = partial(extra_keys, request)
                self._lookups.ask(LookupJob(effect.request_id, tokens, extra, effect.expected, time.monotonic()))
            elif isinstance(effect, Release):
                self._lookups.release(effect.lease)
        for request_id in self._book.take_over():
            self._lookups.forget(request_id)

    def _chunk(self, key: OffloadKey, context: ReqContext) -> int | None:
        """The number of a chunk; None for a part of one, which vLLM asks for by a key of its own."""
        size = self._chunk_tokens(self._groups[get_offload_group_idx(key)][0])
        end = context.get_offload_key_position(key)
        return None if end is None or end % size else end // size - 1

    # Loads and stores

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PagesToLoad:
        known = self._book.get(req_context.req_id)
        assert known is not None, "vLLM loads what a lookup found"
        assert known.found.leases, "vLLM loads what a lookup found"
        self._do(self._book.allocated(req_context.req_id, (), known.found.tokens))
        chunks = self._by_group(keys, req_context)
        pages = [
            [
                self._pages(of_plane, chunks.get(group, []))
                for of_plane in known.found.pages
                if self._model.planes[of_plane.plane].group == group
            ]
            for group in self._groups
        ]
        return PagesToLoad(known.found.leases[0].node, pages)

    def _pages(self, found: Pages, chunks: Sequence[int]) -> Pages:
        shards, keys, refs = self._model.planes[found.plane].shards, b"", b""
        for chunk in chunks:
            at = max(chunk - found.first, -1)
            key, places = of_chunks(found.keys, found.packed_refs, slice(at, at + 1), shards)
            # A chunk that no lookup found is at no place: its load fails, and the engine computes it.
            keys += key or bytes(KEY_BYTES)
            refs += places or bytes(REF_BYTES * shards)
        return Pages(found.plane, chunks[0] if chunks else 0, keys, refs)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        # Should the load have failed, vLLM asks again, and the same pages would fail for ever: nothing is found now.
        self._do(self._book.received(req_context.req_id, set()))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        self._epoch.empty = False
        known = self._book.get(req_context.req_id)
        if known is None or known.next_save == NEVER or not self._settings.saves:
            return PrepareStoreOutput([], PagesToStore([]), [])
        wanted = [key for key in keys if self._chunk(key, req_context) is not None]
        runs: dict[tuple[int, int, int], list[int]] = {}
        for group, chunks in self._by_group(wanted, req_context).items():
            for first, end in _runs(chunks):
                runs.setdefault((first, end, self._chunk_tokens(self._groups[group][0])), []).append(group)
        to_store = [
            ChunkRun(first, chain.parent(first), chain.tails(first, end), tuple(groups))
            for (first, end, size), groups in sorted(runs.items())
            for chain in [self._chain(req_context.req_id, size, end)]
        ]
        return PrepareStoreOutput(wanted, PagesToStore(to_store), [])

    def _chain(self, request_id: str, size: int, chunks: int) -> KeyChain:
        """Keys of at least so many chunks of ``size`` tokens."""
        chain = self._chains.setdefault((request_id, size), KeyChain(self._epoch.chain_name, size))
        if len(chain) < chunks:
            request = self._requests[request_id]
            chain.extend(token_ids(request, 0, chunks * size), extra_keys(request, size), chunks)
        return chain

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
        if declare(self._epoch, version, logger):
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._lookups.chain_name = self._epoch.chain_name
        self._chains.clear()
        self._do(self._book.reset())

    def shutdown(self) -> None:
        self._observer.close()
        self._lookups.close()
        self._client.close()


def _runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Where runs of consecutive numbers begin and end."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and runs[-1][1] == chunk:
            runs[-1] = runs[-1][0], chunk + 1
        else:
            runs.append((chunk, chunk + 1))
    return runs
