"""The connector inside vLLM's scheduler: carries between vLLM's hooks, the request book and the pool.

No hook waits for the node; one waits for a lookup, a moment and as :mod:`ems.vllm.waiting` says.  vLLM calls all hooks
on one thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from vllm.distributed.kv_events import KVCacheEvent
from vllm.logger import init_logger

from ems.errors import ConfigError
from ems.pool.keys import KeyChain
from ems.pool.reasons.words import Reason
from ems.vllm import compat
from ems.vllm.adapters import Adapters
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.kv_events.events import BlockEvents
from ems.vllm.lookups import LookupAnswer, LookupJob
from ems.vllm.metadata import QUIET, StepMetadata, StepReport
from ems.vllm.model import BlockModel
from ems.vllm.reporting.stats import EmsStats
from ems.vllm.requests import Adapter, Load, Save, Span
from ems.vllm.scheduler_shell import SchedulerShell
from ems.vllm.tokens import WithoutAdapter, extra_keys
from ems.vllm.waiting import Waiting

logger = init_logger("vllm.ems.scheduler")

_Name = TypeVar("_Name", str, int)

ANNOUNCED = "ems_tokens"
"""Key in ``kv_transfer_params``: how many tokens of the prompt the prefill side stores."""
NEVER_SECONDS = float("inf")
MAX_OFFERS = 200
"""How often in a row a hit is offered to an engine that runs nothing.  vLLM reserves more blocks for a load than for
computing, so it may never accept a load of nearly all blocks."""
IN_STEP_SECONDS = 0.02
"""How long a step waits for the load of the engine's only request.  A request that arrives meanwhile waits as long.  A
load between steps would cost one more step, of some milliseconds."""
RESET_SECONDS = 0.1
"""How long pending saves may keep a reset of the engine's cache, or its pause, waiting."""


class SchedulerSide(SchedulerShell):
    """Hooks that vLLM's scheduler calls."""

    def __init__(
        self,
        settings: ConnectorSettings,
        model: BlockModel,
        workers: int = 1,
        *,
        step_tokens: int = 0,
        may_load_in_step: bool = True,
        in_lockstep: bool = False,
        events: BlockEvents | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__(settings, model, "vllm-scheduler", workers=workers, step_tokens=step_tokens)
        # A load within a step can report its failure by block only.
        may_load_in_step = may_load_in_step and not model.fails_whole
        self._loads_in_step = settings.load_async is False and may_load_in_step
        self._loads_alone_in_step = settings.load_async is None and workers == 1 and may_load_in_step
        self.block_pool: Any = None
        """VLLM's own, to hold blocks and to forget some; it is given before the first request."""
        self._loading_in_step: set[str] = set()
        """Requests whose loads are part of a step that is not over."""
        self._events = events
        self._adapters = adapters
        """The engine's LoRA adapters; without it requests with one are not stored."""
        self._loads: list[Load] = []
        self._saves: list[Save] = []
        self._held: dict[int, tuple[str, list[Any]]] = {}
        """Requests and blocks of saves, by number, until all workers say that they read these no more."""
        self._given_back: set[int] = set()
        """Saves whose blocks went back before that: they end before the next step."""
        self._saved: Counter[int] = Counter()
        self._call_off_at = NEVER_SECONDS
        """When saves that keep a pause of the engine waiting are called off."""
        self.end_saves: Callable[[float], None] = lambda _seconds: None
        """Ends the saves of a worker in this process within so many seconds; nothing where it is in another."""
        self._invalid: set[int] = set()
        self._workers = workers
        self._in_lockstep = in_lockstep
        """Whether other engines make each step together with this one."""
        self._running: set[str] = set()
        """Requests that the engine computes."""
        self._turned_away = False
        """Whether the request that vLLM looks at has to wait, and with it all behind it.

        VLLM would go through its whole queue for requests that it has to ask for again, some microseconds for each.  It
        ends its walk at a request for which there are no blocks, so there are none until it looks at the next one.
        """
        self._loaded_from = ""
        """The node that the last load which succeeded was from."""
        self._reported: Counter[str] = Counter()
        self._untaken = 0
        """Offers in a row that an engine without anything else to do did not take."""

    def bind(self, block_pool: Any) -> None:
        """VLLM's ``bind_gpu_block_pool``."""
        self.block_pool = block_pool
        compat.around_reset(block_pool, self._about_to_reset, self._emptied)
        compat.around_free_blocks(block_pool, lambda: self._turned_away)

    # Requests

    def on_new_request(self, request: Any) -> None:
        """A request came in: its lookup begins at once."""
        self._observer.arrived(request)
        self._enter(request)

    def _enter(self, request: Any) -> None:
        if not self._observer.usable:
            self._observer.requests.left_out(request.request_id, Reason.POOL_DOWN)
            return
        if not self._settings.loads:
            self._observer.requests.left_out(request.request_id, Reason.DOES_NOT_LOAD)
        self._requests[request.request_id] = request
        expected = self._announced(request)
        adapter = self._adapter(request.lora_request) if request.lora_request else None
        if request.lora_request and adapter is None:
            self._observer.requests.left_out(request.request_id, Reason.ADAPTER)
            self._book.arrive(request.request_id, 0, 0)
            return
        self._do(self._book.arrive(request.request_id, request.num_prompt_tokens, expected, adapter))

    def _adapter(self, lora: Any) -> Adapter | None:
        if self._adapters is None:
            logger.warning_once("EMS cannot tell which weights LoRA adapters have with this release of vLLM")
            return None
        try:
            if getattr(lora, "load_inplace", False):
                self.adapter_loaded(lora)
            return self._adapters.find(lora)
        except ConfigError as error:
            logger.warning_once("EMS does not store what a LoRA adapter computes: %s", str(error))
            return None

    def adapter_loaded(self, lora: Any) -> None:
        """The engine has read an adapter's files (vLLM's ``add_lora``), perhaps in place of others of that number."""
        if self._adapters is None or not self._adapters.loaded(lora):
            return
        for request_id, request in self._requests.items():
            if request.lora_request and request.lora_request.lora_int_id == lora.lora_int_id:
                self._adapters.mixed(request.lora_request)
                self._do(self._book.leave_out(request_id))

    def _announced(self, request: Any) -> int:
        """How many tokens the request's prefill stores; 0 if another connector hands over its blocks."""
        params = request.kv_transfer_params or {}
        announced = None if params.get("remote_engine_id") else params.get(ANNOUNCED)
        return min(announced, request.num_prompt_tokens) if isinstance(announced, int) and announced > 0 else 0

    def match(self, request: Any, local: int) -> tuple[int | None, bool]:
        """VLLM's ``get_num_new_matched_tokens``."""
        request_id = request.request_id
        if local and self._loading_in_step:
            # VLLM finds blocks that a step loads at once.  Should the load fail, whoever shares them must not have
            # been computed behind them.
            return None, False
        self._turned_away = False
        if getattr(request, "skip_reading_prefix_cache", False):
            # It wants what all of its tokens are computed for, as log-probabilities of its prompt do.
            if self._book.get(request_id) is None:
                self._enter(request)
            self._decline(request_id, Reason.NOT_LOADED)
            return 0, False
        found = self._match(request, local, idle=not self._running)
        self._turned_away = found is None and self._book.full
        if self._turned_away:
            return 0, False
        if found:
            handoff = self._announced(request) > 0
            reason = self._observer.why_not(request_id, local, found, time.monotonic(), handoff=handoff)
            # While it has something to do it may take it later.
            self._untaken = 0 if self._running or self._book.loading else self._untaken + 1
            if reason is None and self._untaken > MAX_OFFERS:
                reason = Reason.NOT_LOADED
            if reason is not None:
                self._decline(request_id, reason)
                found = 0
        self._observer.requests.matched(request_id, local, found)
        known = self._book.get(request_id)
        return found, bool(found) and not (known is not None and known.in_step)

    def _in_step(self, request_id: str, local: int, now: float) -> bool:
        """Also where a load within the step would keep only this request waiting, and only for a moment."""
        if self._loads_in_step:
            return True
        if not self._loads_alone_in_step or self._running or len(self._requests) > 1:
            return False
        known = self._book.get(request_id)
        if known is None or not known.found.leases or known.found.leases[0].node != self._loaded_from:
            # The first load of a node's pages may have to reach the node, and to map its memory.
            return False
        seconds = self._observer.cost.load_seconds(known.found.tokens - local, now)
        return seconds is not None and seconds <= IN_STEP_SECONDS

    def _has_time(self, request: Any) -> bool:
        """Not where loads or other engines wait for the step, or the request comes from a prefill elsewhere."""
        handed = self._announced(request) or (request.kv_transfer_params or {}).get("remote_engine_id")
        return not (self._in_lockstep or self._loads or self._book.loading or handed)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """VLLM's ``update_state_after_alloc``."""
        self._untaken = 0
        if external > 0:
            self._observer.requests.loading(request.request_id, external)
        block_ids = blocks.get_block_ids() if external > 0 else ()
        self._do(self._book.allocated(request.request_id, block_ids, external))

    def finished(self, request: Any, block_ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """VLLM's ``request_finished``: that it need not keep the request's blocks, and what a decode should know."""
        request_id = request.request_id
        ran = request_id in self._running
        self._running.discard(request_id)
        self._take_answers()
        if self._settings.save_answers and ran:
            # One that did not run has blocks that another connector was to fill, and perhaps has not.
            self._save_rest(request, block_ids)
        stored = self._book.stored_tokens(request_id)
        self._do(self._book.finished(request_id))
        self._requests.pop(request_id, None)
        held = {block.block_id for of, blocks in self._held.values() if of == request_id for block in blocks}
        if held:
            logger.info("Delaying free of %d blocks for request %s", len(held), request_id)
        params = request.kv_transfer_params or {}
        answer = self._observer.finished(request)
        if params.get("do_remote_decode") and self._settings.saves:
            # Nothing but a key of our own: vLLM ends where two connectors of one engine answer with the same one.
            answer[ANNOUNCED] = min(stored, request.num_prompt_tokens)
        return False, answer or None

    # Blocks that are being saved

    @property
    def saving(self) -> bool:
        """Whether the engine should make steps, even empty ones, in which workers say that saves are over."""
        return bool(self._held)

    def _begin_save(self, save: Save) -> None:
        """Begin ``save`` with the next step.

        Its blocks are held by references of our own until it is over: until then nobody else gets them when the
        request ends, is preempted, or drops them behind a sliding window.  A reset of the cache makes us give them up.
        """
        blocks = list(map(self.block_pool.blocks.__getitem__, filter(None, chain.from_iterable(save.block_ids))))
        self.block_pool.touch(blocks)
        self._held[save.number] = save.request_id, blocks
        self._saves.append(save)

    def _let_go(self, number: int) -> None:
        self.block_pool.free_blocks(reversed(self._held.pop(number, ("", []))[1]))

    def _drop_saves(self) -> None:
        """Forget saves of which no worker was told."""
        for save in self._saves:
            self._let_go(save.number)
        self._saves.clear()

    def _give_back(self) -> None:
        """Free all held blocks: the engine resets its cache, or its pause has waited long enough."""
        self._drop_saves()
        for number, (_, blocks) in self._held.items():
            self.block_pool.free_blocks(reversed(blocks))
            blocks.clear()
            self._given_back.add(number)
        self.end_saves(RESET_SECONDS)

    def _about_to_reset(self) -> None:
        """Give up what only saves hold; the engine keeps its cache, and the saves may go on, where others hold some."""
        ours = Counter(block.block_id for _, blocks in self._held.values() for block in blocks)
        if all(block.ref_cnt <= ours[block.block_id] for block in self.block_pool.blocks if not block.is_null):
            self._give_back()

    def _emptied(self) -> None:
        self._epoch.empty = True
        if self._adapters is not None:
            requests = self._requests.values()
            self._adapters.emptied(request.lora_request for request in requests if request.lora_request)

    def paused(self, *, paused: bool) -> None:
        """The engine takes no more requests and waits for what is under way, or it goes on."""
        self._call_off_at = time.monotonic() + RESET_SECONDS if paused else NEVER_SECONDS

    def _save_rest(self, request: Any, block_ids: Sequence[list[int]]) -> None:
        """Save what the answer added."""
        self._book.paused = not self._observer.usable
        # Where steps overlap, a step that was launched may still write behind these tokens.
        span = self._book.last_save(request.request_id, block_ids, compat.computed_tokens(request))
        if span is not None:
            self._begin_save(self._named(request, span))

    # Steps

    def build_metadata(self, output: Any) -> StepMetadata:
        """VLLM's ``build_connector_meta``."""
        tokens = output.num_scheduled_tokens
        if self._lookups.news:
            self._take_answers()
        waits = any(load.in_step for load in self._loads) if self._loads else False
        leisure = not output.scheduled_new_reqs
        self._observer.step_began(tokens, time.monotonic(), loads=waits, leisure=leisure)
        usable = self._observer.usable
        self._book.paused = not usable
        preempted = getattr(output, "preempted_req_ids", None)
        self._running.update(tokens)
        self._turned_away = False
        self._step_waits.next_step()
        self._book.begin_step()
        if tokens or self._loads:
            self._epoch.empty = False
        if preempted:
            self._preempted(preempted, tokens)
        call_off = bool(self._held) and self._calls_off()
        if usable and self._book.unasked:
            self._do(self._book.start_lookups())
        for data in output.scheduled_new_reqs:
            self._plan_save(output, data.req_id, data.block_ids, data.num_computed_tokens, replace=True)
        cached = output.scheduled_cached_reqs
        following = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=False)
        for request_id, new_ids, computed in following:
            resumed = request_id in cached.resumed_req_ids
            self._plan_save(output, request_id, new_ids or (), computed, replace=resumed)
        for request_id, states in compat.states_handed_over(output).items():
            self._plan_states(request_id, states)
        if tokens and not (self._loads or self._saves or call_off):
            return QUIET
        loads, saves = self._loads, self._saves
        self._loads, self._saves = [], []
        return StepMetadata(loads, saves, call_off, idle=not tokens)

    def _calls_off(self) -> bool:
        """Whether saves must end before this step, because their blocks went back.

        Also before one that computes nothing: a load, of another connector too, may fill these blocks.
        """
        if time.monotonic() >= self._call_off_at:
            self._give_back()
        given_back, self._given_back = self._given_back, set()
        for number in given_back:
            self._held.pop(number, None)
        return bool(given_back)

    def _preempted(self, request_ids: Iterable[str], scheduled: Container[str]) -> None:
        for request_id in request_ids:
            self._book.preempted(request_id)
            if request_id in scheduled:
                # It goes on in this very step (a reset of the cache does that): nothing is looked up for it.
                self._do(self._book.decline(request_id))
            else:
                self._running.discard(request_id)

    def _plan_save(
        self, output: Any, request_id: str, block_ids: Sequence[Sequence[int]], computed: int, *, replace: bool
    ) -> None:
        after = computed + output.num_scheduled_tokens.get(request_id, 0)
        span = self._book.scheduled(request_id, block_ids, after, replace=replace)
        if span is not None:
            self._begin_save(self._named(self._requests[request_id], span))

    def _plan_states(self, request_id: str, states: Sequence[tuple[int, int, int]]) -> None:
        """Save states of state-space layers: KV cache group, block, and the tokens that each is of."""
        request, by_tokens = self._requests.get(request_id), dict[int, dict[int, int]]()
        for group, block, tokens in states:
            if request and block and (self._settings.save_answers or tokens <= request.num_prompt_tokens):
                by_tokens.setdefault(tokens, {})[group] = block
        for tokens, blocks in by_tokens.items():
            if self._book.takes_states(request_id, tokens):
                names, _ = self._chain(request, tokens // self._model.chunk_tokens)
                self._begin_save(self._book.save_states(request_id, tokens, names, blocks))

    def _chain(self, request: Any, chunks: int, *, more: bool = False) -> tuple[KeyChain, Sequence[object]]:
        """Keys of at least ``chunks`` chunks of a request; what else names chunks, if that was needed or ``more``."""
        known = self._book.get(request.request_id)
        assert known is not None
        size = self._model.chunk_tokens
        if known.chain is None:
            known.chain = KeyChain(self._lookups.chain_name + self._adapter_key(request), size)
        extra = self._extra(request)(size) if len(known.chain) < chunks or more else ()
        if len(known.chain) < chunks:
            # The chain takes what it needs of all tokens, without a copy of a long prompt.
            known.chain.extend(request.all_token_ids, extra, chunks)
        return known.chain, extra

    def _named(self, request: Any, span: Span) -> Save:
        names, extra = self._chain(request, span.end, more=span.tail > 0)
        tail = None
        if span.tail:
            end = span.end * self._model.chunk_tokens
            tokens = request.all_token_ids[end : end + span.tail]
            tail = names.tail(span.end, tokens, extra[span.end] if span.end < len(extra) else None)
        save = self._book.save(request.request_id, span, names, tail)
        if self._events is not None:
            self._events.offered(request, save, extra_keys(request, self._model.block_size))
        return save

    def received(
        self, finished: Iterable[str], failed: Collection[str], invalid: set[int], report: StepReport | None = None
    ) -> None:
        """VLLM's ``update_connector_output``: loads that ended, those that failed whole, blocks that hold nothing.

        With several ranks a rank may report its lost blocks before the others are done.
        """
        if invalid:
            # Another connector beside this one loses blocks, too.
            self._invalid |= invalid & self._book.loading_blocks()
        ended = list(finished)
        if report is not None:
            self._observer.transferred(report.transfers, report.errors, time.monotonic())
            for number in self._on_all_workers(self._saved, report.saved):
                self._let_go(number)
            ended += self._on_all_workers(self._reported, report.in_step)
        for request_id in ended:
            known = self._book.get(request_id)
            filled = set(known.loading) if known is not None else set()
            lost = filled if request_id in failed else filled & self._invalid
            if known is not None and known.found.leases and request_id not in failed and not lost:
                self._loaded_from = known.found.leases[0].node
            self._loading_in_step.discard(request_id)
            if known is not None and known.in_step and lost:
                self._forget(known.block_ids[0], lost)
            self._observer.requests.load_failed(request_id, len(lost))
            self._do(self._book.received(request_id, self._invalid, failed=request_id in failed))
            self._invalid -= filled

    def _forget(self, block_ids: Sequence[int], invalid: set[int]) -> None:
        """Remove invalid blocks, and those computed behind them, from the engine's own cache.

        The cache has had them since their load within the step began, and keeps them if the request ends early.
        """
        first = next((position for position, block in enumerate(block_ids) if block in invalid), len(block_ids))
        self.block_pool.evict_blocks(set(block_ids[first:]))

    def _on_all_workers(self, reported: Counter[_Name], counts: Mapping[_Name, int]) -> list[_Name]:
        """Loads or saves that are now over on all workers, after ``counts`` more reports."""
        reported.update(counts)
        over = [name for name, count in reported.items() if count >= self._workers]
        for name in over:
            del reported[name]
        return over

    def _begin_epoch(self) -> None:
        self._drop_saves()
        super()._begin_epoch()
        if self._events is not None:
            self._events.reset()

    def take_events(self) -> list[KVCacheEvent]:
        """VLLM's ``take_events``, which it calls at the end of each step."""
        self._observer.step_ended(time.monotonic())
        return self._events.take() if self._events is not None else []

    def take_stats(self) -> EmsStats | None:
        """VLLM's ``get_kv_connector_stats``."""
        return self._observer.take_stats(time.monotonic())

    def close(self) -> None:
        super().close()
        if self._events is not None:
            self._events.close()

    # Lookups

    def _answered(self, answer: LookupAnswer) -> None:
        found, request = answer.found, self._requests.get(answer.request_id)
        if self._events is not None and answer.chain is not None and found.chunks and request is not None:
            self._events.found(request, found, answer.chain, extra_keys(request, self._model.block_size))
        self._observer.requests.answered(answer.request_id, found.tokens, answer.reason, answer.detail)
        super()._answered(answer)

    def _load(self, load: Load) -> None:
        self._loads.append(load)
        if load.in_step:
            self._loading_in_step.add(load.request_id)

    def _job(self, request: Any, expected: int) -> LookupJob:
        # Nobody changes a request's prompt, so the lookup thread reads the very list.  That has no zeros in place of
        # embeddings, which all tokens have.
        embeds = getattr(request, "prompt_embeds", None) is not None
        tokens = request.all_token_ids[: request.num_prompt_tokens] if embeds else request.prompt_token_ids
        job = LookupJob(request.request_id, tokens, self._extra(request), Waiting(time.monotonic(), expected))
        job.adapter = self._adapter_key(request)
        job.explain = self._observer.requests.wanted(request.request_id)
        return job

    def _extra(self, request: Any) -> Callable[[int], Sequence[object]]:
        """The extra keys of a request's chunks without the adapter, which vLLM would name by name and path."""
        return partial(extra_keys, WithoutAdapter(request) if request.lora_request else request)

    def _adapter_key(self, request: Any) -> str:
        """The request's adapter in the name where keys begin."""
        known = self._book.get(request.request_id)
        if known is None or known.adapter is None or self._adapters is None:
            return ""
        return f"/adapter/{self._adapters.key(request.lora_request, known.adapter)}"
