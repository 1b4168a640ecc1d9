from __future__ import annotations

import json

from ems.router.observe.log_line import line_of
from ems.router.observe.settings import Format
from tests.router.observe.records import record, refused


def test_json_has_kthenas_fields() -> None:
    line = line_of(record(user="alice"), Format.JSON, 1_000_000.0)

    assert line.endswith(b"}\n")
    assert json.loads(line) == {
        "timestamp": "1970-01-12T13:46:39.000Z",
        "method": "POST",
        "path": "/v1/completions",
        "protocol": "HTTP/1.1",
        "status_code": 200,
        "model_name": "m",
        "model_route": "default/r",
        "model_server": "default/s",
        "selected_pod": "10.0.0.2:2",
        "request_id": "r-1",
        "backend_type": "model_server",
        "backend_name": "default/s",
        "upstream_model": "m",
        "upstream_status_code": 200,
        "upstream_attempts": 1,
        "input_tokens": 40,
        "output_tokens": 8,
        "duration_total": 1000,
        "duration_request_processing": 200,
        "duration_upstream_processing": 300,
        "duration_response_processing": 500,
        "prefill_pod": "10.0.0.1:1",
        "user": "alice",
        "queue": 100.0,
        "time_to_first_token": 500.0,
    }


def test_text_reads_like_kthenas() -> None:
    assert line_of(record(), Format.TEXT, 1_000_000.0).decode() == (
        '[1970-01-12T13:46:39.000Z] "POST /v1/completions HTTP/1.1" 200 model_name=m model_route=default/r '
        "model_server=default/s selected_pod=10.0.0.2:2 request_id=r-1 backend_type=model_server "
        "backend_name=default/s upstream_model=m upstream_status_code=200 upstream_attempts=1 tokens=40/8 "
        "timings=1000ms(200+300+500) prefill_pod=10.0.0.1:1 queue=100ms ttft=500ms\n"
    )


def test_a_refusal_says_who_refused_and_why() -> None:
    one = refused(error_message="input token rate limit exceeded")

    assert b'error=rate_limit:"input token rate limit exceeded" ' in line_of(one, Format.TEXT, 0.0)
    assert json.loads(line_of(one, Format.JSON, 0.0))["error_origin"] == "router"
    assert (
        json.loads(line_of(record(status=500, answered_status=500, error_type="proxy"), Format.JSON, 0.0))[
            "error_origin"
        ]
        == "upstream"
    )


def test_a_client_writes_no_line_of_its_own() -> None:
    one = record(model='x"\n[now] "POST', request_id="a b\r\n", user="\u2028")
    for format in (Format.TEXT, Format.JSON):  # noqa: A001
        assert line_of(one, format, 0.0).count(b"\n") == 1
    assert line_of(one, Format.TEXT, 0.0).isascii()
