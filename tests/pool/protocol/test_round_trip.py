"""Messages with nested values, and acts, come back as they were sent; what makes no sense does not."""

from __future__ import annotations

import msgspec
import pytest

from ems.errors import ProtocolError
from ems.pool.keys import KEY_BYTES
from ems.pool.names import Difference
from ems.pool.protocol import coding, limits, messages
from ems.pool.protocol.acts import Clear, Show


@pytest.mark.parametrize(
    "message",
    [
        messages.Lookup(1, bytes(KEY_BYTES), request="cmpl-1"),
        messages.Describe("a", {"tenant": "t", "model": "m"}),
        messages.Miss("a", 3, "r"),
        messages.Explain("a", bytes(2 * KEY_BYTES)),
        messages.Administer(Clear(older_than=3.5), dry_run=True),
        messages.Administer(Show("x")),
    ],
)
def test_requests_come_back_as_they_were_sent(message: messages.Request) -> None:
    assert coding.decode_request(coding.encode_request(message)[4:]) == message


@pytest.mark.parametrize(
    "message",
    [
        messages.Hits(1, 0, 0, b"", b"", 3),
        messages.Explained(b"\0\1", 3.0, "b", [Difference("c", {"block_size": ("16", "32")})]),
        messages.Reported({"pages": 3, "names": ["a"]}),
    ],
)
def test_answers_come_back_as_they_were_sent(message: messages.Answer) -> None:
    assert coding.decode_answer(coding.encode(message)[4:]) == message


@pytest.mark.parametrize(
    "message", [messages.Miss("a", -1), messages.Miss("a", limits.MAX_KEYS + 1), messages.Explain("a", b"short")]
)
def test_what_makes_no_sense_is_refused(message: messages.Message) -> None:
    with pytest.raises(ProtocolError):
        coding.decode_request(coding.encode(message)[4:])


def test_an_act_that_is_not_known_is_refused() -> None:
    body = msgspec.msgpack.encode(["Administer", {"type": "burn"}])
    with pytest.raises(ProtocolError):
        coding.decode_request(body)
