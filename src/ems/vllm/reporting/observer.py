"""What the scheduler side notes beside its work: health, cost, explanations, figures.

It ties the brains :mod:`~ems.vllm.gate.cost`, :mod:`~ems.vllm.gate.admission`,
:mod:`~ems.vllm.gate.steps` and :mod:`~ems.vllm.reporting.explain` and the health gate to the hooks of the scheduler
side, whose thread alone calls it.  No call waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from logging import Logger
from typing import Any

import msgspec

from ems.cc_v1.health import HealthRules
from ems.cc_v1.summary import Kind, Sample
from ems.errors import EmsError
from ems.pool.reasons.words import Reason
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.gate.admission import Offer, Thresholds, why_not
from ems.vllm.gate.cost import CostModel
from ems.vllm.gate.health import PoolHealth
from ems.vllm.gate.steps import StepTimes
from ems.vllm.reporting.explain import Explanations
from ems.vllm.reporting.stats import EmsStats, PoolState
from ems.vllm.reporting.transferred import Transferred

EXPLAIN = "ems_explain"
"""Key in ``kv_transfer_params``: of a request that wants to be explained, and of the answer that does."""

NEVER_SECONDS = 1e9
"""Between two checks of a pool whose health does not matter."""

LEARN_SECONDS = 1.0
"""For so long what was measured waits for a step that keeps no first token waiting."""

STATE_SECONDS = 1.0
"""How often the state of things is told to vLLM at most, changes of health apart."""


class Observer:
    """Notes of one scheduler, whose blocks have ``block_size`` tokens."""

    def __init__(
        self,
        settings: ConnectorSettings,
        block_size: int,
        logger: Logger,
        *,
        step_tokens: int = 0,
        start_node: Callable[[], object] | None = None,
    ) -> None:
        self._settings = settings
        self._block_size = block_size
        self._logger = logger
        self._thresholds = Thresholds(
            min_reuse_tokens=settings.min_reuse_tokens, min_load_blocks=settings.min_load_blocks
        )
        self.health = PoolHealth(
            settings.socket,
            HealthRules(check_seconds=settings.health_check if settings.health_gate else NEVER_SECONDS),
            logger,
            call_timeout=settings.call_timeout,
            start_node=start_node,
            credentials=settings.credentials,
        )
        self.health.start()
        self._cost = CostModel(enabled=settings.cost_model, step_tokens=step_tokens)
        self.seconds_a_token = 0.0
        """How long the engine computes a token, 0 while that is not known or does not matter."""
        self._explanations = Explanations(block_size)
        self._steps = StepTimes()
        self._measured = False
        """Whether something was measured that nothing was learned from yet."""
        self._learn_by = 0.0
        self._admitted: set[str] = set()
        self._next_state = 0.0
        self._told_usable = True

    @property
    def usable(self) -> bool:
        """Whether the pool may be asked."""
        return not self._settings.health_gate or self.health.usable

    def failed(self, error: EmsError) -> bool:
        """A call to the pool ended with ``error``; whether that was noted, and said in the log."""
        return self._settings.health_gate and self.health.failed(error)

    # A request's way

    def arrived(self, request: Any) -> None:
        """A request came in."""
        wanted = self._settings.explain or bool((request.kv_transfer_params or {}).get(EXPLAIN))
        self._explanations.arrived(request.request_id, request.num_prompt_tokens, wanted=wanted)

    def explains(self, request_id: str) -> bool:
        """Whether the request is to be explained."""
        return self._explanations.wanted(request_id)

    def left_out(self, request_id: str, reason: Reason) -> None:
        """The request gets nothing from the pool."""
        self._explanations.left_out(request_id, reason)

    def answered(self, request_id: str, tokens: int, blocks: int, reason: Reason | None, detail: str = "") -> None:
        """The request's lookup ended."""
        self._explanations.answered(request_id, tokens, blocks, reason, detail)

    def why_not(self, request_id: str, offer: Offer, now: float) -> Reason | None:
        """What speaks against the load, decided once a request."""
        if request_id in self._admitted:
            return None
        reason = why_not(offer, self._thresholds, self._block_size, self._cost, now)
        if reason is None:
            self._admitted.add(request_id)
        return reason

    def load_seconds(self, tokens: int, now: float) -> float | None:
        """How long a load of ``tokens`` tokens takes; None while that is not known."""
        return self._cost.load_seconds(tokens, now)

    def matched(self, request_id: str, local: int, external: int | None) -> None:
        """The engine was told how much can be loaded."""
        self._explanations.matched(request_id, local, external)

    def loading(self, request_id: str, tokens: int) -> None:
        """The engine gave blocks for a load."""
        self._explanations.loading(request_id, tokens)

    def load_failed(self, request_id: str, blocks: int) -> None:
        """A load ended without ``blocks`` of its blocks."""
        self._explanations.load_failed(request_id, blocks)

    def finished(self, request: Any) -> dict[str, Any]:
        """The request ended: what its response should say of it."""
        self._admitted.discard(request.request_id)
        explanation = self._explanations.ended(request.request_id)
        if explanation is None:
            return {}
        self._logger.info("EMS explains request %s: %s", request.request_id, explanation.line())
        wish = (request.kv_transfer_params or {}).get(EXPLAIN)
        if not wish:
            return {}
        told: dict[str, Any] = msgspec.to_builtins(explanation)
        if isinstance(wish, dict):
            # The request was prefilled elsewhere and brings the explanation of that with it.
            told["prefill"] = wish
        return {EXPLAIN: told}

    # Steps

    def step_began(self, tokens: Mapping[str, int], now: float, *, loads: bool = False, leisure: bool = True) -> None:
        """The engine begins a step that computes so many ``tokens`` of each request.

        With ``loads`` it waits for loads, so its time says nothing of computing; with ``leisure`` no request waits for
        its first token in it.
        """
        self._steps.began(0 if loads else sum(tokens.values()), max(tokens.values(), default=0), now)
        if self._measured and (leisure or now >= self._learn_by):
            self._measured, self._learn_by = False, now + LEARN_SECONDS
            self._cost.learn(now)

    def step_ended(self, now: float) -> None:
        """The oldest step under way ended."""
        if (computed := self._steps.ended(now)) is not None:
            self._cost.computed(*computed, now)
            self._measured = True

    def transferred(self, transfers: Sequence[Transferred], errors: Mapping[str, int], now: float) -> None:
        """Workers reported loads and saves that ended."""
        for error in errors if self._settings.health_gate else ():
            self.health.failed_in_worker(error)
        for one in transfers:
            if one.leading:
                self.health.add(
                    Sample(Kind.LOAD if one.load else Kind.SAVE, one.blocks, one.blocks + one.failed, one.seconds)
                )
                if one.load and not one.failed:
                    self._measured = True
                    self._cost.loaded(one.blocks * self._block_size, one.seconds, now)

    def has_stats(self, usable: bool) -> bool:
        """Whether :meth:`take_stats` has something to tell of a pool that is ``usable`` or not; False in most steps."""
        tally = self._explanations.tally
        return bool(tally.decided or tally.misses) or usable is not self._told_usable

    def take_stats(self, now: float) -> EmsStats | None:
        """What vLLM is to know since the last call."""
        tally = self._explanations.take_tally()
        state = self._state(now) if tally.decided or self.usable is not self._told_usable else None
        for asked, found in tally.decided:
            self.health.add(Sample(Kind.LOOKUP, -(-found // self._block_size), -(-asked // self._block_size), 0.0))
        return EmsStats.of_scheduler(tally, state)

    def _state(self, now: float) -> PoolState | None:
        usable = self.usable
        if now < self._next_state and usable is self._told_usable:
            return None
        self._next_state, self._told_usable = now + STATE_SECONDS, usable
        figures = self._cost.figures(now)
        speed = figures.compute_tokens_per_second
        self.seconds_a_token = 1 / speed if speed and self._settings.cost_model else 0.0
        return PoolState(usable, figures.compute_tokens_per_second, figures.load_tokens_per_second, figures.refused)

    def close(self) -> None:
        """The engine stops."""
        self.health.close()
