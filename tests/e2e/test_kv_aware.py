"""What vLLM's router makes of where an event says that blocks are; EMS publishes what it understands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from ems.vllm.kv_events.events import _PLACES
from tests.e2e.engines import BLOCK, complete, random_prompt, wait_for
from tests.e2e.routed_worker import RoutedWorker, needs_router, vllm_router

pytestmark = [pytest.mark.e2e, needs_router]
BLOCKS = 8


class Routed:
    """Two workers behind the router."""

    def __init__(self, url: str, workers: tuple[RoutedWorker, RoutedWorker]) -> None:
        self._url = url
        self._workers = workers
        self._seeds = itertools.count()

    def winners(self, one: str, other: str) -> set[str]:
        """The medium whose worker gets a prompt that both have, each in another one; whichever worker that is."""
        winners = set()
        for first, second in (self._workers, self._workers[::-1]):
            prompt = self._prompt()
            first.announce(prompt, one, place=_PLACES.get(one))
            second.announce(prompt, other, place=_PLACES.get(other))
            self._wait_until_heard(first, second)
            self._wait_until_heard(second, first)
            winners.add(one if self._gets(first, prompt) else other)
        return winners

    def _prompt(self) -> list[int]:
        return random_prompt(next(self._seeds), BLOCKS * BLOCK)

    def _gets(self, worker: RoutedWorker, prompt: list[int]) -> bool:
        return complete(self._url, prompt) == worker.says

    def _wait_until_heard(self, worker: RoutedWorker, rival: RoutedWorker) -> None:
        """Return when the router knows all that ``worker`` published: its events come in order.

        The rival's block is for the case that ``worker`` gets what nobody has.
        """
        prompt = self._prompt()
        rival.announce(prompt, "CPU", 1)
        wait_for(lambda: self._gets(rival, prompt), "the router heard the rival")
        worker.announce(prompt, "CPU")
        wait_for(lambda: self._gets(worker, prompt), "the router heard the worker")


@pytest.fixture(scope="module")
def routed(logs: Path) -> Iterator[Routed]:
    with RoutedWorker("one") as one, RoutedWorker("two") as two:
        events = {one.url: one.events, two.url: two.events}
        with vllm_router(events, logs / "vllm-router-media.log") as url:
            yield Routed(url, (one, two))


@pytest.mark.parametrize(
    ("better", "worse"), [("GPU", "CPU"), ("CPU", "EXTERNAL"), ("EXTERNAL", "STORAGE"), ("CPU", "STORAGE")]
)
def test_what_is_nearer_is_preferred(routed: Routed, better: str, worse: str) -> None:
    assert routed.winners(better, worse) == {better}
