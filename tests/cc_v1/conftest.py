"""A real node in a process of its own, sessions of the SDK on it, and engine caches to move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ems import CcConfig_v1, CcKvOption, Ems, EmsConfig
from ems.cc_v1.context_caching import ContextCaching
from ems.pool.client.health import HealthRules
from tests.kit.node import NodeProcess

QUICK = HealthRules(check_seconds=0.05)
NEVER = HealthRules(check_seconds=1000.0)
OPTION = CcKvOption(write_rcache=True, read_local_only=False, timeout=5000)

Caches = list[list[Any]]


def make_caches(
    dtype: Any = torch.float32, *, layers: int = 2, blocks: int = 8, block_size: int = 4, heads: int = 2, size: int = 8
) -> Caches:
    """``[num_blocks, block_size, heads, size]`` tensors full of different numbers: K and V of each layer."""
    shape = (blocks, block_size, heads, size)
    return [[torch.randn(shape).to(dtype) for _ in range(2)] for _ in range(layers)]


def zeros_like(caches: Caches) -> Caches:
    return [[torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in layer] for layer in caches]


def tokens(caches: Caches, slots: Any) -> list[Any]:
    """Of each tensor the bytes of the tokens in ``slots``, in that order."""
    index = torch.as_tensor(slots, dtype=torch.int64)
    flat = [tensor.reshape(-1, *tensor.shape[2:])[index] for layer in caches for tensor in layer]
    return [tensor.contiguous().view(torch.uint8) for tensor in flat]


def same(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    """One node for a module of tests that leave it well; they keep apart by their model's name."""
    with NodeProcess("--size", "256MB", "--segment-size", "1MB") as running:
        yield running


@pytest.fixture
def fragile_node() -> Iterator[NodeProcess]:
    """A node of one test's own."""
    with NodeProcess("--size", "256MB", "--segment-size", "1MB") as running:
        yield running


def rank_config(model_id: str = "a model", **changes: Any) -> CcConfig_v1:
    facts: dict[str, Any] = {
        "rank_id": 0,
        "device_id": 0,
        "model_id": model_id,
        "tp_world_size": 1,
        "pp_world_size": 1,
        "rank_in_tp_group": 0,
        "rank_in_pp_group": 0,
        "llm_engine": "vllm@a_model",
    }
    return CcConfig_v1(**(facts | changes))


Connect = Callable[..., ContextCaching]


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Calls ``Ems.init`` with quick health checks; the model is named after the test."""

    def init(node: NodeProcess, *, access_id: str = "", health: HealthRules = QUICK, **rank: Any) -> ContextCaching:
        config = EmsConfig(
            access_id=access_id,
            access_key="",
            cc_config_v1=rank_config(**({"model_id": request.node.nodeid} | rank)),
            autostart=False,
            node=node.config,
            health=health,
        )
        Ems.init(config)
        return Ems.get_cc()

    yield init
    Ems.close()
