"""The last requests, kept so that somebody can ask why one went where it went."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from ems.router.observe.record import Hop, Record, Tokenization

KEPT: Final = 1024
LISTED: Final = 50
_TIMES: Final = ("entered", "prefill_sent", "prefill_done", "decode_sent", "first_byte", "ended")


class Decisions:
    """At most ``kept`` requests, found by their id; the newest one of an id that came twice."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._records: OrderedDict[str, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        records = self._records
        records[record.request_id] = record
        if len(records) > self._kept:
            records.popitem(last=False)

    def find(self, request_id: str) -> dict[str, Any] | None:
        record = self._records.get(request_id)
        return None if record is None else explained(record)

    def newest(self) -> list[tuple[float, dict[str, Any]]]:
        """Return when each of the last ones ended, and what it was."""
        last = list(self._records.values())[-LISTED:]
        return [
            (one.ended, {"request_id": one.request_id, "model": one.model, "status": one.status, "decode": one.decode})
            for one in reversed(last)
        ]


def explained(record: Record) -> dict[str, Any]:
    """What is known of a request, as JSON's values; times are seconds since it arrived."""

    def since(at: float) -> float | None:
        return round(at - record.arrived, 6) if at else None

    return {
        "request_id": record.request_id,
        "request": {
            "method": record.method,
            "path": record.path,
            "model": record.model,
            "user": record.user,
            "estimated_input_tokens": record.input_tokens,
        },
        "route": {"model_route": record.route, "model_server": record.server, "upstream_model": record.upstream_model},
        "choice": {
            "prefill": record.prefill or None,
            "decode": record.decode or None,
            "prefix_tokens": record.prefix_tokens,
            "session_affinity": record.affinity,
            "tokenized": _tokenization(record.tokenization),
            "attempts": [_attempt(record, hop) for hop in record.hops],
        },
        "times": {"queued": round(record.queued, 6)} | {name: since(getattr(record, name)) for name in _TIMES},
        "answer": {
            "status": record.status,
            "upstream_status": record.answered_status or None,
            "output_tokens": record.output_tokens,
            "broken": record.broken,
            "error": {"type": record.error_type, "message": record.error_message} if record.error_type else None,
        },
    }


def _tokenization(asked: Tokenization | None) -> dict[str, Any] | None:
    if asked is None:
        return None
    return {"instance": str(asked.instance.address), "outcome": asked.outcome, "seconds": round(asked.seconds, 6)}


def _attempt(record: Record, hop: Hop) -> dict[str, Any]:
    """Where a request went, and what each instance scored; costs and tokens are those of the moment."""
    return {
        "role": hop.instance.role,
        "instance": str(hop.instance.address),
        "sent": round(hop.sent - record.arrived, 6),
        "status": hop.status or None,
        "prefetch_hints_to": [str(one.address) for one in hop.told],
        "scores": [
            {
                "instance": str(score.instance.address),
                "cost": round(score.cost, 3),
                "uncached_tokens": score.uncached,
                "session_was_here": score.sticky,
            }
            for score in hop.considered
        ],
    }
