"""Epochs of keys: over generated histories of a fleet whose users declare what is true, a name stands for one state."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ems.vllm.epoch import KeyEpoch

ENGINES = st.integers(0, 2)


class Engine:
    def __init__(self, draws: itertools.count[int]) -> None:
        self.epoch = KeyEpoch("tenant/model", "", lambda: str(next(draws)))
        self.weights = 0
        self.cached: set[int] = set()
        """Weights that computed what the engine's own cache holds."""
        self.may_update = False
        """Whether the engine was reset since it computed or was told of a version: then weights may be changed."""


class Fleet(RuleBasedStateMachine):
    """Engines that are updated at different times; what is stored under a name must be of one state of the weights."""

    def __init__(self) -> None:
        super().__init__()
        draws = itertools.count()
        self.engines = [Engine(draws) for _ in range(3)]
        self.stored: dict[str, set[int]] = {}

    @rule(number=ENGINES)
    def computes(self, number: int) -> None:
        """What is computed may stand behind what the engine's cache holds, and is saved with it."""
        engine = self.engines[number]
        engine.cached.add(engine.weights)
        engine.epoch.empty = False
        engine.may_update = False
        self.stored.setdefault(engine.epoch.chain_name, set()).update(engine.cached)

    @rule(number=ENGINES, busy=st.booleans())
    def resets(self, number: int, busy: bool) -> None:
        """The engine's own cache stays as it is where a block is in use."""
        engine = self.engines[number]
        if not busy:
            engine.cached.clear()
            engine.epoch.empty = True
            engine.may_update = True
        engine.epoch.reset()

    @rule(number=ENGINES, weights=st.integers(1, 3))
    def updates(self, number: int, weights: int) -> None:
        engine = self.engines[number]
        if engine.may_update:
            engine.weights = weights

    @rule(number=ENGINES)
    def declares(self, number: int) -> None:
        engine = self.engines[number]
        engine.epoch.declare(f"run/{engine.weights}")
        engine.may_update = False

    @invariant()
    def a_name_stands_for_one_state_of_the_weights(self) -> None:
        assert all(len(weights) == 1 for weights in self.stored.values()), self.stored


TestFleet = Fleet.TestCase


def test_engines_that_declare_the_same_version_meet_again() -> None:
    engines = [KeyEpoch("m", "", lambda number=number: str(number)) for number in range(2)]  # type: ignore[misc]
    assert len({engine.chain_name for engine in engines}) == 1
    for engine in engines:
        engine.reset()
    assert len({engine.chain_name for engine in engines}) == 2
    assert all(engine.declare("run/1") for engine in engines)
    assert {engine.chain_name for engine in engines} == {KeyEpoch("m", "run/1", str).chain_name}


def test_an_engine_that_holds_kv_of_other_weights_stays_alone() -> None:
    engine = KeyEpoch("m", "run/1", lambda: "drawn")
    engine.empty = False
    assert not engine.declare("run/2")
    assert engine.chain_name not in {
        "m",
        KeyEpoch("m", "run/1", str).chain_name,
        KeyEpoch("m", "run/2", str).chain_name,
    }


def test_a_version_that_is_declared_again_changes_nothing() -> None:
    engine = KeyEpoch("m", "run/1", str)
    before = engine.chain_name
    engine.empty = False
    assert engine.declare("run/1")
    assert engine.chain_name == before
