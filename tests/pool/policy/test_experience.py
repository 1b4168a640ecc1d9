"""What a policy has learned goes along: to another process, and over a restart; nothing that is damaged is believed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ems.bench.trace.made import made_trace
from ems.bench.trace.replay import pool_of, replay, serve
from ems.bench.trace.swap import Swap
from ems.config import PolicyName
from ems.pool.core.handover import IndexState
from ems.pool.core.index import Index
from ems.pool.core.pool_core import PoolCore
from ems.pool.policy import experience
from ems.pool.policy.experience import (
    Experience,
    all_at_once,
    pack_experience,
    take_down,
    unpack_experience,
)
from ems.pool.policy.forecast import Forecast
from ems.pool.policy.seam import Learning, make_policy
from tests.pool.policy.test_policies import CHAINS, Small, steps

REQUESTS = 1200


def hits(kind: str, capacity: int, swap: Swap | None) -> int:
    return replay(made_trace(kind, REQUESTS), capacity, "forecast", swap=swap).hits


@pytest.mark.parametrize(("kind", "capacity"), [("conversations", 1000), ("documents", 800), ("loop", 2000)])
@pytest.mark.parametrize("swap", ["hand-over", "stop"])
def test_a_swap_in_the_middle_costs_no_hit(kind: str, capacity: int, swap: Swap) -> None:
    assert hits(kind, capacity, swap) == hits(kind, capacity, None)


def test_what_was_written_down_before_a_kill_is_worth_something() -> None:
    known, nothing = hits("documents", 800, "kill"), hits("documents", 800, "oblivion")
    assert known > 1.02 * nothing
    assert known > 0.98 * hits("documents", 800, None)


# The order of a policy, over random histories


def orders(index: Index) -> list[tuple[bytes, int]]:
    return [(page.key, page.uses) for page in index.policy]


@given(before=steps, after=steps)
@settings(max_examples=60)
def test_a_successor_goes_on_as_if_nothing_had_been(
    before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    small, successor = Small("forecast"), Small("forecast")
    for step, number in before:
        small.do(step, number)
    raw = msgspec.msgpack.encode(small.index.snapshot())
    successor.index.resume(msgspec.msgpack.decode(raw, type=IndexState))
    assert orders(successor.index) == orders(small.index)
    for step, number in after:
        assert successor.do(step, number) == small.do(step, number)
        assert successor.index.check() == []
    assert orders(successor.index) == orders(small.index)


@given(history=steps, gone=st.sets(st.integers(0, 12)), still=st.booleans())
@settings(max_examples=60)
def test_a_restart_may_find_other_pages_than_were_known(
    history: list[tuple[str, int]], gone: set[int], *, still: bool
) -> None:
    """Some left since, and some came."""
    small = Small("forecast")
    for step, number in history:
        small.do(step, number)
    known = all_at_once([("ns", small.index)]) if still else drained(small.index)
    written = unpack_experience(b"".join(pack_experience(known)))["ns"]
    keys = [page.key for at, page in enumerate(small.index) if at not in gone]
    back = Small("forecast")
    found = [(key, small.index.leading([key])[0].ref, before) for key, before in found_by(small.index, keys)]
    assert back.index.restore([*found, (b"new" * 5 + b"!", b"\0" * 20, bytes(16))], written)
    assert back.index.check() == []
    uses = {page.key: page.uses for page in small.index}
    assert {page.key: page.uses for page in back.index if page.key in uses} == {key: uses[key] for key in keys}
    everything = len(back.index)
    assert len(back.evict(everything)) == everything


def drained(index: Index) -> list[Experience]:
    taking = take_down([("ns", index)])
    while True:
        try:
            next(taking)
        except StopIteration as end:
            known: list[Experience] = end.value
            return known


def found_by(index: Index, keys: list[bytes]) -> list[tuple[bytes, bytes]]:
    """As recovery tells it: what hangs on a page comes before it."""
    pages = [page for page in index if page.key in set(keys)]
    return [(page.key, bytes(16) if page.parent is None else page.parent.key) for page in reversed(pages)]


def test_pages_may_come_and_go_while_a_node_takes_down_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experience, "STEP", 7)
    core, namespace = pool_of(100, "forecast")
    trace = made_trace("conversations", 300)
    for request in trace[:100]:
        serve(core, namespace, request.keys)
    taking, known = take_down(core.policies()), list[Experience]()
    for request in trace[100:]:
        serve(core, namespace, request.keys)
        try:
            next(taking)
        except StopIteration as end:
            known = end.value
            break
    assert len(known[0].uses) > 50
    assert unpack_experience(b"".join(pack_experience(known)))[known[0].namespace] == known[0]


# What is not believed


def learned() -> tuple[PoolCore, bytes]:
    core, namespace = pool_of(100, "forecast")
    for request in made_trace("conversations", 50):
        serve(core, namespace, request.keys)
    return core, b"".join(pack_experience(all_at_once(core.policies())))


@given(at=st.integers(0, 10**9), bit=st.integers(0, 7))
@settings(max_examples=50)
def test_a_file_with_a_wrong_bit_is_not_believed(at: int, bit: int) -> None:
    raw = bytearray(WRITTEN)
    raw[at % len(raw)] ^= 1 << bit
    with pytest.raises(ValueError, match=r"."):
        unpack_experience(bytes(raw))


@given(st.integers(0, 10**9))
@settings(max_examples=50)
def test_a_file_that_was_cut_is_not_believed(length: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack_experience(WRITTEN[: length % len(WRITTEN)])


WRITTEN = learned()[1]


def test_pages_that_do_not_add_up_are_not_believed() -> None:
    for one in (Experience("a", bytes(16), b"", b"", b""), Experience("a", bytes(32), b"\1\1", bytes(4), b"")):
        with pytest.raises(ValueError, match="do not add up"):
            unpack_experience(b"".join(pack_experience([one])))


def test_more_than_there_is_room_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one = learned()[0].policies()[0][1]
    size = all_at_once([("a", one)])[0].size
    monkeypatch.setattr(experience, "MOST_BYTES", 2 * size)
    assert [known.namespace for known in all_at_once([("a", one), ("b", one), ("c", one)])] == ["a", "b"]


@pytest.mark.parametrize("name", ["lru", "s3fifo", "arc"])
def test_another_policy_ignores_what_was_learned(name: PolicyName) -> None:
    small = Small("forecast")
    small.save(CHAINS[0])
    successor = Index(make_policy(name))
    successor.resume(small.index.snapshot())
    assert len(successor.policy) == 6
    assert successor.check() == []
    known = all_at_once([("ns", small.index)])[0]
    again = Index(make_policy(name))
    assert not again.restore([(key, bytes(20), bytes(16)) for key in CHAINS[1]], known)
    assert len(again.policy) == 4


def state_of(policy: Forecast) -> dict[str, object]:
    state = msgspec.msgpack.decode(policy.learned())
    names = ["form", "capacity", "touched", "epoch_ends", "learn_at", "history", "memory", "worth"]
    return dict(zip(names, state, strict=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("form", "forecast 0"),
        ("capacity", 13),
        ("capacity", 0),
        ("touched", 10**9),
        ("worth", [[1.0]]),
        ("memory", b""),
        ("history", [0, b"", b"", b"", b""]),
        ("history", [-1, bytes(8 * 8 * 25), bytes(8 * 8 * 25), b"", b""]),
        ("history", [0, bytes(8 * 8 * 25), bytes(8 * 8 * 25), bytes(16), b""]),
        ("history", [0, bytes(8 * 8 * 25), bytes(8 * 8 * 25), bytes(16), b"\xff" * 8]),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_policy_learns_anew(name: str, value: object) -> None:
    small = Small("forecast")
    small.save(CHAINS[0])
    assert isinstance(small.index.policy, Forecast)
    state = state_of(small.index.policy)
    raw = msgspec.msgpack.encode(list({**state, name: value}.values()))
    policy = make_policy("forecast")
    assert isinstance(policy, Learning)
    with pytest.raises(ValueError, match=r"."):
        policy.go_on(raw, b"", [])
    successor = Small("forecast")
    successor.index.resume(msgspec.structs.replace(small.index.snapshot(), learned=raw))
    assert successor.index.check() == []
    assert successor.evict(6) == CHAINS[0][::-1]
