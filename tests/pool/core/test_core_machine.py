"""Random histories of several clients against the brain, compared after every step with a plain account of them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ems.config import DEFAULT_POLICY, PolicyName
from ems.errors import StaleReference
from ems.pool.core.deferred_frees import REPLACE_SECONDS
from ems.pool.core.index import Index
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.reservations import LIMITS, UncommittedLimits
from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.layout import PageRef, slot_offset, writer_of
from ems.pool.pages import Outcome, Page
from ems.pool.protocol.messages import FROM_NOW
from tests.kit.examples import examples
from tests.pool.brain import key, segment_for
from tests.pool.wrong_core import wrong_core

SEGMENTS = [segment_for(3, 8192), segment_for(2, 8192), segment_for(2, 8192)]
PAGE_SIZES = {"small": 8192, "odd": 8192 + 64, "large": 2 * 8192 - 128}
SEATS = (0, 1, 2)

# Two trees of blocks: each path continues its prefix, some paths share theirs.
PATHS = ["a", "ab", "abc", "abcd", "abx", "abxy", "k", "kl", "klm"]
KEYS = {path: key(path) for path in PATHS}
TIGHT = UncommittedLimits(share=0.0, step_pages=0, least_pages=2, together=1.5, together_share=1.0, seconds=20.0)
PREFIX = {KEYS[path]: KEYS.get(path[:-1], bytes(16)) for path in PATHS}


class Slot(NamedTuple):
    segment: int
    number: int


class Writing(NamedTuple):
    client_id: int
    namespace: str
    pages: dict[int, bytes]
    until: float


class Reading(NamedTuple):
    client_id: int
    namespace: str
    refs: dict[bytes, bytes]


def slot_of(ref: bytes) -> Slot:
    unpacked = PageRef.unpack(ref)
    return Slot(unpacked.segment, unpacked.slot)


def tail_of(path: str) -> Tail:
    """A block that is not full in the place of the last of ``path``; siblings share their first token."""
    return Tail(PREFIX[KEYS[path]], b"\7\0\0\0" + path[-1].encode() + b"\0\0\0")


def runs() -> st.SearchStrategy[list[str]]:
    """Consecutive blocks of one path."""

    def cut(bounds: tuple[str, int, int]) -> list[str]:
        path, start, stop = bounds
        start, stop = sorted((start % len(path), stop % len(path)))
        return [path[:end] for end in range(start + 1, stop + 2)]

    return st.tuples(st.sampled_from(PATHS), st.integers(0, 3), st.integers(0, 3)).map(cut)


class PoolHistory(RuleBasedStateMachine):
    """Clients write, read, announce, pin, leave; memory is touched; time goes by."""

    policy: PolicyName = DEFAULT_POLICY

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.client_ids = [1, 2, 3]
        self.numbers: dict[str, int] = {}
        self.writing: dict[int, Writing] = {}
        self.reading: dict[int, Reading] = {}
        self.listed: dict[str, dict[bytes, Tail]] = {name: {} for name in PAGE_SIZES}
        self.committed: dict[str, dict[bytes, bytes]] = {name: {} for name in PAGE_SIZES}
        self.resting: dict[int, set[Slot]] = {}
        self.generations: dict[Slot, int] = {}
        self.touched = [0] * len(SEGMENTS)
        self.told: dict[str, set[bytes]] = {name: set() for name in PAGE_SIZES}
        self.told_until: int | None = None
        self.pinned: dict[str, dict[bytes, float]] = {name: {} for name in PAGE_SIZES}
        self.announced: dict[int, int] = {}

    @initialize(
        watermark=st.sampled_from([1.0, 0.95, 0.5]),
        ratio=st.sampled_from([0.05, 0.5, 1.0]),
        touched=st.sampled_from([True, True, False]),
        limits=st.sampled_from([LIMITS, TIGHT]),
    )
    def start(self, watermark: float, ratio: float, touched: bool, limits: UncommittedLimits) -> None:
        self.settings = (watermark, ratio)
        self.limits = limits
        self.core = PoolCore(
            SEGMENTS, high_watermark=watermark, eviction_ratio=ratio, policy=self.policy, limits=limits
        )
        for name, size in PAGE_SIZES.items():
            self.numbers[name] = self.core.open_namespace(name, size)
        if touched:
            for segment in range(len(SEGMENTS)):
                self.touch(segment, 1.0)
            self.end_touching()

    # What the brain says it has, read without asking it as a client

    def pages(self, name: str) -> dict[bytes, Page]:
        return {page.key: page for page in self.core.namespaces[self.numbers[name]].index}

    def see_evictions(self) -> None:
        """Take note of pages that left, which must have been allowed to."""
        for name, committed in self.committed.items():
            left = self.pages(name)
            gone = {one for one in committed if one not in left}
            for one in gone:
                del committed[one]
            leased = {one for lease in self.reading.values() if lease.namespace == name for one in lease.refs}
            assert not gone & leased, "a leased page was evicted"
            assert not gone & self.pinned[name].keys(), "a pinned page was evicted"
            assert not gone & {PREFIX[one] for one in left}, "a prefix was evicted before its suffix"

    # Rules

    @rule(client=st.sampled_from(SEATS), name=st.sampled_from(sorted(PAGE_SIZES)), run=runs(), partial=st.booleans())
    def reserve(self, client: int, name: str, run: list[str], partial: bool) -> None:
        client_id = self.client_ids[client]
        tails = [tail_of(path) for path in run] if partial else []
        keys = [KEYS[path] for path in run]
        before = self.pages(name)
        out = {slot_of(page.ref) for other in PAGE_SIZES for page in self.pages(other).values()}
        kept = {slot for slots in self.resting.values() for slot in slots}
        reserved = self.core.writing.reserve(client_id, self.numbers[name], PREFIX[keys[0]], keys, tails)
        self.see_evictions()
        for assigned in reserved.assigned:
            if assigned.renewed:
                self.memory_replaced(assigned.segment)
        assert len(reserved.outcomes) == len(keys)
        waiting = {}
        granted = iter(reserved.granted)
        for position, outcome in enumerate(reserved.outcomes):
            known = before.get(keys[position])
            if outcome == Outcome.PRESENT:
                assert known is not None
            elif outcome == Outcome.WRITING:
                assert known is not None
                assert not known.present
            elif outcome == Outcome.GRANTED:
                page = next(granted)
                assert page.key == keys[position]
                waiting[position] = page.key
                self.listed[name].pop(page.key, None)
                if tails:
                    self.listed[name][page.key] = tails[position]
                self.see_grant(page, name, out - self.slots_out_before_grant(reserved.granted), kept)
        assert next(granted, None) is None
        assert all(one in self.pages(name) for one in {*keys, PREFIX[keys[0]]} & before.keys()), "it evicted its own"
        assert (reserved.reservation != 0) == bool(waiting)
        if waiting:
            until = self.now + self.limits.seconds
            self.writing[reserved.reservation] = Writing(client_id, name, waiting, until)
            pool, size = sum(SEGMENTS), PAGE_SIZES[name]
            assert self.uncommitted({client_id}) <= self.limits.of_process(pool, size)
            assert self.uncommitted(None) <= self.limits.of_tenant(pool, size)
        if Outcome.OVER_SHARE in reserved.outcomes:
            assert self.limits is TIGHT

    def uncommitted(self, client_ids: set[int] | None) -> int:
        """Bytes that these clients, or all, hold and have not committed."""
        sizes = [
            len(one.pages) * PAGE_SIZES[one.namespace]
            for one in self.writing.values()
            if client_ids is None or one.client_id in client_ids
        ]
        for client_id, slots in self.resting.items():
            if client_ids is None or client_id in client_ids:
                geometries = [self.core.slots.segments[slot.segment].geometry for slot in slots]
                sizes += [one.slot_stride for one in geometries if one is not None]
        return sum(sizes)

    def slots_out_before_grant(self, granted: list[Page]) -> set[Slot]:
        """Slots that came free within the call: those of evicted pages."""
        now = {slot_of(page.ref) for name in PAGE_SIZES for page in self.pages(name).values() if page not in granted}
        return {slot_of(page.ref) for page in granted} - now

    def see_grant(self, page: Page, name: str, out: set[Slot], resting: set[Slot]) -> None:
        slot = slot_of(page.ref)
        ref = PageRef.unpack(page.ref)
        assert slot not in out, "a slot in use was handed out"
        assert slot not in resting, "a slot that rests was handed out"
        assert ref.generation > self.generations.get(slot, 0), "a generation did not grow"
        self.generations[slot] = ref.generation
        begin = slot_offset(self.core.slots.segments[ref.segment].size, PAGE_SIZES[name], ref.slot)
        assert begin + PAGE_SIZES[name] <= self.touched[ref.segment], "untouched memory was handed out"

    @rule(client=st.sampled_from(SEATS), name=st.sampled_from(sorted(PAGE_SIZES)), run=runs(), partial=st.booleans())
    def save(self, client: int, name: str, run: list[str], partial: bool) -> None:
        before = set(self.writing)
        self.reserve(client, name, run, partial)
        for number in set(self.writing) - before:
            self.publish(number, None)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), part=st.booleans())
    def commit(self, data: st.DataObject, part: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        positions = sorted(self.writing[number].pages)
        self.publish(number, data.draw(st.lists(st.sampled_from(positions), unique=True)) if part else None)

    def publish(self, number: int, positions: list[int] | None) -> None:
        held = self.writing[number]
        pages = self.core.writing.commit(held.client_id, number, positions).pages
        wanted = sorted(held.pages if positions is None else positions)
        assert [page.key for page in pages] == [held.pages.pop(position) for position in wanted]
        for page in pages:
            self.committed[held.namespace][page.key] = page.ref
        if not held.pages:
            del self.writing[number]

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        self.core.writing.abort(self.writing.pop(number).client_id, number)

    @rule(client=st.sampled_from(SEATS), name=st.sampled_from(sorted(PAGE_SIZES)), run=runs(), lease=st.booleans())
    def lookup(self, client: int, name: str, run: list[str], lease: bool) -> None:
        client_id = self.client_ids[client]
        keys = [KEYS[path] for path in run]
        found = self.core.reading.lookup(client_id, self.numbers[name], keys, lease=lease)
        committed = self.committed[name]
        expected = next((at for at, one in enumerate(keys) if one not in committed), len(keys))
        assert [page.key for page in found.pages] == keys[:expected]
        known = self.pages(name)
        assert found.pending == next(
            (at for at, one in enumerate(keys[expected:]) if one not in known), len(keys) - expected
        )
        assert (found.lease != 0) == (lease and expected > 0)
        if found.lease:
            self.reading[found.lease] = Reading(client_id, name, {page.key: page.ref for page in found.pages})

    @rule(
        client=st.sampled_from(SEATS),
        name=st.sampled_from(sorted(PAGE_SIZES)),
        path=st.sampled_from(PATHS),
        lease=st.booleans(),
    )
    def lookup_tail(self, client: int, name: str, path: str, lease: bool) -> None:
        client_id, tail = self.client_ids[client], tail_of(path)
        shared, found = self.core.reading.lookup_tail(client_id, self.numbers[name], tail, lease=lease)
        known = self.pages(name)
        listed = {
            one: other.common(tail.tokens)
            for one, other in self.listed[name].items()
            if other.directory == tail.directory
        }
        here = {one: count for one, count in listed.items() if one in self.committed[name]}
        assert shared == max(here.values(), default=0)
        assert [here[page.key] for page in found.pages] == [shared] * bool(shared)
        assert found.pending == (max((listed[one] for one in listed if one in known), default=0) > shared)
        assert (found.lease != 0) == (lease and shared > 0)
        if found.lease:
            self.reading[found.lease] = Reading(client_id, name, {page.key: page.ref for page in found.pages})

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.reading)))
        self.core.reading.release(self.reading.pop(number).client_id, number)

    @rule(name=st.sampled_from(sorted(PAGE_SIZES)), run=runs(), seconds=st.sampled_from([1.0, 20.0]))
    def pin(self, name: str, run: list[str], seconds: float) -> None:
        keys = [KEYS[path] for path in run]
        pins = self.core.namespaces[self.numbers[name]].pins.pinned
        count = self.core.pin(self.numbers[name], keys, self.now + seconds)
        assert count <= len([one for one in keys if one in self.committed[name]])
        self.pinned[name] = {one: until for one, until in pins.items() if one in self.committed[name]}

    @rule(name=st.sampled_from(sorted(PAGE_SIZES)), run=runs())
    def unpin(self, name: str, run: list[str]) -> None:
        self.core.namespaces[self.numbers[name]].pins.unpin([KEYS[path] for path in run])
        for path in run:
            self.pinned[name].pop(KEYS[path], None)

    @rule(client=st.sampled_from(SEATS), name=st.sampled_from(sorted(PAGE_SIZES)), run=runs())
    def announce(self, client: int, name: str, run: list[str]) -> None:
        client_id = self.client_ids[client]
        number = self.core.announce(client_id, self.numbers[name], [KEYS[path] for path in run], self.now)
        self.announced[number] = client_id

    @precondition(lambda self: self.announced)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.announced)))
        self.core.announcements.withdraw(self.announced.pop(number), number)

    @rule(client=st.sampled_from(SEATS), alive=st.booleans())
    def leave(self, client: int, alive: bool) -> None:
        client_id, self.client_ids[client] = self.client_ids[client], max(self.client_ids) + 1
        held = [number for number, writing in self.writing.items() if writing.client_id == client_id]
        slots = {
            slot_of(self.pages(self.writing[number].namespace)[one].ref)
            for number in held
            for one in self.writing[number].pages.values()
        }
        self.core.disconnect(client_id, self.now, alive=alive)
        for number in held:
            del self.writing[number]
        for number in [number for number, reading in self.reading.items() if reading.client_id == client_id]:
            del self.reading[number]
        assert self.core.deferred.awaits(writer_of(client_id)) == bool(alive and (slots or self.resting.get(client_id)))
        if slots and alive:
            self.resting.setdefault(client_id, set()).update(slots)
        elif not alive:
            self.resting.pop(client_id, None)

    @precondition(lambda self: self.resting)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """A writer that was cut off stops writing into some of its slots, or ends."""
        client_id = data.draw(st.sampled_from(sorted(self.resting)))
        slots = self.resting.pop(client_id)
        still = set(data.draw(st.lists(st.sampled_from(sorted(slots)), unique=True)) if slots else [])
        refs = [self.packed(slot) for slot in still]
        assert self.core.deferred.stopped(writer_of(client_id), refs) == len(slots) - len(still)
        if still:
            self.resting[client_id] = still

    def packed(self, slot: Slot) -> bytes:
        return PageRef(slot.segment, slot.number, self.generations[slot]).pack()

    def memory_replaced(self, segment: int) -> None:
        """Nobody who was there can write into ``segment`` any more."""
        self.touched[segment] = 0
        self.resting = {one: {slot for slot in slots if slot[0] != segment} for one, slots in self.resting.items()}

    @rule(segment=st.integers(0, len(SEGMENTS) - 1), share=st.sampled_from([0.3, 0.7, 1.0]))
    def touch(self, segment: int, share: float) -> None:
        touched = int(SEGMENTS[segment] * share)
        self.core.slots.touch(segment, touched)
        self.touched[segment] = max(self.touched[segment], touched)

    @rule(segment=st.integers(0, len(SEGMENTS) - 1))
    def cut(self, segment: int) -> None:
        """Somebody cut the file of a segment: what was there is gone, whoever holds it, and the segment begins anew."""
        counted = self.core.drop_segment(segment)
        assert self.core.slots.segments[segment].used == 0
        gone = 0
        for committed in self.committed.values():
            for one in [one for one, ref in committed.items() if PageRef.unpack(ref).segment == segment]:
                del committed[one]
                gone += 1
        assert counted == gone
        for reading in self.reading.values():
            for one in [one for one, ref in reading.refs.items() if PageRef.unpack(ref).segment == segment]:
                del reading.refs[one]
        for number, writing in list(self.writing.items()):
            left = self.pages(writing.namespace)
            for at in [at for at, one in writing.pages.items() if one not in left]:
                del writing.pages[at]
            if not writing.pages:
                del self.writing[number]
        for name, pins in self.pinned.items():
            self.pinned[name] = {one: until for one, until in pins.items() if one in self.pages(name)}
        if self.core.slots.settled(self.core.slots.segments[segment]):
            self.core.reclaimer.renew(self.core.slots.segments[segment])
        else:
            self.core.reclaimer.lose(segment)
            self.core.slots.regain(segment)
        self.memory_replaced(segment)

    @rule()
    def end_touching(self) -> None:
        self.core.slots.touching_ended()

    @rule(seconds=st.sampled_from([0.5, 11.0, REPLACE_SECONDS]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        for name, pins in self.pinned.items():
            self.pinned[name] = {one: until for one, until in pins.items() if until > self.now}
        expired = {number: one for number, one in self.writing.items() if one.until <= self.now}
        for one in expired.values():
            pages = self.pages(one.namespace)
            late = {slot_of(pages[name].ref) for name in one.pages.values()}
            self.resting.setdefault(one.client_id, set()).update(late)
        self.core.tick(self.now)
        for number in expired:
            with pytest.raises(StaleReference):
                self.core.writing.commit(self.writing.pop(number).client_id, number)
        segment = self.core.reclaimer.replace(self.now)
        if segment is not None:
            assert any(slot.segment == segment for slots in self.resting.values() for slot in slots)
            self.memory_replaced(segment)
        self.see_evictions()

    def index(self, name: str) -> Index:
        return self.core.namespaces[self.numbers[name]].index

    @rule()
    def read_changes(self) -> None:
        """Whoever follows the changes knows what is here, without ever looking."""
        names = sorted(PAGE_SIZES)
        since = FROM_NOW if self.told_until is None else self.told_until
        self.told_until, lost, told = self.core.changes.since(since, names, self.now)
        if lost or since == FROM_NOW:
            self.told = {name: set(committed) for name, committed in self.committed.items()}
        for run in told:
            keys = {run.keys[at : at + KEY_BYTES] for at in range(0, len(run.keys), KEY_BYTES)}
            known = self.told[names[run.namespace]]
            assert known & keys == (set() if run.stored else keys), "a page came or went twice"
            self.told[names[run.namespace]] = known | keys if run.stored else known - keys
        assert self.told == {name: set(committed) for name, committed in self.committed.items()}

    # What must hold after every step

    @invariant()
    def the_brain_agrees_with_itself(self) -> None:
        assert wrong_core(self.core) == []

    @invariant()
    def the_brain_agrees_with_the_account(self) -> None:
        for name, committed in self.committed.items():
            held = {
                one for writing in self.writing.values() if writing.namespace == name for one in writing.pages.values()
            }
            pages = self.pages(name)
            assert {one: page.ref for one, page in pages.items() if page.present} == committed
            assert {one for one, page in pages.items() if not page.present} == held

    @invariant()
    def no_leased_page_moved(self) -> None:
        for reading in self.reading.values():
            assert reading.refs.items() <= self.committed[reading.namespace].items()

    @invariant()
    def no_two_pages_share_a_slot(self) -> None:
        slots = [slot_of(page.ref) for name in PAGE_SIZES for page in self.pages(name).values()]
        slots += [slot for resting in self.resting.values() for slot in resting]
        assert self.core.stats()["slots_resting"] == sum(map(len, self.resting.values()))
        assert len(slots) == len(set(slots))

    def teardown(self) -> None:
        if not self.numbers:
            return
        for client_id in self.client_ids:
            self.core.disconnect(client_id, self.now, alive=False)
        for client_id in self.resting:
            self.core.deferred.stopped(writer_of(client_id))
        figures = self.core.stats()
        assert (figures["leases"], figures["reservations"], figures["slots_resting"]) == (0, 0, 0)
        assert not any(page.leases for name in PAGE_SIZES for page in self.pages(name).values())
        assert wrong_core(self.core) == []


class LruHistory(PoolHistory):
    policy: PolicyName = "lru"


class S3FifoHistory(PoolHistory):
    policy: PolicyName = "s3fifo"


class ArcHistory(PoolHistory):
    policy: PolicyName = "arc"


PoolHistory.TestCase.settings = examples(200, stateful_step_count=50)
for other in (LruHistory, S3FifoHistory, ArcHistory):
    other.TestCase.settings = examples(50, stateful_step_count=50)
TestPoolHistory = PoolHistory.TestCase
TestLruHistory = LruHistory.TestCase
TestS3FifoHistory = S3FifoHistory.TestCase
TestArcHistory = ArcHistory.TestCase
