"""Clients and an administrator at once, in random histories: what is read stays whole, and nothing is lost track of."""

from __future__ import annotations

import contextlib

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ems.errors import PoolRefused
from ems.pool.administration.passes import PATIENCE, RETRY_SECONDS
from ems.pool.administration.service import AdminService
from ems.pool.core.deferred_frees import REPLACE_SECONDS
from ems.pool.core.pool_core import PoolCore
from ems.pool.protocol.acts import CancelResize, Clear, Drain, Pin, Resize
from tests.kit.examples import examples
from tests.pool.brain import key, segment_for
from tests.pool.wrong_core import wrong_core

SIZE = segment_for(2, 8192)
SPACES = {"a": 8192, "b": 4096 + 64}
RUNS = [["1", "12", "123"], ["1", "12", "124"], ["5", "56"], ["7"], ["8"]]


class AdministeredHistory(RuleBasedStateMachine):
    """Three segments of two slots to begin with."""

    @initialize(watermark=st.sampled_from([1.0, 0.6]))
    def start(self, watermark: float) -> None:
        self.core = PoolCore([SIZE] * 3, high_watermark=watermark, eviction_ratio=0.3)
        self.service = AdminService(self.core)
        self.now = 0.0
        self.client_ids = [1, 2]
        self.numbers = {name: self.core.open_namespace(name, size) for name, size in SPACES.items()}
        self.writing: dict[int, int] = {}
        self.reading: dict[int, tuple[int, str, dict[bytes, bytes]]] = {}
        for number in range(3):
            self.core.slots.touch(number, SIZE)
        self.core.slots.touching_ended()

    @rule(client=st.integers(0, 1), name=st.sampled_from(sorted(SPACES)), run=st.sampled_from(RUNS), end=st.booleans())
    def store(self, client: int, name: str, run: list[str], end: bool) -> None:
        client_id = self.client_ids[client]
        reserved = self.core.writing.reserve(client_id, self.numbers[name], bytes(16), [key(path) for path in run])
        assert not (self.core.draining and reserved.granted)
        if reserved.reservation and end:
            self.core.writing.commit(client_id, reserved.reservation)
        elif reserved.reservation:
            self.writing[reserved.reservation] = client_id

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), commit=st.booleans())
    def finish(self, data: st.DataObject, commit: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        client_id = self.writing.pop(number)
        if commit:
            self.core.writing.commit(client_id, number)
        else:
            self.core.writing.abort(client_id, number)

    @rule(client=st.integers(0, 1), name=st.sampled_from(sorted(SPACES)), run=st.sampled_from(RUNS))
    def read(self, client: int, name: str, run: list[str]) -> None:
        client_id = self.client_ids[client]
        found = self.core.reading.lookup(client_id, self.numbers[name], [key(path) for path in run], lease=True)
        if found.lease:
            self.reading[found.lease] = (client_id, name, {page.key: page.ref for page in found.pages})

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.reading)))
        self.core.reading.release(self.reading.pop(number)[0], number)

    @rule(client=st.integers(0, 1), alive=st.booleans())
    def leave(self, client: int, alive: bool) -> None:
        client_id, self.client_ids[client] = self.client_ids[client], max(self.client_ids) + 1
        self.core.disconnect(client_id, self.now, alive=alive)
        self.writing = {number: who for number, who in self.writing.items() if who != client_id}
        self.reading = {number: held for number, held in self.reading.items() if held[0] != client_id}

    @rule(name=st.sampled_from([None, *sorted(SPACES)]), dry_run=st.booleans())
    def clear(self, name: str | None, dry_run: bool) -> None:
        held = self.present()
        try:
            report = self.service.do(Clear(namespace=name, everything=name is None), self.now, dry_run=dry_run)
        except PoolRefused:
            return
        assert report["matched"] == len([one for one in held if name in (None, one[0])])
        if dry_run:
            assert self.present() == held

    @rule(segments=st.integers(1, 5), dry_run=st.booleans())
    def resize(self, segments: int, dry_run: bool) -> None:
        try:
            self.service.do(Resize(segments * SIZE), self.now, dry_run=dry_run)
        except PoolRefused:
            assert self.service.passes
        self.carry_out()

    @rule(dry_run=st.booleans())
    def cancel_resize(self, dry_run: bool) -> None:
        with contextlib.suppress(PoolRefused):
            kept = self.service.do(CancelResize(), self.now, dry_run=dry_run)["kept"]
            closing = sum(segment.closing for segment in self.core.slots.segments)
            assert closing == (kept if dry_run else 0)

    @rule(name=st.sampled_from(sorted(SPACES)), pinned=st.booleans(), seconds=st.sampled_from([0.0, 1.0, 40.0]))
    def pin(self, name: str, pinned: bool, seconds: float) -> None:
        with contextlib.suppress(PoolRefused):
            self.service.do(Pin(name, pinned=pinned, seconds=seconds), self.now)

    @rule(draining=st.booleans())
    def drain(self, draining: bool) -> None:
        self.service.do(Drain(draining), self.now)

    @rule(seconds=st.sampled_from([0.0, RETRY_SECONDS, 1.0, PATIENCE]))
    def go_on(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.service.step(self.now)
        self.carry_out()

    def carry_out(self) -> None:
        while self.service.added:
            number = self.service.added.pop(0)
            self.core.slots.touch(number, self.core.slots.segments[number].size)
        while self.service.given_up:
            self.service.freed(self.service.given_up.pop(0))
        self.core.slots.touching_ended()

    def present(self) -> set[tuple[str, bytes]]:
        """Pages that may be cleared: none that is pinned, or on which such a one hangs."""
        staying = {
            one
            for ns in self.core.namespaces
            for page in filter(None, map(ns.index.get, ns.pins.pinned))
            for one in (page, *page.ancestors())
        }
        return {(ns.name, page.key) for ns in self.core.namespaces for page in ns.index if page not in staying}

    @invariant()
    def nothing_is_lost_track_of(self) -> None:
        assert wrong_core(self.core) == []

    @invariant()
    def what_is_read_stays_where_it_is(self) -> None:
        for _, name, refs in self.reading.values():
            index = self.core.namespaces[self.numbers[name]].index
            for one, ref in refs.items():
                page = index.get(one)
                assert page is not None
                assert page.present
                assert page.ref == ref

    def teardown(self) -> None:
        if not hasattr(self, "numbers"):
            return
        for client_id in self.client_ids:
            self.core.disconnect(client_id, self.now, alive=False)
        for name in SPACES:
            with contextlib.suppress(PoolRefused):
                self.service.do(Pin(name, pinned=False), self.now)
        self.now += REPLACE_SECONDS
        for _ in range(50):
            self.go_on(1.0)
        assert not self.service.passes, "with nobody left everything comes to its end"
        assert not self.core.pending_deletes
        assert wrong_core(self.core) == []
        assert not any(segment.closing for segment in self.core.slots.segments)


AdministeredHistory.TestCase.settings = examples(80, stateful_step_count=40)
TestAdministeredHistory = AdministeredHistory.TestCase
