"""The fleet under every history that hypothesis can think of."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from ems.http.address import Address
from ems.router.breaker import COOLDOWN, THRESHOLD
from ems.router.choosing.chooser import STICKY_TOKENS, Chooser
from ems.router.choosing.prefix_index import PIECE_BYTES, prefix_hashes
from ems.router.choosing.prompt import Prompt
from ems.router.fleet import Fleet, Hold, Instance, Role
from tests.kit.examples import examples
from tests.router.soundness import unsound

ADDRESSES = [Address("h", port) for port in (1, 2)]
ROLES = st.sampled_from(list(Role))
SPOTS = st.sampled_from(ADDRESSES)


class FleetMachine(RuleBasedStateMachine):
    """Requests come and go, instances come, go, fail and recover, in any order."""

    holds: Bundle[Hold] = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.chooser = Chooser()
        self.fleet = Fleet(self.chooser.forget)
        self.now = 0.0
        self.open: list[Hold] = []
        self.probing: list[Instance] = []
        self.aside: dict[Instance, float] = {}
        """When an instance was first seen to be put aside."""

    @initialize()
    def begin(self) -> None:
        for role in Role:
            for address in ADDRESSES:
                self.fleet.add(role, address, 0.0, trusted=True)

    @rule(role=ROLES, address=SPOTS, trusted=st.booleans())
    def add(self, role: Role, address: Address, trusted: bool) -> None:
        listed = [one.address for one in self.fleet.listed(role)]
        leaving = [one for one in self.fleet.leaving() if (one.role, one.address) == (role, address)]

        assert (address not in listed) == self.fleet.add(role, address, self.now, trusted=trusted)
        if leaving:
            assert leaving[0] in self.fleet.listed(role), "who was leaving stays, with the load it has"

    @rule(role=ROLES, address=SPOTS)
    def remove(self, role: Role, address: Address) -> None:
        found = [one for one in self.fleet.listed(role) if one.address == address]

        assert bool(found) == self.fleet.remove(role, address)
        for instance in found:
            assert instance.draining
            assert (instance in self.fleet.leaving()) == bool(instance.running)

    @rule(
        target=holds,
        role=ROLES,
        cost=st.integers(0, 100_000),
        text=st.integers(0, 8),
        session=st.sampled_from([b"", b"a", b"b"]),
        prefilled=st.booleans(),
    )
    def request(
        self, role: Role, cost: int, text: int, session: bytes, prefilled: bool
    ) -> Hold | MultipleResults[Hold]:
        raw = b"x" * (PIECE_BYTES * text)
        prompt = Prompt(len(raw) // 4, len(raw), prefix_hashes(raw, b""), session)
        usable = self.fleet.usable(role)
        score = self.chooser.choose(role, usable, prompt, self.now, prefilled=prefilled)
        assert score == Chooser.choose(self.chooser, role, usable, prompt, self.now, prefilled=prefilled)
        if score is None:
            assert not self.fleet.usable(role)
            return multiple()

        instance = score.instance
        assert instance.breaker.usable
        assert not instance.draining
        assert instance in self.fleet.listed(role)
        better = [one for one in self.fleet.usable(role) if not one.breaker.doubted]
        if better:
            assert instance in better
            least = min(one.cost for one in self.chooser.scores(role, better, prompt, self.now, prefilled=prefilled))
            assert score.cost <= least + (STICKY_TOKENS if score.sticky else 0)
        assert 0 <= score.uncached <= prompt.tokens

        hold = self.fleet.hold(instance, cost, 0 if prefilled else score.uncached)
        self.chooser.sent(instance, prompt, self.now)
        self.open.append(hold)
        return hold

    @rule(hold=consumes(holds), again=st.booleans())
    def end(self, hold: Hold, again: bool) -> None:
        hold.release()
        if again:
            hold.release()
        self.open.remove(hold)

    @rule(hold=holds)
    def compute_the_prompt(self, hold: Hold) -> None:
        hold.computed()

    @rule(hold=holds)
    def work(self, hold: Hold) -> None:
        self.fleet.succeeded(hold.instance)

    @rule(hold=holds)
    def fail(self, hold: Hold) -> None:
        self.fleet.failed(hold.instance, self.now)

    @rule(hold=holds)
    def answer_with_an_error(self, hold: Hold) -> None:
        self.fleet.suspect(hold.instance, self.now)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def probe(self) -> None:
        due = self.fleet.next_probe()
        started = self.fleet.due_probes(self.now)

        assert bool(started) == (due is not None and due <= self.now)
        for instance in started:
            assert not instance.draining
            assert instance not in self.probing, "one probe at a time"
            if instance in self.aside:
                assert self.now >= self.aside[instance] + COOLDOWN
        self.probing += started

    @rule(data=st.data(), passed=st.booleans())
    def end_of_probe(self, data: st.DataObject, passed: bool) -> None:
        if not self.probing:
            return
        instance = self.probing.pop(data.draw(st.integers(0, len(self.probing) - 1)))
        was_usable = instance.breaker.usable
        if passed:
            back = instance.breaker.probe_passed()

            assert back == (instance.breaker.usable and not was_usable)
        else:
            self.fleet.probe_failed(instance, self.now)

            assert not instance.breaker.usable

    @invariant()
    def sound(self) -> None:
        assert unsound(self.fleet) == []

    @invariant()
    def loads_are_those_of_the_open_requests(self) -> None:
        known = [*self.fleet.listed(Role.PREFILL), *self.fleet.listed(Role.DECODE), *self.fleet.leaving()]
        for instance in known:
            mine = [hold for hold in self.open if hold.instance is instance]

            assert sum(hold.cost for hold in mine) == instance.load
            assert sum(hold.queued for hold in mine) == instance.queued
            assert len(mine) == instance.running
        for hold in self.open:
            assert hold.instance in known, "an instance is known while it works"

    @invariant()
    def remember_who_is_aside(self) -> None:
        # One that is leaving may fail a probe, too, and come back listed.
        for instance in [*self.fleet.listed(Role.PREFILL), *self.fleet.listed(Role.DECODE), *self.fleet.leaving()]:
            if instance.breaker.usable:
                self.aside.pop(instance, None)
            elif instance.served:
                self.aside.setdefault(instance, self.now)

    def teardown(self) -> None:
        for hold in self.open:
            hold.release()
        for role in Role:
            for instance in self.fleet.listed(role):
                assert (instance.load, instance.queued, instance.running) == (0, 0, 0)

        assert self.fleet.leaving() == []
        assert unsound(self.fleet) == []


TestFleet = FleetMachine.TestCase
TestFleet.settings = examples(150, stateful_step_count=60)


def test_a_broken_instance_is_not_chosen_until_cooldown_and_probe() -> None:
    fleet = Fleet()
    for address in ADDRESSES[:2]:
        fleet.add(Role.DECODE, address, 0.0, trusted=True)
    bad, good = fleet.listed(Role.DECODE)
    for _ in range(THRESHOLD):
        fleet.failed(bad, 10.0)

    assert [good] == fleet.usable(Role.DECODE)
    assert bad not in fleet.due_probes(10.0 + COOLDOWN / 2)
    assert bad in fleet.due_probes(10.0 + COOLDOWN)
    assert [good] == fleet.usable(Role.DECODE)

    bad.breaker.probe_passed()

    assert [bad, good] == fleet.usable(Role.DECODE)


def test_a_removed_instance_is_forgotten_with_its_last_request_and_not_before() -> None:
    fleet = Fleet()
    fleet.add(Role.DECODE, ADDRESSES[0], 0.0, trusted=True)
    [instance] = fleet.listed(Role.DECODE)
    first, second = fleet.hold(instance, 1), fleet.hold(instance, 2)
    fleet.remove(Role.DECODE, ADDRESSES[0])
    first.release()

    assert [instance] == fleet.leaving()

    second.release()

    assert fleet.leaving() == []


def test_retry_after_is_the_time_to_the_next_probe() -> None:
    fleet = Fleet()

    assert fleet.retry_after(Role.DECODE, 0.0) == 1

    fleet.add(Role.DECODE, ADDRESSES[0], 0.0, trusted=True)
    [instance] = fleet.listed(Role.DECODE)
    for moment in (0.0, 1.0, 3.0):  # cooldowns of 1, 2 and 4 seconds
        fleet.due_probes(moment)
        instance.breaker.probe_failed(moment)

    assert (fleet.retry_after(Role.DECODE, 3.2), fleet.retry_after(Role.DECODE, 6.9)) == (4, 1)


def test_ready_means_that_a_decode_is_known_to_work() -> None:
    fleet = Fleet()
    fleet.add(Role.PREFILL, ADDRESSES[0], 0.0, trusted=True)
    fleet.add(Role.DECODE, ADDRESSES[1], 0.0, trusted=True)

    assert fleet.usable(Role.DECODE)
    assert not fleet.ready()

    fleet.succeeded(fleet.listed(Role.PREFILL)[0])

    assert not fleet.ready()

    fleet.succeeded(fleet.listed(Role.DECODE)[0])

    assert fleet.ready()
