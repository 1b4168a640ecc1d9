"""The scheduler's side: tells vLLM which chunks the pool has, and the workers where they are.

What is found, waited for and leased is decided where ``EmsStoreConnector`` has it decided: by the lookups and the book
of requests.  vLLM's key of a chunk is a hash of its own; here a chunk has the key that ``EmsStoreConnector`` gives it,
made of the request's tokens, so that engines of both kinds share pages.  What always holds: the scheduler's thread
makes no call to the node; what it was told of is leased until its load is over, the request has ended, or it was
scheduled without a load; after a reset no chunk that was stored before is found.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
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
from ems.vllm.model import BlockModel
from ems.vllm.offloading.worker import ChunkRun, PagesToLoad, PagesToStore
from ems.vllm.planes import Plane
from ems.vllm.requests import NEVER, NOTHING, Found, Pages, of_chunks
from ems.vllm.scheduler_shell import SchedulerShell
from ems.vllm.tokens import extra_keys

SHORT_CHUNKS = 256
"""Of a prompt whose lookup takes a millisecond or two."""


class EmsOffloadingManager(SchedulerShell, OffloadingManager):
    """Chunks of the KV cache groups ``groups`` of ``model`` in the pool of ``settings``.

    With ``drops_last`` vLLM may leave out the last chunk that it finds, as it does of a draft model's layers.
    """

    def __init__(
        self, settings: ConnectorSettings, model: BlockModel, groups: Sequence[int], *, drops_last: bool = False
    ) -> None:
        planes = [_with_one_before(plane, model.chunk_tokens) if drops_last else plane for plane in model.planes]
        super().__init__(settings, model, "vllm-offloading", planes=planes, tails=False)
        self._groups = {group: [plane for plane in model.planes if plane.group == group] for group in groups}
        self._chains: dict[str, dict[int, KeyChain]] = {}
        """Keys of what is stored, by request and tokens of a chunk."""
        self._found: dict[str, Found | None] = {}
        """What was found of the requests that vLLM asked for in this step; None: it has to ask again."""
        self._allocated: set[str] = set()
        """Requests that got blocks in this step."""
        self._loading: set[str] = set()

    # Requests

    def arrived(self, request: Any) -> None:
        """The connector's ``on_new_request``, of which vLLM tells a manager no tokens."""
        self._requests[request.request_id] = request
        self._enter(request)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._epoch.empty = False
        request, chunk = self._requests.get(req_context.req_id), self._chunk(key, req_context)
        if request is None or chunk is None:
            return LookupResult.MISS
        if request.request_id not in self._found:
            # Nobody tells whether the engine computes something: what takes long to name is not waited for.
            short = request.num_tokens <= SHORT_CHUNKS * self._model.chunk_tokens
            tokens, known = self._match(request, idle=short), self._book.get(request.request_id)
            present = NOTHING if known is None else known.found
            self._found[request.request_id] = None if tokens is None else present
        found = self._found[request.request_id]
        if found is None:
            return LookupResult.RETRY
        group = get_offload_group_idx(key)
        parts = [pages for pages in found.pages if self._model.planes[pages.plane].group == group]
        hit = parts and all(0 <= chunk - pages.first < len(pages.keys) // KEY_BYTES for pages in parts)
        return LookupResult.HIT if hit else LookupResult.MISS

    def allocated(self, request: Any, _blocks: Any, external: int) -> None:
        """The connector's ``update_state_after_alloc``: a request that goes on without a load needs no lookup any more.

        vLLM tells a manager of requests that begin, and not of those that go on after a preemption.
        """
        self._allocated.add(request.request_id)
        self._epoch.empty = False
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
        self._step_waits.next_step()
        self._book.begin_step()
        if self._observer.usable:
            self._do(self._book.start_lookups())

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._requests.pop(req_context.req_id, None) is not None:
            self._do(self._book.finished(req_context.req_id))
            self._chains.pop(req_context.req_id, None)

    def _chunk_tokens(self, group: int) -> int:
        return self._model.chunk_tokens // self._groups[group][0].parts

    def _chunk(self, key: OffloadKey, context: ReqContext) -> int | None:
        """The number of a chunk; None for a part of one, which vLLM asks for by a key of its own."""
        size = self._chunk_tokens(get_offload_group_idx(key))
        end = context.get_offload_key_position(key)
        return None if end is None or end % size else end // size - 1

    # Loads and stores

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PagesToLoad:
        known = self._book.get(req_context.req_id)
        assert known is not None, "vLLM loads what a lookup found"
        assert known.found.leases, "vLLM loads what a lookup found"
        self._do(self._book.allocated(req_context.req_id, (), known.found.tokens))
        self._loading.add(req_context.req_id)
        chunks = self._by_group(keys, req_context)
        pages = []
        for group in self._groups:
            of_group = (one for one in known.found.pages if self._model.planes[one.plane].group == group)
            pages.append([self._pages(one, chunks.get(group, [])) for one in of_group])
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
        self._loading.discard(req_context.req_id)
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
                runs.setdefault((first, end, self._chunk_tokens(group)), []).append(group)
        to_store = [
            ChunkRun(first, chain.parent(first), chain.tails(first, end), tuple(groups))
            for (first, end, size), groups in sorted(runs.items())
            for chain in [self._chain(req_context.req_id, size, end)]
        ]
        return PrepareStoreOutput(wanted, PagesToStore(to_store), [])

    def _chain(self, request_id: str, size: int, chunks: int) -> KeyChain:
        """Keys of at least so many chunks of ``size`` tokens."""
        chain = self._chains.setdefault(request_id, {}).setdefault(size, KeyChain(self._epoch.chain_name, size))
        if len(chain) < chunks:
            request = self._requests[request_id]
            chain.extend(request.all_token_ids, extra_keys(request, size), chunks)
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

    def bind(self, block_pool: Any) -> None:
        """The connector's ``bind_gpu_block_pool``."""
        compat.around_reset(block_pool, lambda: None, self._emptied)

    def _emptied(self) -> None:
        self._epoch.empty = True

    def reset_cache(self) -> None:
        """The engine's own cache was emptied, and the weights may be others from now on."""
        for request_id in self._loading:
            # VLLM has forgotten its transfers, and tells of no end of theirs.
            self._do(self._book.received(request_id, set()))
        self._loading.clear()
        self.reset()

    def _begin_epoch(self) -> None:
        self._chains.clear()
        super()._begin_epoch()

    def shutdown(self) -> None:
        self.close()


def _with_one_before(plane: Plane, chunk_tokens: int) -> Plane:
    """A plane of a window that begins a chunk earlier, so that it is whole without the last one."""
    seen = plane.window and not plane.state
    return msgspec.structs.replace(plane, window=plane.window + chunk_tokens // plane.parts) if seen else plane


def _runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Where runs of consecutive numbers begin and end."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and runs[-1][1] == chunk:
            runs[-1] = runs[-1][0], chunk + 1
        else:
            runs.append((chunk, chunk + 1))
    return runs
