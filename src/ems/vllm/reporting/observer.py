"""What the scheduler side notes beside its work: health, cost, explanations, figures.

It ties the brains :mod:`~ems.vllm.cost` and :mod:`~ems.vllm.reporting.explain` and the health gate to the hooks
of the scheduler side.  No call waits: the pool is checked on a thread and a connection of their own.  What always
holds: after a fault of the pool nothing asks it any more until it has recovered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import Logger
from typing import Any

import msgspec

from ems.cc_v1.monitor import Monitor
from ems.errors import EmsError, PoolNotTried, PoolTimeout, PoolUnavailable, ProtocolError, Unauthorised
from ems.pool.client.health import HealthRules
from ems.pool.reasons.words import Reason
from ems.transfers.summary import Kind, Sample
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.cost import CostModel, StepTimes
from ems.vllm.node import make_client, start_node
from ems.vllm.reporting.explain import Explanations
from ems.vllm.reporting.stats import EmsStats, PoolState, Transferred

EXPLAIN = "ems_explain"
"""Key in ``kv_transfer_params``: of a request that wants to be explained, and of the answer that does."""

_SICK = (PoolUnavailable, PoolTimeout, ProtocolError, Unauthorised)
"""Errors that say something about the pool's health.  One that refuses a page, for want of room perhaps, is well."""

SUMMARY_SECONDS = 30.0
"""How often the summary line is written, if there is something to sum up."""

NEVER_SECONDS = 1e9
"""Between two checks of a pool whose health does not matter."""

LEARN_SECONDS = 1.0
"""For so long what was measured waits for a step that keeps no first token waiting."""

STATE_SECONDS = 1.0
"""How often the state of things is told to vLLM at most, changes of health apart."""


class Observer:
    """Notes of one scheduler, whose blocks have ``block_size`` tokens."""

    def __init__(self, settings: ConnectorSettings, block_size: int, logger: Logger, *, step_tokens: int = 0) -> None:
        self._settings = settings
        self._block_size = block_size
        self._logger = logger
        client = self._client = make_client(settings, "vllm-health")
        rules = HealthRules(check_seconds=settings.health_check if settings.health_gate else NEVER_SECONDS)
        self._monitor = Monitor(
            rules, SUMMARY_SECONDS, lambda: client.stats(settings.call_timeout), self.start_node, logger
        )
        self._monitor.start()
        self.cost = CostModel(enabled=settings.cost_model, step_tokens=step_tokens)
        self.seconds_a_token = 0.0
        """How long the engine computes a token, 0 while that is not known or does not matter."""
        self.requests = Explanations(block_size)
        """What became of each; requests are followed from :meth:`arrived` to :meth:`finished`."""
        self._steps = StepTimes()
        self._measured = False
        """Whether something was measured that nothing was learned from yet."""
        self._learn_by = 0.0
        self._admitted: set[str] = set()
        self._next_state = 0.0
        self._shown_usable = True

    @property
    def usable(self) -> bool:
        return not self._settings.health_gate or self._monitor.healthy

    def failed(self, error: EmsError) -> bool:
        """A call to the pool ended with ``error``.  True if the pool is ill, which was logged."""
        sick = self._settings.health_gate and isinstance(error, _SICK) and not isinstance(error, PoolNotTried)
        if sick:
            self._monitor.failed(error)
        return sick

    def start_node(self) -> None:
        """Bring a missing node back, where that is allowed."""
        try:
            start_node(self._settings, self._logger)
        except EmsError as error:
            self._logger.warning("EMS cannot start a pool node: %s", error)

    # A request's way

    def arrived(self, request: Any) -> None:
        wanted = self._settings.explain or bool((request.kv_transfer_params or {}).get(EXPLAIN))
        self.requests.arrived(request.request_id, request.num_prompt_tokens, wanted=wanted)

    def why_not(
        self, request_id: str, local: int, external: int, now: float, *, handoff: bool = False
    ) -> Reason | None:
        """The reason not to load ``external`` tokens behind the ``local`` ones that the engine has; one for a request.

        A hand-off is always loaded: its prefill was run only so that this engine need not compute.
        """
        if handoff or request_id in self._admitted:
            return None
        tokens, size = local + external, self._block_size
        blocks = -(-tokens // size) - local // size
        if tokens < self._settings.min_reuse_tokens or blocks <= self._settings.min_load_blocks:
            return Reason.BELOW_MINIMUM
        if not self.cost.worth_loading(external, now):
            return Reason.DEAR
        self._admitted.add(request_id)
        return None

    def finished(self, request: Any) -> dict[str, Any]:
        """The request ended; what its response should say about the pool."""
        self._admitted.discard(request.request_id)
        explanation = self.requests.ended(request.request_id)
        if explanation is None:
            return {}
        self._logger.info("EMS explains request %s: %s", request.request_id, explanation.line())
        wish = (request.kv_transfer_params or {}).get(EXPLAIN)
        if not wish:
            return {}
        shown: dict[str, Any] = msgspec.to_builtins(explanation)
        if isinstance(wish, dict):
            # The request was prefilled elsewhere and brings the explanation of that with it.
            shown["prefill"] = wish
        return {EXPLAIN: shown}

    # Steps

    def step_began(self, tokens: Mapping[str, int], now: float, *, loads: bool = False, leisure: bool = True) -> None:
        """The engine begins a step that computes so many ``tokens`` of each request.

        With ``loads`` the step waits for loads, so its time does not measure computing.  With ``leisure`` no request
        waits for its first token.
        """
        self._steps.began(0 if loads else sum(tokens.values()), max(tokens.values(), default=0), now)
        if self._measured and (leisure or now >= self._learn_by):
            self._measured, self._learn_by = False, now + LEARN_SECONDS
            self.cost.learn(now)

    def step_ended(self, now: float) -> None:
        if (computed := self._steps.ended(now)) is not None:
            self.cost.computed.add(*computed, now)
            self._measured = True

    def transferred(self, transfers: Sequence[Transferred], errors: Mapping[str, int], now: float) -> None:
        for kind in _SICK:
            if kind.__name__ in errors:
                self.failed(kind(f"a worker's load or save ended with {kind.__name__}"))
        for one in transfers:
            if one.leading:
                self._monitor.add(
                    Sample(Kind.LOAD if one.load else Kind.SAVE, one.blocks, one.blocks + one.failed, one.seconds)
                )
                if one.load and not one.failed:
                    self._measured = True
                    self.cost.loaded.add(one.blocks * self._block_size, one.seconds, now)

    def take_stats(self, now: float) -> EmsStats | None:
        tally, changed = self.requests.tally, self.usable is not self._shown_usable
        if not (tally.decided or tally.misses or changed):  # as in most steps
            return None
        tally = self.requests.take_tally()
        state = self._state(now) if tally.decided or changed else None
        for asked, found in tally.decided:
            self._monitor.add(Sample(Kind.LOOKUP, -(-found // self._block_size), -(-asked // self._block_size), 0.0))
        return EmsStats.of_scheduler(tally, state)

    def _state(self, now: float) -> PoolState | None:
        usable = self.usable
        if now < self._next_state and usable is self._shown_usable:
            return None
        self._next_state, self._shown_usable = now + STATE_SECONDS, usable
        computes, loads = self.cost.speeds(now)
        self.seconds_a_token = 1 / computes if computes and self._settings.cost_model else 0.0
        return PoolState(usable, computes, loads, self.cost.reluctance.refused)

    def close(self) -> None:
        self._monitor.close()
        self._client.close()
