"""A request as a line of the access log, with Kthena's fields, as text or as JSON; some fields of our own come last."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

from ems.router.observe.record import Record
from ems.router.observe.settings import Format

_encode = msgspec.json.Encoder().encode
_PHASES = ("request_processing", "upstream_processing", "response_processing")
_WORDS = (
    *("model_name", "model_route", "model_server", "selected_pod", "request_id", "backend_type", "backend_name"),
    *("upstream_model", "upstream_status_code", "upstream_attempts", "error_origin"),
)
"""Fields that the text has as the JSON has them."""
_ALWAYS = frozenset(("status_code", "model_name", *(f"duration_{part}" for part in ("total", *_PHASES))))
_WAITS = (("queue", "queue"), ("ttft", "time_to_first_token"))


def line_of(record: Record, format: Format, wall: float) -> bytes:  # noqa: A002  what else would it be called
    """The line of a request that ended ``wall`` seconds after 1970.

    Names and order are Kthena's, up to ``duration_response_processing``; times are milliseconds, durations whole ones.
    """
    ended, arrived, sent = record.ended, record.arrived, record.sent
    answered = record.first_byte or ended
    error = {"type": record.error_type, "message": record.error_message} if record.error_type else None
    fields: dict[str, Any] = {
        "timestamp": _stamp(wall - (ended - arrived)),
        "method": record.method,
        "path": record.path,
        "protocol": "HTTP/1.1",
        "status_code": record.status,
        "error": error,
        "model_name": record.model,
        "model_route": record.route,
        "model_server": record.server,
        "selected_pod": record.decode,
        "request_id": record.request_id,
        "backend_type": record.backend_type,
        "backend_name": record.backend,
        "upstream_model": record.upstream_model,
        "upstream_status_code": record.answered_status,
        "upstream_attempts": record.attempts,
        "error_origin": _origin(record) if error else "",
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "duration_total": round((ended - arrived) * 1000),
        "duration_request_processing": round((sent - arrived) * 1000),
        "duration_upstream_processing": round((answered - sent) * 1000),
        "duration_response_processing": round((ended - answered) * 1000),
        "prefill_pod": record.prefill,
        "user": record.user,
        "queue": _ms(record.queued),
        "time_to_first_token": _ms(record.first_byte - arrived) if record.first_byte else 0.0,
    }
    if format is Format.TEXT:
        return _text(fields).encode(errors="replace")
    return _encode({name: value for name, value in fields.items() if value or name in _ALWAYS}) + b"\n"


def _text(fields: dict[str, Any]) -> str:
    path, error = _word(fields["path"]), fields["error"]
    parts = [f'[{fields["timestamp"]}] "{fields["method"]} {path} {fields["protocol"]}" {fields["status_code"]}']
    if error:
        parts.append(f"error={error['type']}:{_quoted(error['message'])}")
    parts += [f"{name}={_word(str(fields[name]))}" for name in _WORDS if fields[name]]
    if fields["input_tokens"] or fields["output_tokens"]:
        parts.append(f"tokens={fields['input_tokens']}/{fields['output_tokens']}")
    before, there, after = (fields[f"duration_{part}"] for part in _PHASES)
    parts.append(f"timings={fields['duration_total']}ms({before}+{there}+{after})")
    parts += [f"{name}={_word(fields[name])}" for name in ("prefill_pod", "user") if fields[name]]
    parts += [f"{name}={fields[key]:g}ms" for name, key in _WAITS if fields[key]]
    return " ".join(parts) + "\n"


def _origin(record: Record) -> str:
    return "upstream" if record.answered_status >= 400 or record.broken else "router"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _stamp(wall: float) -> str:
    second, milli = divmod(round(wall * 1e6) // 1000, 1000)
    return f"{_second(second)}.{milli:03d}Z"


@lru_cache(16)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat().removesuffix("+00:00")


def _word(text: str) -> str:
    """A client's text as one word: nobody writes a line of their own into the log."""
    return text if text.isprintable() and " " not in text and '"' not in text else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text)
