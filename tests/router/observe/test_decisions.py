from __future__ import annotations

import msgspec

from ems.router.observe.decisions import Decisions
from tests.router.observe.records import chosen, record, refused


def test_says_where_a_request_went_and_why() -> None:
    decisions = Decisions()
    decisions.add(chosen())
    found = decisions.find("r-1")

    assert found is not None
    assert found["choice"]["attempts"] == [
        {
            "role": "decode",
            "instance": "10.0.0.2:2",
            "sent": 0.2,
            "status": 200,
            "prefetch_hints_to": [],
            "scores": [
                {"instance": "10.0.0.2:2", "cost": 40.0, "uncached_tokens": 10, "session_was_here": True},
                {"instance": "10.0.0.2:3", "cost": 80.0, "uncached_tokens": 20, "session_was_here": True},
            ],
        }
    ]
    assert found["times"]["first_byte"] == 0.5
    assert msgspec.json.decode(msgspec.json.encode(found)) == found


def test_attempts_say_what_is_true_of_the_request() -> None:
    one = chosen(prefix_tokens=0, attempts=0, backend_type="none")
    one.settle()

    assert (one.attempts, one.decode, one.prefix_tokens, one.affinity) == (1, "10.0.0.2:2", 30, True)


def test_says_why_a_request_was_refused() -> None:
    decisions = Decisions()
    decisions.add(refused(error_message="no"))
    found = decisions.find("r-1")

    assert found is not None
    assert found["answer"]["error"] == {"type": "rate_limit", "message": "no"}
    assert found["times"]["decode_sent"] is None


def test_keeps_the_newest_only() -> None:
    decisions = Decisions(2)
    for number in range(5):
        decisions.add(record(request_id=f"r{number}"))

    assert [one["request_id"] for _, one in decisions.newest()] == ["r4", "r3"]
    assert decisions.find("r2") is None
    none = Decisions(0)
    none.add(record())
    assert none.find("r-1") is None
