"""The connector inside vLLM's scheduler: carries between vLLM's hooks, the request book and the pool.

No hook waits for the node.  vLLM calls all hooks on one thread.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from ems.pool.client import PoolClient
from ems.pool.keys import KeyChain
from ems.pool.launcher import ensure_node
from ems.vllm import compat
from ems.vllm.admission import Offer
from ems.vllm.events import BlockEvents
from ems.vllm.lookups import LookupJob, Lookups
from ems.vllm.metadata import StepMetadata, StepReport
from ems.vllm.model import BlockModel
from ems.vllm.observer import Observer
from ems.vllm.reasons import Reason
from ems.vllm.requests import NEVER, Ask, Load, Release, RequestBook, Save, Span
from ems.vllm.settings import ConnectorSettings
from ems.vllm.stats import EmsStats

logger = init_logger("vllm.ems.scheduler")

ANNOUNCED = "ems_tokens"
"""Key in ``kv_transfer_params``: how many tokens of the prompt the prefill side stores."""


class SchedulerSide:
    """Hooks that vLLM's scheduler calls."""

    def __init__(
        self,
        settings: ConnectorSettings,
        model: BlockModel,
        workers: int = 1,
        *,
        step_tokens: int = 0,
        events: BlockEvents | None = None,
    ) -> None:
        self._settings = settings
        self._model = model
        # A load that is part of a step can report its failure by block only, which several groups do not allow.
        self._joined = not settings.load_async and model.groups == 1
        self._book = RequestBook(
            model.block_size,
            model.planes,
            model.groups,
            saves=settings.saves,
            saves_tails=settings.save_tails,
            loads=settings.loads,
            lookup_timeout=settings.lookup_timeout,
            handoff_timeout=settings.handoff_timeout,
            joined=self._joined,
        )
        start_node = self._start_node if settings.autostart else None
        self._observer = Observer(settings, model.block_size, logger, step_tokens=step_tokens, start_node=start_node)
        self._client = PoolClient(settings.socket, "vllm-scheduler")
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
        self._events = events
        self._vllm_requests: dict[str, Any] = {}
        self._loads: list[Load] = []
        self._saves: list[Save] = []
        self._awaited: set[str] = set()
        self._invalid: set[int] = set()
        self._workers = workers
        self._reported: Counter[str] = Counter()

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
        self._do(self._book.arrive(request.request_id, request.num_prompt_tokens, expected, time.monotonic()))

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
        self._take_answers()
        if not self._observer.usable:
            self._decline(request_id, Reason.POOL_DOWN)
        found, effects = self._book.match(request_id, request.num_tokens, local, now)
        self._do(effects)
        if found:
            offer = Offer(local, found, handoff=self._announced(request) > 0)
            reason = self._observer.why_not(request_id, offer, now)
            if reason is not None:
                self._decline(request_id, reason)
                found = 0
        self._observer.matched(request_id, local, found)
        return found, bool(found) and not self._joined

    def _decline(self, request_id: str, reason: Reason) -> None:
        self._observer.left_out(request_id, reason)
        self._do(self._book.decline(request_id))

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """VLLM's ``update_state_after_alloc``."""
        if external > 0:
            self._observer.loading(request.request_id, external)
        self._do(self._book.allocated(request.request_id, blocks.get_block_ids(), external))

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the ended request's blocks must be kept, and what a decode should know (``request_finished``)."""
        request_id = request.request_id
        if self._settings.save_answers:
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
        self._take_answers()
        self._observer.step_began(output.num_scheduled_tokens, time.monotonic())
        self._book.paused = not self._observer.usable
        step = StepMetadata(
            loads=self._loads,
            saves=self._saves,
            awaited=self._awaited,
            preempted=set(getattr(output, "preempted_req_ids", None) or ()),
        )
        self._loads, self._saves, self._awaited = [], [], set()
        for request_id in step.preempted:
            self._book.preempted(request_id)
        for data in output.scheduled_new_reqs:
            self._plan_save(step, output, data.req_id, data.block_ids, data.num_computed_tokens, replace=True)
        cached = output.scheduled_cached_reqs
        for position, request_id in enumerate(cached.req_ids):
            new_ids = cached.new_block_ids[position]
            self._plan_save(
                step,
                output,
                request_id,
                new_ids or (),
                cached.num_computed_tokens[position],
                replace=request_id in cached.resumed_req_ids,
            )
        return step

    def _plan_save(
        self,
        step: StepMetadata,
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
            step.saves.append(self._named(self._vllm_requests[request_id], span))

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
            self._observer.load_failed(request_id, len(filled if request_id in failed else filled & self._invalid))
            self._do(self._book.received(request_id, self._invalid, failed=request_id in failed))
            self._invalid -= filled

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
        return self._observer.take_stats(time.monotonic())

    def close(self) -> None:
        """The engine stops."""
        self._observer.close()
        if self._events is not None:
            self._events.close()
        self._lookups.close()
        self._client.close()

    # Effects

    def _take_answers(self) -> None:
        for answer in self._lookups.answers():
            found, request = answer.found, self._vllm_requests.get(answer.request_id)
            if self._events is not None and answer.chain is not None and found.blocks and request is not None:
                self._events.found(request, found, answer.chain, self._extra(request)())
            self._observer.answered(answer.request_id, found.tokens, found.blocks, answer.reason)
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
                case Release(lease):
                    self._lookups.release(lease)

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
