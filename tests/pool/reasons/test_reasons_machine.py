"""Reasons are true: random histories against a plain account of what happened to each key."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ems.pool.core.deferred_frees import REPLACE_SECONDS
from ems.pool.core.pool_core import PoolCore
from ems.pool.pages import Outcome
from ems.pool.reasons.words import Reason
from tests.kit.examples import examples
from tests.pool.brain import key, segment_for
from tests.pool.wrong_core import wrong_core

SEGMENTS = [segment_for(3, 8192), segment_for(2, 8192)]
SPACES = ["a", "b"]
PATHS = ["a", "ab", "abc", "abx", "k", "kl", "m", "n"]
KEYS = {path: key(path) for path in PATHS}
RUNS = [["a", "ab", "abc"], ["a", "ab", "abx"], ["k", "kl"], ["m"], ["n"]]
EVICTED = {Reason.EVICTED_FULL, Reason.EVICTED_WATERMARK, Reason.EVICTED_FOR_OTHERS}
REFUSED = {Outcome.NO_SPACE: Reason.REFUSED_NO_SPACE, Outcome.NOT_TOUCHED: Reason.REFUSED_NOT_TOUCHED}


class ReasonHistory(RuleBasedStateMachine):
    """Two namespaces fight for five slots."""

    @initialize(watermark=st.sampled_from([1.0, 0.6]), touched=st.booleans())
    def start(self, watermark: float, touched: bool) -> None:
        self.core = PoolCore(SEGMENTS, high_watermark=watermark, eviction_ratio=0.3)
        self.now = 0.0
        self.client_ids = [1, 2]
        self.numbers = {name: self.core.open_namespace(name, 8192) for name in SPACES}
        self.writing: dict[int, tuple[int, str]] = {}
        self.leases: list[tuple[int, int]] = []
        self.happened: dict[tuple[str, bytes], tuple[set[Reason], float]] = {}
        self.misses: dict[str, int] = {}
        if touched:
            self.touch()

    def pages(self) -> set[tuple[str, bytes]]:
        return {(name, page.key) for name in SPACES for page in self.core.namespaces[self.numbers[name]].index}

    def gone(self, before: set[tuple[str, bytes]], reasons: set[Reason]) -> None:
        for one in before - self.pages():
            self.happened[one] = (reasons, self.now)

    @rule()
    def touch(self) -> None:
        for number, size in enumerate(SEGMENTS):
            self.core.slots.touch(number, size)
        self.core.slots.touching_ended()

    @rule(seat=st.integers(0, 1), name=st.sampled_from(SPACES), run=st.sampled_from(RUNS), commit=st.booleans())
    def reserve(self, seat: int, name: str, run: list[str], commit: bool) -> None:
        client_id, before = self.client_ids[seat], self.pages()
        keys = [KEYS[path] for path in run]
        reserved = self.core.writing.reserve(client_id, self.numbers[name], bytes(16), keys)
        for one, outcome in zip(keys, reserved.outcomes, strict=True):
            if Outcome(outcome) in REFUSED:
                self.happened[name, one] = ({REFUSED[Outcome(outcome)]}, self.now)
        self.gone(before, EVICTED)
        if reserved.reservation and commit:
            self.core.writing.commit(client_id, reserved.reservation)
        elif reserved.reservation:
            self.writing[reserved.reservation] = (client_id, name)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), commit=st.booleans())
    def finish(self, data: st.DataObject, commit: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        client_id, _ = self.writing.pop(number)
        before = self.pages()
        if commit:
            self.core.writing.commit(client_id, number)
        else:
            self.core.writing.abort(client_id, number)
        self.gone(before, {Reason.UNFINISHED})

    @rule(seat=st.integers(0, 1), alive=st.booleans())
    def leave(self, seat: int, alive: bool) -> None:
        before = self.pages()
        client_id, self.client_ids[seat] = self.client_ids[seat], max(self.client_ids) + 1
        self.core.disconnect(client_id, self.now, alive=alive)
        self.writing = {number: held for number, held in self.writing.items() if held[0] != client_id}
        self.leases = [lease for lease in self.leases if lease[0] != client_id]
        self.gone(before, {Reason.UNFINISHED})

    @rule(seat=st.integers(0, 1), name=st.sampled_from(SPACES), run=st.sampled_from(RUNS), lease=st.booleans())
    def lookup(self, seat: int, name: str, run: list[str], lease: bool) -> None:
        client_id = self.client_ids[seat]
        found = self.core.reading.lookup(client_id, self.numbers[name], [KEYS[path] for path in run], lease=lease)
        if found.lease:
            self.leases.append((client_id, found.lease))
        assert (found.code != 0) == (len(found.pages) < len(run))
        if found.code:
            reason = Reason.of_code(found.code)
            assert reason in self.expected(name, KEYS[run[len(found.pages)]])
            self.misses[reason.value] = self.misses.get(reason.value, 0) + 1
        assert self.core.reasons.misses == self.misses

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(self.leases) - 1))
        self.core.reading.release(*self.leases.pop(position))

    @rule(seconds=st.sampled_from([1.0, 11.0, REPLACE_SECONDS]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        before = self.pages()
        self.core.tick(self.now)
        self.gone(before, {Reason.EVICTED_WATERMARK})

    def expected(self, name: str, one: bytes) -> set[Reason]:
        if (name, one) in self.pages():
            return {Reason.BEING_WRITTEN}
        return self.happened.get((name, one), ({Reason.NEVER_STORED}, 0.0))[0]

    @invariant()
    def every_key_tells_the_truth(self) -> None:
        assert wrong_core(self.core) == []
        pages = self.pages()
        for name in SPACES:
            for one in KEYS.values():
                told = self.core.reading.explain(name, [one])
                reason = Reason.of_code(told.codes[0])
                if reason is None:
                    assert (name, one) in pages
                    continue
                assert reason in self.expected(name, one)
                happened = self.happened.get((name, one))
                if happened is not None and (name, one) not in pages:
                    assert told.seconds == self.now - happened[1]
                    assert told.winner in (("a", "b") if reason is Reason.EVICTED_FOR_OTHERS else ("",))


ReasonHistory.TestCase.settings = examples(60, stateful_step_count=40)
TestReasonHistory = ReasonHistory.TestCase
