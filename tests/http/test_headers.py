from __future__ import annotations

from ems.http import headers


def test_headers_that_connection_names_stop_here() -> None:
    given = [(b"connection", b"close, X-One , x-two"), (b"x-one", b"1"), (b"x-two", b"2"), (b"x-three", b"3")]

    assert headers.sent(given, b"r", read_here=False) == b"x-three: 3\r\nx-request-id: r\r\n"
    assert headers.returned(given, b"r").headers == [(b"x-three", b"3"), (b"x-request-id", b"r")]


def test_each_connection_header_names_some() -> None:
    given = [(b"connection", b"x-one"), (b"connection", b"x-two"), (b"x-one", b"1"), (b"x-two", b"2")]

    assert headers.sent(given, b"r", read_here=False) == b"x-request-id: r\r\n"
    assert headers.returned(given, b"r").headers == [(b"x-request-id", b"r")]


def test_an_answer_whose_length_is_named_away_has_none() -> None:
    given = [(b"Connection", b"Content-Length"), (b"Content-Length", b"2"), (b"Content-Type", b"text/plain")]

    assert not headers.returned(given, b"r").is_sized, "it is framed by the router then"


def test_returned_headers_keep_case_order_and_repetition() -> None:
    given = [(b"Set-Cookie", b"a=1"), (b"X-Y", b"z"), (b"Set-Cookie", b"b=2"), (b"Transfer-Encoding", b"chunked")]

    assert [*given[:3], (b"x-request-id", b"r")] == headers.returned(given, b"r").headers


def test_stream_headers_are_added_where_they_lack() -> None:
    kind = (b"Content-Type", b"Text/Event-Stream; charset=utf-8")

    assert {b"cache-control": b"no-cache", b"x-accel-buffering": b"no"}.items() <= dict(
        headers.returned([kind], b"r").headers
    ).items()
    assert b"cache-control" not in dict(headers.returned([kind, (b"Cache-Control", b"private")], b"r").headers)
    assert b"x-accel-buffering" not in dict(headers.returned([(b"content-type", b"text/plain")], b"r").headers)


def test_encodings_are_known() -> None:
    assert headers.returned([(b"Content-Encoding", b"gzip")], b"r").is_encoded
    assert not headers.returned([(b"Content-Encoding", b"identity")], b"r").is_encoded
    assert not headers.returned([], b"r").is_encoded
