"""How an answer goes out: nothing is held back, and no head goes alone."""

from __future__ import annotations

import pytest

from ems.http.message import Request
from ems.http.reply import Reply

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ndate: today\r\ntransfer-encoding: chunked\r\n\r\n"


class Written:
    """What was written, call by call."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)


def reply_to(method: str, outlet: Written) -> Reply:
    return Reply(outlet, Request(method, b"/", [], "1.1", keeps_alive=True), b"today", keeps_alive=True)


def test_a_whole_answer_is_one_write() -> None:
    outlet = Written()

    reply_to("GET", outlet).whole(200, b"abc")

    assert len(outlet.calls) == 1
    assert outlet.calls[0].endswith(b"\r\n\r\nabc")


def test_the_head_goes_with_the_first_piece_and_each_other_piece_at_once() -> None:
    outlet = Written()
    reply = reply_to("GET", outlet)

    reply.head(200, [(b"content-type", b"text/plain")], sized=False)
    for number, piece in enumerate((b"a", b"bc"), 1):
        reply.piece(piece)
        assert len(outlet.calls) == number
    reply.end()

    assert outlet.calls == [HEAD + b"1\r\na\r\n", b"2\r\nbc\r\n", b"0\r\n\r\n"]


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204)])
def test_an_answer_without_a_body_is_its_head(method: str, status: int) -> None:
    outlet = Written()
    reply = reply_to(method, outlet)

    reply.head(status, [(b"content-length", b"1")], sized=True)
    reply.piece(b"a")
    reply.end()

    assert len(outlet.calls) == 1
    assert outlet.calls[0].endswith(b"content-length: 1\r\ndate: today\r\n\r\n")
