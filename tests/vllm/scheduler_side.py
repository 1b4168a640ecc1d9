"""A scheduler side with made-up requests and steps, for tests of what it tells a worker and an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from ems.pool.client.answers import Namespace
from ems.vllm.model import BlockModel
from ems.vllm.planes import Plane
from ems.vllm.reporting.stats import EmsStats
from ems.vllm.scheduler import SchedulerSide
from tests.e2e.engines import wait_for

BLOCK = 16
NAMESPACE = Namespace("default/model/layout/0.0", 256)
MODEL = BlockModel("default/model/layout", BLOCK, 64, 1, (Plane(NAMESPACE.name),))
TOKENS = list(range(4 * BLOCK))
Params = dict[str, Any]
EXPLAIN = {"ems_explain": True}


class Blocks:
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self._ids,)


def request(name: str = "r", tokens: list[int] = TOKENS, params: Params | None = None, lora: object = None) -> Any:
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=tokens,
        all_token_ids=tokens,
        num_prompt_tokens=len(tokens),
        num_tokens=len(tokens),
        num_computed_tokens=len(tokens),
        num_in_flight_tokens=0,
        kv_transfer_params=params,
        lora_request=lora,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
    )


def step(one: Any, tokens: int) -> Any:
    """A step that computes ``tokens`` tokens of a new request."""
    data = SimpleNamespace(req_id=one.request_id, block_ids=([1, 2, 3, 4],), num_computed_tokens=0)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_new_reqs=[data],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={one.request_id: tokens},
        preempted_req_ids=None,
    )


def empty_step() -> Any:
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={}, preempted_req_ids=None
    )


def engine_blocks(count: int = 64) -> BlockPool:
    return BlockPool(num_gpu_blocks=count, enable_caching=True, hash_block_size=BLOCK)


class Side(SchedulerSide):
    """A scheduler side of an engine with blocks, that can be asked until it knows."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.bind(engine_blocks())

    def matched(self, one: Any, local: int = 0) -> tuple[int, bool]:
        answers: list[tuple[int, bool]] = []

        def answered() -> bool:
            tokens, between_steps = self.match(one, local)
            answers.extend([] if tokens is None else [(tokens, between_steps)])
            return bool(answers)

        wait_for(answered, "the lookup is answered")
        return answers[0]

    def found(self, one: Any, local: int = 0) -> int:
        return self.matched(one, local)[0]

    def compute(self, one: Any) -> Any:
        """The metadata of the step that computes a new request whole, of which nothing was found."""
        self.on_new_request(one)
        self.found(one)
        self.allocated(one, Blocks([1, 2, 3, 4]), 0)
        return self.build_metadata(step(one, one.num_tokens))

    def end(self, one: Any) -> Params:
        told = self.finished(one, ([1, 2, 3, 4],))[1] or {}
        return dict(told.get("ems_explain", {}))

    def told(self) -> dict[str, Any]:
        stats = self.take_stats() or EmsStats()
        return dict(stats.data)
