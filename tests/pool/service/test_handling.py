"""The one entry of the brain: which effects a request has, in which order, and what follows from their answers."""

from __future__ import annotations

from types import GeneratorType
from typing import Any, TypeVar

import pytest

from ems.errors import PoolRefused, PoolRestarting, StaleReference
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import NO_PARENT, Tail
from ems.pool.layout import PageFlag
from ems.pool.pages import Outcome
from ems.pool.protocol import messages
from ems.pool.protocol.acts import Clear, List
from ems.pool.service.effects import (
    Administer,
    Attach,
    ClearHeaders,
    DescribeSegment,
    Effect,
    MarkWriting,
    NoteTenant,
    Pause,
    Publish,
    QuarantineHeader,
    ShowFigures,
    VerifyPage,
    Work,
)
from ems.pool.service.handling import STEP, RequestHandler
from ems.pool.service.storing import Storing
from tests.pool.brain import PAGE, chain

SIZE = 1 << 20

Result = TypeVar("Result")


class Surroundings:
    """A node without tenants and tiers; ``refuses`` are effects that answer False, ``answers`` what others answer."""

    open = True
    states: tuple[()] = ()
    restarting = False

    def __init__(self) -> None:
        self.seen: list[Effect] = []
        self.answers: dict[type[Effect], Any] = {NoteTenant: True, VerifyPage: False, Attach: SIZE}
        self.core = PoolCore([SIZE, SIZE])
        for segment in (0, 1):
            self.core.touched(segment, SIZE)
        self.core.touching_ended()
        self.storing = Storing(self.core)
        self.handler = RequestHandler(self.core, self.storing, self, self)
        self.namespace = self.core.open_namespace("m", PAGE)

    def features(self, _client_id: int) -> frozenset[str]:
        return frozenset({"reasons"})

    def request_filter(self, _client_id: int, _request: messages.Request) -> None:
        return None

    def page_size(self, _name: str) -> int:
        return 0

    def committed(self, _namespace: int, _pages: object) -> None:
        return None

    def looked_up(self, *_: object) -> int:
        return 0

    def looked_up_tail(self, *_: object) -> bool:
        return False

    def prefetch(self, _namespace: int, _keys: list[bytes]) -> int:
        return 0

    def run(self, work: Work[Result]) -> Result:
        """Note the effects, and answer them."""
        self.seen.clear()
        answer: Any = None
        while True:
            try:
                effect = work.send(answer)
            except StopIteration as end:
                result: Result = end.value
                return result
            self.seen.append(effect)
            answer = self.answers.get(type(effect))

    def ask(self, request: messages.Request) -> Any:
        self.seen.clear()
        answer = self.handler.handle(1, request, 0.0)
        return self.run(answer) if isinstance(answer, GeneratorType) else answer

    def kinds(self) -> list[type[Effect]]:
        return [type(effect) for effect in self.seen]

    def save(self, keys: list[bytes]) -> messages.Granted:
        granted: messages.Granted = self.ask(messages.Reserve(self.namespace, bytes(NO_PARENT), b"".join(keys)))
        self.ask(messages.Commit(granted.reservation, None))
        return granted


@pytest.fixture
def node() -> Surroundings:
    return Surroundings()


def test_a_segment_is_noted_and_described_before_a_page_of_it_is_marked(node: Surroundings) -> None:
    granted = node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), b"".join(chain("x", 2))))
    assert node.kinds() == [NoteTenant, DescribeSegment, MarkWriting]
    assert node.seen[0] == NoteTenant(0, "m")
    assert granted.outcomes == bytes([Outcome.GRANTED] * 2)
    node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), b"".join(chain("y", 2))))
    assert node.kinds() == [MarkWriting]


def test_nothing_is_granted_in_a_segment_of_which_nobody_would_know_whose_it_is(node: Surroundings) -> None:
    node.answers[NoteTenant] = False
    granted = node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), b"".join(chain("x", 2))))
    assert node.kinds() == [NoteTenant]
    assert granted == messages.Granted(0, bytes([Outcome.NO_SPACE] * 2), b"")
    assert node.core.check() == []
    node.answers[NoteTenant] = True
    assert node.save(chain("x", 2)).outcomes == bytes([Outcome.GRANTED] * 2)


def test_pages_are_published_with_their_checksums_by_position(node: Surroundings) -> None:
    granted = node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), b"".join(chain("x", 2))))
    checksums = (7).to_bytes(4, "little") + (8).to_bytes(4, "little")
    assert node.ask(messages.Commit(granted.reservation, [1, 0], checksums)) == messages.Done(2)
    (effect,) = node.seen
    assert isinstance(effect, Publish)
    assert effect.flags == PageFlag(0)
    assert effect.checksums is not None
    assert dict(zip(effect.done.positions, effect.checksums, strict=True)) == {1: 7, 0: 8}


def test_a_slot_that_came_free_is_cleared_before_it_is_marked_again(node: Surroundings) -> None:
    granted = node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), chain("x", 1)[0]))
    node.ask(messages.Abort(granted.reservation))
    node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), chain("y", 1)[0]))
    assert node.kinds() == [ClearHeaders, MarkWriting]
    assert len(node.seen[0].slots) == 1  # type: ignore[attr-defined]


def test_a_long_reservation_pauses_between_its_steps(node: Surroundings) -> None:
    keys = b"".join(chain("x", 2 * STEP))
    granted = node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), keys))
    assert node.kinds().count(Pause) == 1
    assert len(granted.outcomes) == 2 * STEP


def test_a_page_is_quarantined_only_where_the_node_finds_it_wrong_itself(node: Surroundings) -> None:
    refs = node.save(chain("x", 1)).refs
    report = messages.Corrupt(node.namespace, chain("x", 1)[0], refs)
    node.answers[VerifyPage] = True
    assert node.ask(report) == messages.Done(0)
    assert node.kinds() == [VerifyPage]
    node.answers[VerifyPage] = False
    assert node.ask(report) == messages.Done(1)
    assert node.kinds() == [VerifyPage, QuarantineHeader]
    assert node.ask(report) == messages.Done(0)
    assert node.kinds() == []


def test_a_lookup_has_no_effect(node: Surroundings) -> None:
    node.save(chain("x", 2))
    hits = node.ask(messages.Lookup(node.namespace, b"".join(chain("x", 3)), lease=True))
    assert (hits.count, node.seen) == (2, [])


def test_what_the_shell_knows_is_asked_of_it(node: Surroundings) -> None:
    node.answers |= {ShowFigures: {"pid": 7}, Administer: {"done": True}}
    assert node.ask(messages.Stats()) == messages.Figures({"pid": 7})
    assert node.ask(messages.Attach(1)) == messages.SegmentAttached(1, SIZE)
    assert node.ask(messages.Administer(List())) == messages.Reported({"done": True})
    assert node.seen == [Administer(1, List(), dry_run=False)]


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
    assert node.core.check() == []


@pytest.mark.parametrize("keys", [b"", b"a" * 16, bytes(Tail(b"d" * 16, b"1234").key) + b"a" * 16])
def test_a_tail_that_is_not_the_last_key_is_refused_in_one_sentence(keys: bytes) -> None:
    node = Surroundings()
    tail = Tail(b"d" * 16, b"1234")
    with pytest.raises(PoolRefused, match=r"^the last key is .*, expected .*, the hash of the tail's"):
        node.ask(messages.Reserve(node.namespace, bytes(NO_PARENT), keys, tail))
    assert node.core.pages() == 0
