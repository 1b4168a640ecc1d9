"""A request as a line of the access log, with Kthena's fields, as text or as JSON; some fields of our own come last."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from ems.router.observe.record import Record
from ems.router.observe.settings import Format


class _Error(msgspec.Struct):
    type: str
    message: str


class _Line(msgspec.Struct, omit_defaults=True):
    """Names and order are Kthena's, up to ``duration_response_processing``; durations are milliseconds."""

    timestamp: str
    method: str
    path: str
    protocol: str
    status_code: int
    error: _Error | None = None
    model_name: str = ""
    model_route: str = ""
    model_server: str = ""
    selected_pod: str = ""
    request_id: str = ""
    backend_type: str = ""
    backend_name: str = ""
    upstream_model: str = ""
    upstream_status_code: int = 0
    upstream_attempts: int = 0
    error_origin: str = ""
    gateway: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    duration_total: float = 0.0
    duration_request_processing: float = 0.0
    duration_upstream_processing: float = 0.0
    duration_response_processing: float = 0.0
    prefill_pod: str = ""
    user: str = ""
    queue: float = 0.0
    time_to_first_token: float = 0.0


_encode = msgspec.json.Encoder().encode


def line_of(record: Record, format: Format, wall: float) -> bytes:  # noqa: A002  what else would it be called
    """The line of a request that ended ``wall`` seconds after 1970."""
    ended, arrived = record.ended, record.arrived
    total = _ms(ended - arrived)
    sent = record.sent
    before = _ms(sent - arrived)
    upstream = _ms((record.first_byte or ended) - sent)
    after = _ms(ended - (record.first_byte or ended))
    stamp = _stamp(wall - (ended - arrived))
    if format is Format.TEXT:
        pairs = [
            f'[{stamp}] "{record.method} {_word(record.path)} HTTP/1.1" {record.status}',
            f"error={record.error_type}:{_quoted(record.error_message)}" if record.error_type else "",
            f"model_name={_word(record.model)}" if record.model else "",
            f"model_route={record.route}" if record.route else "",
            f"model_server={record.server}" if record.server else "",
            f"selected_pod={record.decode}" if record.decode else "",
            f"request_id={_word(record.request_id)}",
            f"backend_type={record.backend_type}",
            f"backend_name={record.backend}" if record.backend else "",
            f"upstream_model={_word(record.upstream_model)}" if record.upstream_model else "",
            f"upstream_status_code={record.answered_status}" if record.answered_status else "",
            f"upstream_attempts={record.attempts}" if record.attempts else "",
            f"error_origin={_origin(record)}" if record.error_type else "",
            f"gateway={record.gateway}" if record.gateway else "",
            f"tokens={record.input_tokens}/{record.output_tokens}",
            f"timings={total:g}ms({before:g}+{upstream:g}+{after:g})",
            f"prefill_pod={record.prefill}" if record.prefill else "",
            f"user={_word(record.user)}" if record.user else "",
            f"queue={_ms(record.queued):g}ms" if record.queued else "",
            f"ttft={_ms(record.first_byte - arrived):g}ms" if record.first_byte else "",
        ]
        return (" ".join(filter(None, pairs)) + "\n").encode(errors="replace")
    line = _Line(
        timestamp=stamp,
        method=record.method,
        path=record.path,
        protocol="HTTP/1.1",
        status_code=record.status,
        error=_Error(record.error_type, record.error_message) if record.error_type else None,
        model_name=record.model,
        model_route=record.route,
        model_server=record.server,
        selected_pod=record.decode,
        request_id=record.request_id,
        backend_type=record.backend_type,
        backend_name=record.backend,
        upstream_model=record.upstream_model,
        upstream_status_code=record.answered_status,
        upstream_attempts=record.attempts,
        error_origin=_origin(record) if record.error_type else "",
        gateway=record.gateway,
        input_tokens=record.input_tokens,
        output_tokens=record.output_tokens,
        duration_total=total,
        duration_request_processing=before,
        duration_upstream_processing=upstream,
        duration_response_processing=after,
        prefill_pod=record.prefill,
        user=record.user,
        queue=_ms(record.queued),
        time_to_first_token=_ms(record.first_byte - arrived) if record.first_byte else 0.0,
    )
    return _encode(line) + b"\n"


def _origin(record: Record) -> str:
    return "upstream" if record.answered_status >= 400 or record.broken else "router"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _stamp(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _word(text: str) -> str:
    """A client's text as one word: nobody writes a line of their own into the log."""
    return text if text.isprintable() and " " not in text and '"' not in text else _quoted(text)


def _quoted(text: str) -> str:
    return _encode(text).decode()
