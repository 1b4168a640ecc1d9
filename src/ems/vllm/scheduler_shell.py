"""What ``EmsStoreConnector`` and the manager below vLLM's ``OffloadingConnector`` both do inside vLLM's scheduler.

It carries between the book of requests, which decides, and the lookups, which ask the pool in a thread of their own.
What always holds: no method waits for the node; a step waits for answers as long as :mod:`ems.vllm.waiting` says.  vLLM
calls all methods on one thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm.logger import init_logger

from ems.pool.reasons.words import Reason
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.epoch import KeyEpoch
from ems.vllm.lookups import LookupAnswer, LookupJob, Lookups
from ems.vllm.model import BlockModel
from ems.vllm.node import make_client
from ems.vllm.planes import Plane
from ems.vllm.reporting.observer import Observer
from ems.vllm.requests import Ask, Load, Phase, Release, RequestBook
from ems.vllm.tokens import extra_keys
from ems.vllm.waiting import StepWaits, Waiting

logger = init_logger("vllm.ems.scheduler")


class SchedulerShell:
    """Requests of one engine and their lookups in ``planes``, by default those of the ``model``.

    ``name`` says to the node who asks.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        model: BlockModel,
        name: str,
        *,
        planes: Sequence[Plane] = (),
        workers: int = 1,
        step_tokens: int = 0,
        tails: bool = True,
    ) -> None:
        self._settings, self._model = settings, model
        self._client = make_client(settings, name)
        self._epoch = KeyEpoch(model.identity, settings.weights_version, partial(secrets.token_hex, 16))
        self._describe()
        self._observer = Observer(settings, model.block_size, logger, step_tokens=step_tokens)
        self._book = RequestBook(
            settings, model.block_size, model.planes, model.groups, model.page_blocks, several_ranks=workers > 1
        )
        searched, begin = planes or model.planes, self._epoch.chain_name
        self._lookups = Lookups(
            settings, self._client, searched, model.chunk_tokens, begin, self._observer, tails=tails
        )
        self._lookups.start()
        self._requests: dict[str, Any] = {}
        """VLLM's requests."""
        self._step_waits = StepWaits()

    def _enter(self, request: Any) -> None:
        """Have the book follow ``request``, unless the pool may not be asked."""
        if self._observer.usable:
            self._do(self._book.arrive(request.request_id, request.num_tokens, 0))

    def _job(self, request: Any, expected: int) -> LookupJob:
        tokens = request.all_token_ids[: request.num_tokens]  # of this moment: the request may grow
        return LookupJob(request.request_id, tokens, partial(extra_keys, request), Waiting(time.monotonic(), expected))

    def _load(self, load: Load) -> None:
        """Have the workers make a load of the book's."""

    def _in_step(self, request_id: str, local: int, now: float) -> bool:
        """Whether a load of the request is part of the step that begins it."""
        return False

    def _match(self, request: Any, local: int = 0, *, idle: bool = True) -> int | None:
        """How many tokens behind the ``local`` ones can be loaded; None: vLLM has to ask again.

        ``idle`` says that the engine computes nothing, so that it may wait a moment for the answer in any case.
        """
        request_id, now = request.request_id, time.monotonic()
        if self._book.get(request_id) is None:
            self._enter(request)
        self._lookups.hurry(request_id)
        if self._observer.usable:
            self._wait_for(request, local, now, idle=idle)
        self._take_answers()
        if not self._observer.usable:
            self._decline(request_id, Reason.POOL_DOWN)
        if self._client.waits_out_restart:
            self._book.restarted_at = now
        in_step = self._in_step(request_id, local, now)
        found, effects = self._book.match(request_id, request.num_tokens, local, now, in_step=in_step)
        self._do(effects)
        if found is None:
            self._lookups.hurry(request_id)
        return found

    def _wait_for(self, request: Any, local: int, now: float, *, idle: bool) -> None:
        """Wait a moment for the request's answer: told to ask again, it may begin a whole step behind others."""
        known = self._book.get(request.request_id)
        if known is None or known.phase is not Phase.ASKED:
            return
        if not idle and self._lookups.comes_up(request.request_id):
            return  # its answer is known to take longer
        computing = (request.num_tokens - local) * self._observer.seconds_a_token if self._has_time(request) else 0.0
        age = self._lookups.age(request.request_id, now)
        patience = self._step_waits.patience(now, age, computing, idle=idle)
        if patience > 0:
            for answer in self._lookups.answers(patience, request.request_id):
                self._answered(answer)
            self._step_waits.waited(now, time.monotonic(), idle=idle)

    def _has_time(self, request: Any) -> bool:
        """Whether a step may wait for the request's answer as long as is little beside computing it."""
        return False

    def _decline(self, request_id: str, reason: Reason) -> None:
        self._observer.requests.left_out(request_id, reason)
        self._do(self._book.decline(request_id))

    def _take_answers(self) -> None:
        if self._lookups.news:
            for answer in self._lookups.answers():
                self._answered(answer)

    def _answered(self, answer: LookupAnswer) -> None:
        if answer.chain is None:
            self._do(self._book.leave_out(answer.request_id))
        else:
            self._do(self._book.answered(answer.request_id, answer.chain, answer.found))

    def _do(self, effects: Sequence[Ask | Load | Release]) -> None:
        for effect in effects:
            match effect:
                case Ask(request_id, expected):
                    self._lookups.ask(self._job(self._requests[request_id], expected))
                case Load():
                    self._load(effect)
                case Release(lease):
                    self._lookups.release(lease)
        for request_id in self._book.take_over():
            self._lookups.forget(request_id)

    def weights_declared(self, version: str) -> None:
        """The user names the engine's weights (vLLM's ``update_weight_version``)."""
        before = self._epoch.chain_name
        if not self._epoch.declare(version):
            logger.warning(
                "EMS shares nothing with other engines: weights version %s was declared while the engine holds KV of "
                "other weights; reset its cache with reset_connector=True, then declare the version",
                version,
            )
        elif self._epoch.chain_name != before:
            logger.info("EMS shares blocks with engines whose weights version is %s", version)
        if self._epoch.chain_name != before:
            self._begin_epoch()

    def reset(self) -> None:
        """The engine's weights or settings changed.  It finds nothing again that it has stored until now."""
        self._epoch.reset()
        self._begin_epoch()
        logger.info(
            "EMS shares nothing with other engines until it knows its weights: once these are in place and before the "
            "next request, name them with update_weight_version, or weight_version of finish_weight_update"
        )

    def _describe(self) -> None:
        for namespace, facts in self._model.descriptions(self._epoch.chain_name).items():
            self._client.describe(namespace, facts)

    def _begin_epoch(self) -> None:
        """What was computed until now is not found again."""
        if self._epoch.version:  # one without a name is this engine's alone, others may have described the same planes
            self._describe()
        self._lookups.chain_name = self._epoch.chain_name
        self._do(self._book.reset())

    def close(self) -> None:
        self._observer.close()
        self._lookups.close()
        self._client.close()
