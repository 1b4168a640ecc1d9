"""Which nodes are told of prompts, in virtual time."""

from __future__ import annotations

import msgspec
import pytest

from ems.errors import ConfigError
from ems.http.address import Address
from ems.pool.http.prefetch_hints import (
    LONGEST_PAUSE,
    MOST_BYTES,
    MOST_PROMPT_TOKENS,
    MOST_UNDER_WAY,
    HintOutcome,
    PoolNode,
    PrefetchHints,
    Prompt,
)

NODE, OTHER = PoolNode(Address("10.0.0.1", 9410)), PoolNode(Address("10.0.0.2", 9410))


def test_a_node_takes_the_longest_prompt_whatever_its_ids_are() -> None:
    assert len(msgspec.json.encode(Prompt([2**32 - 1] * MOST_PROMPT_TOKENS, "\n" * 256))) <= MOST_BYTES


def test_so_many_are_under_way_and_no_more() -> None:
    hints = PrefetchHints()
    assert [hints.begin(NODE, 0.0) for _ in range(MOST_UNDER_WAY + 2)] == [True] * MOST_UNDER_WAY + [False] * 2
    assert hints.begin(OTHER, 0.0)
    assert not hints.ended(NODE, HintOutcome.TAKEN, 0.0)
    assert hints.begin(NODE, 0.0)
    assert hints.counts == {HintOutcome.DROPPED: 2, HintOutcome.TAKEN: 1}


@pytest.mark.parametrize("outcome", [HintOutcome.FAILED, HintOutcome.REFUSED])
def test_a_node_that_is_gone_is_tried_less_and_less_and_named_once(outcome: HintOutcome) -> None:
    hints, now, complaints = PrefetchHints(), 0.0, 0
    for failure in range(10):
        assert hints.begin(NODE, now)
        assert not failure or not hints.begin(NODE, now), "one at a time"
        complaints += hints.ended(NODE, outcome, now)
        pause = min(2.0**failure, LONGEST_PAUSE)
        assert not hints.begin(NODE, now + pause - 0.01)
        now += pause
    assert complaints == 1
    assert hints.begin(NODE, now)
    assert not hints.ended(NODE, HintOutcome.TAKEN, now)
    assert [hints.begin(NODE, now) for _ in range(2)] == [True, True]
    assert hints.ended(NODE, outcome, now), "it was well in between"


def test_what_was_under_way_when_a_node_went_counts_as_one_failure() -> None:
    hints = PrefetchHints()
    assert all(hints.begin(NODE, 0.0) for _ in range(MOST_UNDER_WAY))
    assert [hints.ended(NODE, HintOutcome.FAILED, 0.5) for _ in range(MOST_UNDER_WAY)].count(True) == 1
    assert hints.begin(NODE, 1.5)


def test_a_node_that_is_busy_is_well() -> None:
    hints = PrefetchHints()
    assert hints.begin(NODE, 0.0)
    assert not hints.ended(NODE, HintOutcome.DROPPED, 0.0)
    assert [hints.begin(NODE, 0.0) for _ in range(2)] == [True, True]


def test_a_node_is_named_by_its_url() -> None:
    engine = Address("10.0.0.1", 8000)
    assert PoolNode.parse("10.0.0.1:8000=http://10.0.0.1:9410") == (engine, NODE)
    assert PoolNode.parse("10.0.0.1:8000=http://acme@10.0.0.1:9410/") == (engine, PoolNode(NODE.address, "acme"))
    assert PoolNode.parse("[::1]:8=http://[::1]:9") == (Address("::1", 8), PoolNode(Address("::1", 9)))


@pytest.mark.parametrize(
    "text",
    ["", "h:1", "h:1=h:2", "h:1=https://h:2", "h:1=http://h", "h:1=http://@h:2", "h:1=http://a b@h:2", "h=http://h:2"],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no pool node|'h' is not an instance"):
        PoolNode.parse(text)
