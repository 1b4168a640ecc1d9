"""The connector inside vLLM's scheduler: carries between vLLM's hooks, the request book and the pool.

No hook waits for the node.  vLLM calls all hooks on one thread.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KeyChain
from ems.pool.node.launcher import ensure_node
from ems.pool.reasons.words import Reason
from ems.vllm import compat
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.gate.admission import Offer
from ems.vllm.kv_events.events import BlockEvents
from ems.vllm.looking import LookupJob
from ems.vllm.lookups import Lookups
from ems.vllm.metadata import QUIET, StepMetadata, StepReport
from ems.vllm.model import BlockModel
from ems.vllm.reporting.observer import Observer
from ems.vllm.reporting.stats import EmsStats
from ems.vllm.requests import NEVER, Ask, Load, Release, RequestBook, Save, Span

logger = init_logger("vllm.ems.scheduler")

ANNOUNCED = "ems_tokens"
"""Key in ``kv_transfer_params``: how many tokens of the prompt the prefill side stores."""
ANSWER_SECONDS = 0.002
"""How long an engine without anything to compute waits for a lookup: one takes about 1 ms, longer after a rest or on a
slow core, where it may miss this; a step in which nothing is computed takes longer still."""
MAX_OFFERS = 200
"""How often in a row a hit is offered to an engine that runs nothing and does not take it: a load must leave blocks
free that computing need not, so one of nearly all blocks may never be taken."""
JOIN_SECONDS = 0.02
"""How long a step of an engine that has one request only waits for that one's load; a request that comes in meanwhile
waits as long.  Between steps the load would take another step, in which nothing is computed, of some milliseconds."""
ANSWER_BLOCKS = 256
"""Lookups of more blocks take longer than that, and are not waited for."""


class SchedulerSide:
    """Hooks that vLLM's scheduler calls."""

    def __init__(
        self,
        settings: ConnectorSettings,
        model: BlockModel,
        workers: int = 1,
        *,
        step_tokens: int = 0,
        steps_overlap: bool = False,
        may_join: bool = True,
        events: BlockEvents | None = None,
    ) -> None:
        self._settings = settings
        self._model = model
        # A load that is part of a step can report its failure by block only.
        self._joins = settings.load_async is False and may_join and not model.fails_whole
        self._joins_alone = (
            settings.load_async is None and may_join and not model.fails_whole and not steps_overlap and workers == 1
        )
        self.block_pool: Any = None
        """VLLM's own, for what it must not find again; without it all loads are made between steps."""
        self._joining: set[str] = set()
        """Requests whose loads are part of a step that is not over."""
        self._book = RequestBook(
            model.block_size,
            model.planes,
            model.groups,
            saves=settings.saves,
            saves_tails=settings.save_tails,
            loads=settings.loads,
            lookup_timeout=settings.lookup_timeout,
            handoff_timeout=settings.handoff_timeout,
            several=workers > 1 or steps_overlap,
        )
        start_node = self._start_node if settings.autostart else None
        self._observer = Observer(settings, model.block_size, logger, step_tokens=step_tokens, start_node=start_node)
        self._client = PoolClient(settings.socket, "vllm-scheduler", credentials=settings.credentials)
        for name, facts in model.descriptions().items():
            self._client.describe(name, facts)
        self._lookups = Lookups(
            self._client,
            model.planes,
            model.block_size,
            model.identity,
            logger,
            handoff_timeout=settings.handoff_timeout,
            call_timeout=settings.call_timeout,
            start_node=start_node,
        )
        self._lookups.failed = self._observer.failed
        self._lookups.limits.tier = settings.tier_timeout
        self._lookups.usable = lambda: self._observer.usable
        self._lookups.seconds_a_token = lambda: self._observer.seconds_a_token
        self._events = events
        self._vllm_requests: dict[str, Any] = {}
        self._loads: list[Load] = []
        self._saves: list[Save] = []
        self._awaited: set[str] = set()
        self._invalid: set[int] = set()
        self._workers = workers
        self._running: set[str] = set()
        """Requests that the engine computes."""
        self._usable = True
        """Whether the pool may be asked, as of the last step."""
        self._waited = False
        """Whether this step has waited for an answer."""
        self._loaded_from = ""
        """The node that the last load which succeeded was from."""
        self._reported: Counter[str] = Counter()
        self._offered: Counter[str] = Counter()
        """Offers in a row that an engine without anything else to do did not take."""

    def _start_node(self) -> None:
        if ensure_node(self._settings.node_config()):
            logger.info("EMS started a pool node on this host")

    # Requests

    def on_new_request(self, request: Any) -> None:
        """A request came in: its lookup begins at once.

        An adapter is known by its name and path only, not by what is in it, so requests with one stay out of the pool.
        """
        self._observer.arrived(request)
        self._enter(request)

    def _enter(self, request: Any) -> None:
        if request.lora_request:
            self._observer.left_out(request.request_id, Reason.ADAPTER)
            return
        if not self._observer.usable:
            self._observer.left_out(request.request_id, Reason.POOL_DOWN)
            return
        if not self._settings.loads:
            self._observer.left_out(request.request_id, Reason.DOES_NOT_LOAD)
        self._vllm_requests[request.request_id] = request
        expected = self._announced(request)
        self._do(self._book.arrive(request.request_id, request.num_prompt_tokens, expected))

    def _announced(self, request: Any) -> int:
        """Tokens that the request's prefill stores; none where a connector beside this one hands over the blocks."""
        params = request.kv_transfer_params or {}
        announced = None if params.get("remote_engine_id") else params.get(ANNOUNCED)
        return min(announced, request.num_prompt_tokens) if isinstance(announced, int) and announced > 0 else 0

    def match(self, request: Any, local: int) -> tuple[int | None, bool]:
        """VLLM's ``get_num_new_matched_tokens``."""
        request_id, now = request.request_id, time.monotonic()
        if request_id not in self._book:
            self._enter(request)
        if local and self._joining:
            # VLLM finds blocks that a step loads at once.  Should the load fail, whoever shares them must not have
            # been computed behind them.
            return None, False
        self._lookups.hurry(request_id)
        self._take_answers(self._patience(request))
        if not self._observer.usable:
            self._decline(request_id, Reason.POOL_DOWN)
        joined = self.block_pool is not None and (self._joins or self._loads_alone(request_id, local, now))
        found, effects = self._book.match(request_id, request.num_tokens, local, now, joined=joined)
        self._do(effects)
        self._lookups.hurry(request_id)
        if found:
            offer = Offer(local, found, handoff=self._announced(request) > 0)
            reason = self._observer.why_not(request_id, offer, now)
            if reason is None and self._not_taken(request_id):
                reason = Reason.NOT_LOADED
            if reason is not None:
                self._decline(request_id, reason)
                found = 0
        self._observer.matched(request_id, local, found)
        return found, bool(found) and not joined

    def _loads_alone(self, request_id: str, local: int, now: float) -> bool:
        """Whether the load of what was found would keep nobody waiting but the request, and not for long."""
        if not self._joins_alone or self._running or len(self._vllm_requests) > 1:
            return False
        known = self._book.get(request_id)
        if known is None or not known.found.leases or known.found.leases[0].node != self._loaded_from:
            # The first load of a node's pages may have to reach the node, and to map its memory.
            return False
        seconds = self._observer.load_seconds(known.found.tokens - local, now)
        return seconds is not None and seconds <= JOIN_SECONDS

    def _not_taken(self, request_id: str) -> bool:
        """Whether an engine that could have taken this offer long ago will never do so."""
        if self._running or self._book.loading:
            self._offered.pop(request_id, None)
            return False
        self._offered[request_id] += 1
        return self._offered[request_id] > MAX_OFFERS

    def _patience(self, request: Any) -> float:
        """Seconds to wait for what a lookup finds, once a step.

        The engine computes what it has in the meantime; one that has nothing would take a whole empty step, several
        times as long as most lookups, before it asks again.
        """
        if self._waited or self._running or not self._book.awaits(request.request_id):
            return 0.0
        if request.num_tokens > ANSWER_BLOCKS * self._model.block_size:
            return 0.0
        self._waited = True
        return ANSWER_SECONDS

    def _decline(self, request_id: str, reason: Reason) -> None:
        self._observer.left_out(request_id, reason)
        self._do(self._book.decline(request_id))

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """VLLM's ``update_state_after_alloc``."""
        self._offered.pop(request.request_id, None)
        if external > 0:
            self._observer.loading(request.request_id, external)
        self._do(self._book.allocated(request.request_id, blocks.get_block_ids(), external))

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the ended request's blocks must be kept, and what a decode should know (``request_finished``)."""
        request_id = request.request_id
        self._offered.pop(request_id, None)
        ran = request_id in self._running
        self._running.discard(request_id)
        self._take_answers()
        if self._settings.save_answers and ran:
            # One that did not run has blocks that another connector was to fill, and perhaps has not.
            self._save_rest(request, block_ids)
        known = self._book.get(request_id)
        stored = 0
        if known is not None and known.next_save != NEVER:
            stored = max(known.next_save * self._model.block_size, known.saved_tail)
        keep, effects = self._book.finished(request_id)
        self._do(effects)
        self._vllm_requests.pop(request_id, None)
        if keep:
            self._awaited.add(request_id)
            blocks = -(-stored // self._model.block_size)
            logger.info("Delaying free of %d blocks for request %s", blocks, request_id)
        params = request.kv_transfer_params or {}
        told = self._observer.finished(request)
        if params.get("do_remote_decode") and self._settings.saves:
            announced = min(stored, request.num_prompt_tokens)
            # Nothing but a key of our own: vLLM ends where two connectors of one engine answer with the same one.
            told |= {ANNOUNCED: announced}
        return keep, told or None

    def _save_rest(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Store what the answer added, in the step that follows; the request's blocks are kept until then."""
        if compat.computing(request):
            # A step that was launched may still write into the last blocks.
            return
        self._book.paused = not self._observer.usable
        computed = min(request.num_computed_tokens, request.num_tokens)
        span = self._book.last_save(request.request_id, block_ids, computed)
        if span is not None:
            self._saves.append(msgspec.structs.replace(self._named(request, span), ended=True))

    # Steps

    def build_metadata(self, output: Any) -> StepMetadata:
        """VLLM's ``build_connector_meta``."""
        tokens = output.num_scheduled_tokens
        if self._lookups.news:
            self._take_answers()
        waits = any(load.joined for load in self._loads) if self._loads else False
        leisure = not output.scheduled_new_reqs
        self._observer.step_began(tokens, time.monotonic(), loads=waits, leisure=leisure)
        usable = self._usable = self._observer.usable
        self._book.paused = not usable
        preempted = getattr(output, "preempted_req_ids", None)
        self._running.update(tokens)
        self._waited = False
        if preempted:
            self._preempted(preempted, tokens)
        if usable and self._book.unasked:
            self._do(self._book.look_ahead())
        for data in output.scheduled_new_reqs:
            self._plan_save(output, data.req_id, data.block_ids, data.num_computed_tokens, replace=True)
        cached = output.scheduled_cached_reqs
        for position, request_id in enumerate(cached.req_ids):
            new_ids = cached.new_block_ids[position]
            self._plan_save(
                output,
                request_id,
                new_ids or (),
                cached.num_computed_tokens[position],
                replace=request_id in cached.resumed_req_ids,
            )
        if tokens and not (self._loads or self._saves or self._awaited or preempted):
            return QUIET
        loads, saves, awaited = self._loads, self._saves, self._awaited
        self._loads, self._saves, self._awaited = [], [], set()
        return StepMetadata(loads, saves, set(preempted or ()), awaited, idle=not tokens)

    def _preempted(self, request_ids: Iterable[str], scheduled: Container[str]) -> None:
        for request_id in request_ids:
            self._book.preempted(request_id)
            if request_id in scheduled:
                # It goes on in this very step (a reset of the cache does that): nothing is looked up for it.
                self._do(self._book.decline(request_id))
            else:
                self._running.discard(request_id)

    def _plan_save(
        self,
        output: Any,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        computed: int,
        *,
        replace: bool,
    ) -> None:
        after = computed + output.num_scheduled_tokens.get(request_id, 0)
        span = self._book.scheduled(request_id, block_ids, after, replace=replace)
        if span is not None:
            self._saves.append(self._named(self._vllm_requests[request_id], span))

    def _named(self, request: Any, span: Span) -> Save:
        """The save of ``span`` with the names of its pages."""
        known = self._book.get(request.request_id)
        assert known is not None
        size = self._model.block_size
        end = span.end * size
        if known.chain is None:
            known.chain = KeyChain(self._lookups.chain_name, size)
        extra = self._extra(request)() if len(known.chain) < span.end or span.tail else ()
        if len(known.chain) < span.end:
            # The chain takes what it needs of all tokens, without a copy of a long prompt.
            tokens = request.all_token_ids if request.prompt_token_ids is not None else _tokens(request, 0, end)
            known.chain.extend(tokens, extra, span.end)
        tail = None
        if span.tail:
            tokens = _tokens(request, end, end + span.tail)
            tail = known.chain.tail(span.end, tokens, extra[span.end] if span.end < len(extra) else None)
        save = self._book.save(request.request_id, span, known.chain, tail)
        if self._events is not None:
            self._events.offered(request, save, extra or self._extra(request)())
        return save

    def received(
        self, finished: Iterable[str], failed: Collection[str], invalid: set[int], report: object = None
    ) -> None:
        """VLLM's ``update_connector_output``: loads that ended, those that failed whole, blocks that hold nothing.

        With several ranks a rank may report its lost blocks before the others are done.
        """
        self._invalid |= invalid
        if isinstance(report, StepReport):
            self._observer.transferred(report.transfers, report.errors, time.monotonic())
        for request_id in [*finished, *self._joined_loads(report)]:
            known = self._book.get(request_id)
            filled = set(known.loading) if known is not None else set()
            if known is not None and known.found.leases and request_id not in failed and not filled & self._invalid:
                self._loaded_from = known.found.leases[0].node
            self._joining.discard(request_id)
            if known is not None and known.joined and filled & self._invalid:
                self._forget(known.block_ids[0], self._invalid)
            self._observer.load_failed(request_id, len(filled if request_id in failed else filled & self._invalid))
            self._do(self._book.received(request_id, self._invalid, failed=request_id in failed))
            self._invalid -= filled

    def _forget(self, block_ids: Sequence[int], invalid: set[int]) -> None:
        """Let the engine find neither blocks that hold nothing nor those computed behind them.

        It found them from when their load, part of a step, began, and finds them still when their request ends before
        it has computed them.
        """
        first = next((position for position, block in enumerate(block_ids) if block in invalid), len(block_ids))
        self.block_pool.evict_blocks(set(block_ids[first:]))

    def _joined_loads(self, report: object) -> list[str]:
        """Requests whose loads, part of a step, are over on all workers."""
        if not isinstance(report, StepReport):
            return []
        self._reported.update(report.joined)
        over = [request_id for request_id, count in self._reported.items() if count >= self._workers]
        for request_id in over:
            del self._reported[request_id]
        return over

    def reset(self) -> None:
        """The engine's weights or settings changed: nothing stored by it until now is found by it again."""
        self._lookups.chain_name = f"{self._model.identity}/{secrets.token_hex(16)}"
        self._saves.clear()
        self._do(self._book.reset())
        if self._events is not None:
            self._events.reset()

    def take_events(self) -> list[KVCacheEvent]:
        """VLLM's ``take_events``, which it calls at the end of each step."""
        self._observer.step_ended(time.monotonic())
        return self._events.take() if self._events is not None else []

    def take_stats(self) -> EmsStats | None:
        """VLLM's ``get_kv_connector_stats``."""
        return self._observer.take_stats(time.monotonic()) if self._observer.has_stats(self._usable) else None

    def close(self) -> None:
        """The engine stops."""
        self._observer.close()
        if self._events is not None:
            self._events.close()
        self._lookups.close()
        self._client.close()

    # Effects

    def _take_answers(self, wait: float = 0.0) -> None:
        for answer in self._lookups.answers(wait):
            found, request = answer.found, self._vllm_requests.get(answer.request_id)
            if self._events is not None and answer.chain is not None and found.blocks and request is not None:
                self._events.found(request, found, answer.chain, self._extra(request)())
            self._observer.answered(answer.request_id, found.tokens, found.blocks, answer.reason, answer.detail)
            if answer.chain is None:
                self._do(self._book.abandon(answer.request_id))
            else:
                self._do(self._book.answered(answer.request_id, answer.chain, answer.found))

    def _do(self, effects: Sequence[Ask | Load | Release]) -> None:
        for effect in effects:
            match effect:
                case Ask(request_id, expected):
                    self._ask(request_id, expected)
                case Load():
                    self._loads.append(effect)
                    if effect.joined:
                        self._joining.add(effect.request_id)
                case Release(lease):
                    self._lookups.release(lease)
        for request_id in self._book.take_over():
            self._lookups.forget(request_id)

    def _ask(self, request_id: str, expected: int) -> None:
        request = self._vllm_requests[request_id]
        # Nobody changes a request's prompt, so the lookup thread reads the very list.
        prompt = request.prompt_token_ids
        tokens = prompt if prompt is not None else [0] * request.num_prompt_tokens
        job = LookupJob(request_id, tokens, self._extra(request), expected, time.monotonic())
        job.explain = self._observer.explains(request_id)
        self._lookups.ask(job)

    def _extra(self, request: Any) -> Callable[[], Sequence[object]]:
        """What else changes a block's KV (LoRA, multimodal content, cache salt, prompt embeddings), block by block."""
        plain = not (
            request.lora_request
            or request.mm_features
            or request.cache_salt
            or getattr(request, "prompt_embeds", None) is not None
        )
        if plain:
            return tuple

        def extra() -> Sequence[object]:
            size, entries, position = self._model.block_size, [], 0
            for start in range(0, request.num_tokens, size):
                keys, position = generate_block_hash_extra_keys(request, start, start + size, position)
                entries.append(keys)
            return entries

        return extra


def _tokens(request: Any, start: int, end: int) -> Sequence[int]:
    """Token ids ``[start, end)`` of a request; a prompt that came as embeddings is named by these instead."""
    if request.prompt_token_ids is None:
        return [0] * (end - start)
    tokens: Sequence[int] = request.all_token_ids[start:end]
    return tokens
