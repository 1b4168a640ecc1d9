"""Saves into a pool that does not answer: they keep no large share of the engine's blocks waiting for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch

from ems.errors import PoolTimeout
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import NO_PARENT
from ems.transfers.device import CpuDevice
from ems.vllm.model import LocalPlane
from ems.vllm.pages import PlaneRows
from ems.vllm.planes import Plane, Portion
from ems.vllm.requests import Save
from ems.vllm.saves import HELD_SHARE, SILENT_SECONDS, Saver
from tests.kit.waiting import until
from tests.vllm.engine_memory import TOKENS, chain_of

HELD = 3


class SilentPool(PoolClient):
    """Answers no reservation until it is told to, and then that it was too late."""

    def __init__(self) -> None:
        self.asked = 0
        self.wakes = threading.Event()

    def reserve(self, *_arguments: object) -> None:  # type: ignore[override]
        self.asked += 1
        assert self.wakes.wait(20)
        raise PoolTimeout("no answer")


@pytest.fixture
def pool() -> Iterator[SilentPool]:
    pool = SilentPool()
    yield pool
    pool.wakes.set()


def saver_of(pool: SilentPool, now: list[float], engine_blocks: int) -> Saver:
    rows = PlaneRows(
        LocalPlane(0, Plane("default/model/layout"), ("layers.0",), Portion(), (2,)), [[torch.zeros(8, 2, TOKENS, 16)]]
    )
    logger = logging.getLogger("test")
    return Saver(pool, [rows], CpuDevice(), logger, 2.0, engine_blocks=engine_blocks, clock=lambda: now[0])


def save(number: int) -> Save:
    return Save(number, "save", 0, NO_PARENT, chain_of(HELD, number).tails(0, HELD), [[1, 2, 3]])


def test_blocks_of_saves_go_back_before_the_call_ends(pool: SilentPool) -> None:
    now = [0.0]
    saver = saver_of(pool, now, HELD * HELD_SHARE - 1)
    saver.start([save(1)]).progress.finish(None)
    until(lambda: pool.asked)
    now[0] = SILENT_SECONDS / 2
    assert (saver.news, saver.take_over()) == (False, [])
    now[0] = SILENT_SECONDS
    saver.start([save(2)]).progress.finish(None)
    assert (saver.news, saver.take_over()) == (True, [1, 2])
    pool.wakes.set()
    saver.close()
    assert pool.asked == 1, "a save that had ended asked for slots"
    assert saver.take_over() == []


def test_few_blocks_wait_for_the_answer(pool: SilentPool) -> None:
    now = [0.0]
    saver = saver_of(pool, now, HELD * HELD_SHARE)
    saver.start([save(1)]).progress.finish(None)
    until(lambda: pool.asked)
    now[0] = SILENT_SECONDS * 100
    assert (saver.news, saver.take_over()) == (False, [])
    pool.wakes.set()
    saver.close()
    assert saver.take_over() == [1]
