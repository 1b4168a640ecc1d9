"""The one entry of the brain: what a request has done to memory and files, in which order, and what follows."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Generator
from types import FrameType, GeneratorType
from typing import Any, TypeVar, cast

import pytest

from ems.errors import PoolRefused, PoolRestarting, StaleReference
from ems.pool.core import leases
from ems.pool.core.pins import SETTLED_AT_ONCE
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import KEY_BYTES, NO_PARENT, Tail
from ems.pool.layout import REF_BYTES, PageFlag, carve
from ems.pool.pages import Outcome
from ems.pool.protocol import messages
from ems.pool.protocol.acts import Acts, Clear, List
from ems.pool.protocol.limits import MAX_KEYS
from ems.pool.service.handling import STEP, RequestHandler
from ems.pool.service.storing import Applier, Storing
from ems.pool.tiers.answers import Below
from ems.pool.tiers.manager import TierManager
from tests.pool.brain import PAGE, chain, core_of, save
from tests.pool.wrong_core import wrong_core

SIZE = 1 << 20

Result = TypeVar("Result")


class Surroundings:
    """A node without tenants and tiers; ``seen`` is what was done to memory and files, ``answers`` what came of it."""

    open = True
    states: tuple[()] = ()
    restarting = False

    def __init__(self, core: PoolCore | None = None) -> None:
        self.seen: list[tuple[str, tuple[Any, ...]]] = []
        self.pauses = 0
        self.answers: dict[str, bool | None] = {"note_tenant": True, "verify_page": False}
        self.below = [Below(0, asked=False)]
        """What tiers bring up, by one look after the other; the last one stays."""
        self.core = core or core_of(*[carve(SIZE, PAGE).slot_count] * 2)
        applier = cast("Applier", self)
        self.storing = Storing(self.core, applier)
        self.handler = RequestHandler(self.core, self.storing, applier, cast("TierManager", self), self)
        self.namespace = self.core.open_namespace("m", PAGE)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """What is done to memory and files is noted."""

        def note(*what: Any) -> Any:
            self.seen.append((name, what))
            return self.answers.get(name)

        return note

    def verify_page(self, *what: Any) -> Generator[None, None, bool]:
        self.seen.append(("verify_page", what))
        yield
        return bool(self.answers["verify_page"])

    def request_filter(self, _client_id: int, _request: messages.Request) -> None:
        return None

    def party(self, client_id: int) -> str:
        return f"user {client_id}"

    def segment_size(self, _segment: int) -> int:
        return SIZE

    def figures(self, *, own: bool) -> dict[str, Any]:
        return {"own": own}

    def administer(self, client_id: int, act: Acts, *, dry_run: bool) -> dict[str, Any]:
        return {"did": (client_id, act, dry_run)}

    def page_size(self, _name: str) -> int:
        return 0

    def committed(self, *_: object) -> None:
        return None

    def looked_up(self, *_: object, **_named: object) -> Below:
        return self.below.pop(0) if len(self.below) > 1 else self.below[0]

    looked_up_tail = looked_up

    def learns(self, until: float) -> object:
        self.seen.append(("learns", (until,)))
        return self.answers.get("waking")

    def prefetch(self, *_: object, **_named: object) -> int:
        return 0

    def run(self, work: Generator[None, None, Result]) -> Result:
        """Do all of ``work``."""
        self.seen.clear()
        self.pauses = 0
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: Result = end.value
                return result
            self.pauses += 1

    def ask(self, request: messages.Request) -> Any:
        self.seen.clear()
        answer = self.handler.handle(1, request, 0.0)
        return self.run(answer) if isinstance(answer, GeneratorType) else answer

    def kinds(self) -> list[str]:
        return [name for name, _ in self.seen]

    def save(self, keys: list[bytes]) -> messages.Granted:
        granted: messages.Granted = self.ask(messages.Reserve(self.namespace, bytes(NO_PARENT), b"".join(keys)))
        self.ask(messages.Commit(granted.reservation, None))
        return granted


@pytest.fixture
def node() -> Surroundings:
    return Surroundings()


def test_a_segment_is_noted_and_described_before_a_page_of_it_is_marked(node: Surroundings) -> None:
    granted = node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), b"".join(chain("x", 2))))
    assert node.kinds() == ["note_tenant", "describe_segment", "mark_writing"]
    assert node.seen[0] == ("note_tenant", (0, "m"))
    assert granted.outcomes == bytes([Outcome.GRANTED] * 2)
    node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), b"".join(chain("y", 2))))
    assert node.kinds() == ["mark_writing"]


def test_nothing_is_granted_in_a_segment_of_which_nobody_would_know_whose_it_is(node: Surroundings) -> None:
    node.answers["note_tenant"] = False
    granted = node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), b"".join(chain("x", 2))))
    assert node.kinds() == ["note_tenant"]
    assert granted == messages.Granted(0, bytes([Outcome.NO_SPACE] * 2), b"")
    assert wrong_core(node.core) == []
    node.answers["note_tenant"] = True
    assert node.save(chain("x", 2)).outcomes == bytes([Outcome.GRANTED] * 2)


def test_pages_are_published_with_their_checksums_by_position(node: Surroundings) -> None:
    granted = node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), b"".join(chain("x", 2))))
    checksums = (7).to_bytes(4, "little") + (8).to_bytes(4, "little")
    assert node.ask(messages.Commit(granted.reservation, [1, 0], checksums)) == messages.Done(2)
    ((name, (done, told, flags)),) = node.seen
    assert (name, flags) == ("publish", PageFlag(0))
    assert ([page.key for page in done.pages], told) == (chain("x", 2), [8, 7])


def test_a_slot_that_came_free_is_cleared_before_it_is_marked_again(node: Surroundings) -> None:
    granted = node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), chain("x", 1)[0]))
    node.ask(messages.Abort(granted.reservation))
    node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), chain("y", 1)[0]))
    assert node.kinds() == ["clear_headers", "mark_writing"]
    assert len(node.seen[0][1][0]) == 1


def test_a_long_reservation_pauses_between_its_steps(node: Surroundings) -> None:
    keys = b"".join(chain("x", 2 * STEP))
    granted = node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), keys))
    assert node.pauses == 1
    assert len(granted.outcomes) == 2 * STEP


def test_a_page_is_quarantined_only_where_the_node_finds_it_wrong_itself(node: Surroundings) -> None:
    refs = node.save(chain("x", 1)).refs
    report = messages.Corrupt(node.namespace, chain("x", 1)[0], refs)
    node.answers["verify_page"] = True
    assert node.ask(report) == messages.Done(0)
    assert node.kinds() == ["verify_page"]
    node.answers["verify_page"] = False
    assert node.ask(report) == messages.Done(1)
    assert node.kinds() == ["verify_page", "quarantine_header"]
    assert node.ask(report) == messages.Done(0)
    assert node.kinds() == []


def test_a_lookup_has_no_effect(node: Surroundings) -> None:
    node.save(chain("x", 2))
    hits = node.ask(messages.Lookup(node.namespace, b"".join(chain("x", 3)), lease=True))
    assert (hits.count, node.seen) == (2, [])


def test_what_the_shell_knows_is_asked_of_it(node: Surroundings) -> None:
    assert node.ask(messages.Stats()) == messages.Figures({"own": False})
    assert node.ask(messages.Attach(1)) == messages.SegmentAttached(1, SIZE)
    assert node.ask(messages.Administer(List())) == messages.Reported({"did": (1, List(), False)})


def test_nothing_new_is_begun_when_the_node_is_about_to_restart(node: Surroundings) -> None:
    node.save(chain("x", 1))
    granted = node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), chain("y", 1)[0]))
    node.restarting = True
    for request in (
        messages.Reserve(node.namespace, bytes(NO_PARENT), chain("z", 1)[0]),
        messages.Lookup(node.namespace, chain("x", 1)[0], lease=True),
        messages.Administer(Clear(everything=True)),
    ):
        with pytest.raises(PoolRestarting):
            node.ask(request)
    assert node.ask(messages.Lookup(node.namespace, chain("x", 1)[0])).count == 1
    assert node.ask(messages.Commit(granted.reservation, None)) == messages.Done(1)


def test_a_refusal_is_an_error_of_the_request_alone(node: Surroundings) -> None:
    with pytest.raises(StaleReference):
        node.ask(messages.Commit(99, None))
    assert wrong_core(node.core) == []


@pytest.mark.parametrize("keys", [b"a" * 16, bytes(Tail(b"d" * 16, b"1234").key) + b"a" * 16])
def test_a_tail_that_is_not_the_last_key_is_refused_in_one_sentence(keys: bytes) -> None:
    node = Surroundings()
    tail = Tail(b"d" * 16, b"1234")
    with pytest.raises(PoolRefused, match=r"^the key is .*, expected .*, the hash of its tail's"):
        node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), keys, {len(keys) // 16 - 1: tail}))
    assert node.core.pages() == 0


def test_every_page_with_a_tail_is_found_by_its_tokens(node: Surroundings) -> None:
    tails = [Tail(bytes([number]) * 16, bytes([number, 0, 0, 0] * 4)) for number in range(3)]
    keys = b"".join(tail.key for tail in tails)
    request = messages.Reserve(node.namespace, bytes(NO_PARENT), keys, dict(enumerate(tails)))
    assert node.ask(messages.Commit(node.ask(request).reservation, None)) == messages.Done(3)
    for tail in tails:
        asked = Tail(tail.directory, tail.tokens[:8] + b"else" * 2)
        found = node.ask(messages.Lookup(node.namespace, b"", tail=asked))
        assert (found.count, found.key) == (2, tail.key)


def test_a_tail_in_the_middle_that_is_not_its_key_is_refused_before_anything_is_stored(node: Surroundings) -> None:
    good, wrong = Tail(b"d" * 16, b"1234"), Tail(b"d" * 16, b"5678")
    keys = good.key + b"a" * 16 + b"b" * 16
    request = messages.Reserve(node.namespace, bytes(NO_PARENT), keys, {0: good, 1: wrong})
    with pytest.raises(PoolRefused, match=r"^the key is .*, expected .*, the hash of its tail's"):
        node.ask(request)
    assert node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), good.key)).outcomes == b"\0"


# Long requests

LONG = 5000
"""More keys than a request may have that is done at once."""
MOST_LINES = 20_000
"""Lines of Python of one step; those of all keys are more."""
MANY = 65_536


@pytest.fixture
def large() -> Surroundings:
    node = Surroundings(core_of(LONG + 10))
    save(node.core, node.namespace, chain("x", LONG))
    node.core.settle()
    return node


def longest_step(node: Surroundings, request: messages.Request) -> tuple[int, Any]:
    """Most lines of Python between two pauses of ``request``, and its answer."""
    counts = [0]

    def trace(_frame: FrameType, event: str, _arg: object) -> object:
        counts[-1] += event == "line"
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        answer = node.handler.handle(1, request, 0.0)
        while isinstance(answer, GeneratorType):
            try:
                next(answer)
            except StopIteration as end:
                answer = end.value
            counts.append(0)
    finally:
        sys.settrace(None)
    return max(counts), answer


@pytest.mark.parametrize("verb", [messages.Announce, messages.Prefetch])
def test_many_keys_are_announced_and_withdrawn_in_steps(large: Surroundings, verb: type) -> None:
    keys = b"".join(chain("y", MANY))
    lines, answer = longest_step(large, verb(large.namespace, keys))
    assert lines < MOST_LINES
    if verb is messages.Announce:
        assert len(large.core.namespaces[0].pins.awaited) == MANY - 16
        lines, _ = longest_step(large, messages.Withdraw(answer.announcement))
        assert lines < MOST_LINES
    assert not large.core.namespaces[0].pins.awaited
    assert wrong_core(large.core) == []


def test_the_end_of_who_announced_much_is_short(large: Surroundings) -> None:
    longest_step(large, messages.Announce(large.namespace, b"".join(chain("y", MANY))))
    counts = [0]

    def trace(_frame: FrameType, event: str, _arg: object) -> object:
        counts[-1] += event == "line"
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        large.core.disconnect(1, 0.0, alive=False)
    finally:
        sys.settrace(None)
    assert counts[0] < MOST_LINES
    large.core.settle()
    assert not large.core.namespaces[0].pins.awaited


@pytest.mark.parametrize("there", [LONG, LONG // 2, 300, 256, 0])
@pytest.mark.parametrize("lease", [True, False])
def test_a_long_lookup_answers_as_a_short_one_does(large: Surroundings, there: int, lease: bool) -> None:
    keys = chain("x", LONG)[:there] + chain("y", LONG)[: LONG - there]
    granted = large.ask(messages.Reserve(large.namespace, bytes(16), b"".join(keys[there : there + 5])))
    before = large.core.reading.lookup(2, large.namespace, keys, lease=lease, request="short")
    lines, hits = longest_step(large, messages.Lookup(large.namespace, b"".join(keys), lease=lease, request="long"))
    assert lines < MOST_LINES
    assert (hits.count, hits.pending, hits.code, hits.refs) == (there, before.pending, before.code, before.refs)
    assert hits.pending == granted.outcomes.count(Outcome.GRANTED)
    assert large.core.counters.keys_looked_up == 2 * LONG
    assert large.core.counters.keys_hit == 2 * there
    assert large.core.reasons.requests.looks("long") == large.core.reasons.requests.looks("short")
    assert bool(hits.lease) is (lease and there > 0)
    assert len(large.core.leases.pages(1, hits.lease)) == (there if lease else 0)
    large.core.settle()
    assert wrong_core(large.core) == []
    large.core.disconnect(1, 0.0, alive=False)
    large.core.disconnect(2, 0.0, alive=False)
    assert wrong_core(large.core) == []


@pytest.mark.parametrize("missing", [0, 100, 300, LONG])
def test_a_long_explanation_answers_as_a_short_one_does(large: Surroundings, missing: int) -> None:
    keys = chain("x", LONG)
    if missing < LONG:
        keys[missing] = chain("y", 1)[0]
    told = large.core.reading.explain("m", keys)
    lines, answer = longest_step(large, messages.Explain("m", b"".join(keys)))
    assert lines < MOST_LINES
    assert answer == messages.Explained(told.codes, told.seconds, told.winner, told.layouts)
    assert large.ask(messages.Explain("m", b"")) == messages.Explained(b"")


def test_what_is_damaged_during_a_long_lookup_is_promised_to_nobody(large: Surroundings) -> None:
    keys = chain("x", LONG)
    looking = large.handler.handle(1, messages.Lookup(large.namespace, b"".join(keys), lease=True), 0.0)
    assert isinstance(looking, GeneratorType)
    for _ in range(3):
        next(looking)
    for at in (10, 2000):  # one that is promised already, one that is not; both are stored again at once
        page = large.core.page(large.namespace, keys[at])
        assert page is not None
        large.core.quarantine(large.namespace, page)
        save(large.core, large.namespace, [keys[at]], parent=keys[at - 1], client_id=3)
    hits = large.run(looking)
    assert (hits.count, len(hits.refs)) == (LONG, REF_BYTES * LONG)
    assert len(large.core.leases.pages(1, hits.lease)) == LONG - 1
    assert wrong_core(large.core) == []
    large.core.reading.release(1, hits.lease)
    assert wrong_core(large.core) == []


def test_a_long_lookup_that_is_refused_or_cut_off_leaves_nothing(
    large: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = messages.Lookup(large.namespace, b"".join(chain("x", LONG)), lease=True)
    with monkeypatch.context() as patch:
        patch.setattr(leases, "MAX_LEASED_EACH", LONG // 2)
        with pytest.raises(PoolRefused, match="release some"):
            large.ask(request)
    assert len(large.core.leases) == 0
    looking = large.handler.handle(1, request, 0.0)
    assert isinstance(looking, GeneratorType)
    next(looking)
    looking.close()
    large.core.disconnect(1, 0.0, alive=False)
    assert len(large.core.leases) == 0
    assert wrong_core(large.core) == []


def test_a_reservation_that_waits_for_its_turn_takes_no_memory_for_each_of_its_keys() -> None:
    node, keys = Surroundings(), bytes(KEY_BYTES) * MAX_KEYS
    tracemalloc.start()
    try:
        reserving = node.handler.handle(1, messages.Reserve(node.namespace, NO_PARENT, keys), 0.0)
        assert isinstance(reserving, GeneratorType)
        next(reserving)
        assert tracemalloc.get_traced_memory()[0] < len(keys) // 4
    finally:
        tracemalloc.stop()


def test_of_announcements_that_come_together_one_is_put_off_at_a_time(large: Surroundings) -> None:
    """The others are kept as they came, which takes a quarter of the memory of their keys."""
    keys = [b"".join(chain(name, 16 * STEP)) for name in "abcdefgh"]
    announcing = [
        cast("Generator[None, None, messages.Announced]", large.handler.handle(one, request, 0.0))
        for one, request in enumerate((messages.Announce(large.namespace, some) for some in keys), 1)
    ]
    most, over = 0, object()
    while announcing:
        announcing = [one for one in announcing if next(one, over) is not over]
        most = max(most, len(large.core.announcements._unsettled))
    assert most <= 16 * STEP // SETTLED_AT_ONCE
    assert len(large.core.announcements) == len(keys)
    assert wrong_core(large.core) == []


TAIL = Tail(bytes(16), bytes(4))


@pytest.mark.parametrize("tail", [None, TAIL], ids=["keys", "tail"])
def test_a_lookup_waits_until_tiers_have_said_what_they_have(node: Surroundings, tail: Tail | None) -> None:
    node.answers["waking"] = True
    asked = Below(2, asked=True)
    node.below = [asked, asked, Below(1, asked=False)]
    hits = node.ask(messages.Lookup(node.namespace, b"".join(chain("x", 2)), tail=tail, patience=4000))
    assert (hits.count, hits.below) == (0, 1)
    assert node.seen == [("learns", (0.004,))] * 2, "it is until then that it waits, however often it is woken"


@pytest.mark.parametrize("tail", [None, TAIL], ids=["keys", "tail"])
@pytest.mark.parametrize("patience", [0, 4000])
def test_a_lookup_waits_no_longer_than_who_asks(node: Surroundings, tail: Tail | None, patience: int) -> None:
    node.answers["waking"] = None
    node.below = [Below(2, asked=True)]
    hits = node.ask(messages.Lookup(node.namespace, b"".join(chain("x", 2)), tail=tail, patience=patience))
    assert (hits.count, hits.below) == (0, 2)
    assert (node.kinds() == []) == (not patience)
