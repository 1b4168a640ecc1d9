from __future__ import annotations

import msgspec

from ems.router.observe.decisions import Decisions
from tests.router.observe.records import record, refused


class Score(msgspec.Struct):
    plugin: str
    score: int


class Opaque:
    def __str__(self) -> str:
        return "opaque"


def test_says_where_a_request_went_and_why() -> None:
    decisions = Decisions()
    decisions.add(record(choice=(Score("prefix-cache", 75), Opaque(), {"least-request": 9})))
    found = decisions.find("r-1")

    assert found is not None
    assert found["choice"] == {
        "prefill": "10.0.0.1:1",
        "decode": "10.0.0.2:2",
        "prefix_tokens": 30,
        "session_affinity": None,
        "why": ({"plugin": "prefix-cache", "score": 75}, "opaque", {"least-request": 9}),
    }
    assert found["times"]["first_byte"] == 0.5
    assert msgspec.json.decode(msgspec.json.encode(found))["choice"]["why"][1] == "opaque"


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

    assert [one["request_id"] for one in decisions.newest()] == ["r4", "r3"]
    assert decisions.find("r2") is None
    none = Decisions(0)
    none.add(record())
    assert none.find("r-1") is None
