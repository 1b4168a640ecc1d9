"""What is believed of the cluster grows old; a question is asked once, and one without an answer is a no."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ems.pool.keys import NO_DIRECTORY, Tail
from ems.pool.tiers.answers import StoredTail
from ems.pool.tiers.cluster import known
from ems.pool.tiers.cluster.known import ABSENT_SECONDS, ASKED_SECONDS, PRESENT_SECONDS, WRITTEN_SECONDS, KnownKeys

NAMESPACE = "t/m/l"
KEYS = [bytes([number]) * 16 for number in range(10)]


def test_a_question_is_asked_once_and_waited_for() -> None:
    table = KnownKeys()
    assert table.unknown(NAMESPACE, KEYS, 0.0) == (10, KEYS, [])
    assert table.unknown(NAMESPACE, KEYS, 0.5) == (10, [], [])
    assert table.holds(NAMESPACE, KEYS, 0.5) == 0


def test_what_follows_a_question_is_asked_for_alone() -> None:
    table = KnownKeys()
    table.unknown(NAMESPACE, KEYS[:4], 0.0)
    assert table.unknown(NAMESPACE, KEYS, 0.0) == (10, KEYS[4:], [])


def test_a_yes_counts_until_it_is_old() -> None:
    table = KnownKeys()
    table.unknown(NAMESPACE, KEYS, 0.0)
    table.answered(NAMESPACE, KEYS, [True] * 4 + [False] * 6, 0.0)
    assert table.holds(NAMESPACE, KEYS, PRESENT_SECONDS - 0.1) == 4
    assert table.unknown(NAMESPACE, KEYS[4:], ABSENT_SECONDS - 0.1) == (0, [], [])
    assert table.unknown(NAMESPACE, KEYS[4:], ABSENT_SECONDS) == (6, KEYS[4:], [])
    assert table.holds(NAMESPACE, KEYS, PRESENT_SECONDS) == 0
    assert table.unknown(NAMESPACE, KEYS[:4], PRESENT_SECONDS) == (4, KEYS[:4], [])


def test_a_question_without_an_answer_is_a_no_for_a_while() -> None:
    table = KnownKeys()
    table.unknown(NAMESPACE, KEYS, 0.0)
    assert table.unknown(NAMESPACE, KEYS, ASKED_SECONDS) == (0, [], [])
    assert table.unknown(NAMESPACE, KEYS[:1], ASKED_SECONDS + ABSENT_SECONDS) == (1, KEYS[:1], [])


def test_what_this_node_stored_is_there_and_not_stored_again_for_a_while() -> None:
    table = KnownKeys()
    table.stored(NAMESPACE, KEYS[:2], 0.0)
    assert table.holds(NAMESPACE, KEYS, 0.0) == 2
    assert table.written(NAMESPACE, KEYS[0], WRITTEN_SECONDS - 0.1)
    assert not table.written(NAMESPACE, KEYS[0], WRITTEN_SECONDS)
    assert not table.written(NAMESPACE, KEYS[2], 0.0)
    table.lost(NAMESPACE, KEYS[:1], 1.0)
    assert table.holds(NAMESPACE, KEYS, 1.0) == 0
    assert not table.written(NAMESPACE, KEYS[0], 1.0)


def test_namespaces_do_not_meet() -> None:
    table = KnownKeys()
    table.stored(NAMESPACE, KEYS, 0.0)
    assert table.holds("u/m/l", KEYS, 0.0) == 0
    table.drop("u/m/l")
    assert table.holds(NAMESPACE, KEYS, 0.0) == 10
    table.drop(NAMESPACE)
    assert table.holds(NAMESPACE, KEYS, 0.0) == 0


def tail(tokens: bytes) -> StoredTail:
    return StoredTail(Tail(b"d" * 16, tokens), b"p" * 16)


def test_the_tail_that_shares_most_tokens_is_found_as_long_as_its_page_is_there() -> None:
    table, wanted = KnownKeys(), Tail(b"d" * 16, b"aaaabbbbcccc")
    assert table.unknown_place(NAMESPACE, wanted.directory, 0.0) == (True, True)
    assert table.unknown_place(NAMESPACE, wanted.directory, 0.1) == (True, False)
    short, long = tail(b"aaaa"), tail(b"aaaabbbbxxxx")
    table.listed(NAMESPACE, wanted.directory, [short, long, tail(b"zzzz")], 0.1)
    assert table.unknown_place(NAMESPACE, wanted.directory, 0.2) == (False, False)
    assert table.find_tail(NAMESPACE, wanted, 0.2) == long
    assert table.tail(NAMESPACE, bytes(long.tail.key)) == long.tail
    table.lost(NAMESPACE, [bytes(long.tail.key)], 0.3)
    assert table.find_tail(NAMESPACE, wanted, 0.3) == short
    assert table.find_tail(NAMESPACE, Tail(b"d" * 16, b"yyyy"), 0.3) is None
    assert table.find_tail(NAMESPACE, wanted, 0.1 + PRESENT_SECONDS) is None


def test_tails_that_nobody_listed_in_time_are_none() -> None:
    table = KnownKeys()
    table.unknown_place(NAMESPACE, b"d" * 16, 0.0)
    assert table.unknown_place(NAMESPACE, b"d" * 16, ASKED_SECONDS) == (False, False)
    assert table.unknown_place(NAMESPACE, b"d" * 16, ASKED_SECONDS + ABSENT_SECONDS) == (True, True)


DIRECTORIES = [bytes([100 + number]) * 16 for number in range(5)]


def test_with_keys_their_directories_are_asked_for() -> None:
    table = KnownKeys()
    table.stored(NAMESPACE, KEYS[1:2], 0.0)
    asked = table.unknown(NAMESPACE, KEYS[:4], 0.0, DIRECTORIES)
    assert asked == (4, [KEYS[0], *KEYS[2:4]], [DIRECTORIES[0], *DIRECTORIES[2:]])
    assert [table.unknown_place(NAMESPACE, one, 0.0) for one in asked.directories] == [(True, False)] * 4
    assert table.unknown(NAMESPACE, KEYS[:4], 0.0, DIRECTORIES) == (4, [], [])
    none = table.unknown(NAMESPACE, KEYS[4:5], 0.0, [DIRECTORIES[1], NO_DIRECTORY])
    assert none.directories == [DIRECTORIES[1], NO_DIRECTORY], "one behind all that is none"
    assert table.unknown_place(NAMESPACE, NO_DIRECTORY, 0.0) == (True, True)


def test_of_directories_that_list_something_it_is_asked_what() -> None:
    table, told = KnownKeys(), tail(b"aaaa")
    asked = table.unknown(NAMESPACE, KEYS[:4], 0.0, DIRECTORIES)
    table.listed(NAMESPACE, DIRECTORIES[1], [told], 0.05)
    table.answered_places(NAMESPACE, asked.directories, [False, False, True, False, True], 0.1)
    found = [table.unknown_place(NAMESPACE, one, 0.2) for one in DIRECTORIES]
    assert found == [(False, False)] * 2 + [(True, True), (False, False), (True, True)]
    wanted = Tail(DIRECTORIES[1], told.tail.tokens)
    assert table.find_tail(NAMESPACE, wanted, 0.2) == told, "who read the list knows more"


@given(steps=st.lists(st.tuples(st.sampled_from(["ask", "yes", "no", "store", "lose"]), st.integers(0, 30))))
def test_memory_is_bounded_and_nothing_is_held_that_was_not_said(steps: list[tuple[str, int]]) -> None:
    table, said, now = KnownKeys(), set[bytes](), 0.0
    before, known.MOST_KEYS = known.MOST_KEYS, 8
    try:
        for verb, number in steps:
            name, now = bytes([number]) * 16, now + 0.01
            if verb == "ask":
                table.unknown(NAMESPACE, [name], now)
            elif verb in {"yes", "no"}:
                table.answered(NAMESPACE, [name], [verb == "yes"], now)
            elif verb == "store":
                table.stored(NAMESPACE, [name], now)
            else:
                table.lost(NAMESPACE, [name], now)
            if verb in {"yes", "store"}:
                said.add(name)
            elif verb in {"no", "lose"}:
                said.discard(name)
            assert len(table._keys) <= 8
            assert len(table._written) <= 8
            held = {name for name in (bytes([one]) * 16 for one in range(31)) if table.holds(NAMESPACE, [name], now)}
            assert held <= said
    finally:
        known.MOST_KEYS = before
