"""Messages and bytes: msgpack arrays, taken by the letter."""

from __future__ import annotations

import msgspec

from ems.errors import ProtocolError
from ems.pool.protocol.checks import check_request, refuse_oversized
from ems.pool.protocol.framing import frame
from ems.pool.protocol.messages import Answer, Challenge, Hits, Lookup, Message, Request, Reserve

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


_GROWN = {Lookup: 4, Hits: 5, Challenge: 3, Reserve: 4}
"""Messages that have grown, and how many fields each had at first."""


def body(message: Message) -> bytes:
    """What a frame has after its length; fields that came later are left out where they have their defaults."""
    first = _GROWN.get(type(message))
    if first is None:
        return _encoder.encode(message)
    fields = msgspec.structs.astuple(message)
    end, defaults = len(fields), type(message).__struct_defaults__
    while end > first and fields[end - 1] == defaults[end - len(fields) - 1]:
        end -= 1
    return _encoder.encode((type(message).__name__, *fields[:end]))


def encode(message: Message) -> bytes:
    return frame(body(message))


def encode_request(message: Request) -> bytes:
    refuse_oversized(message)
    check_request(message)
    return encode(message)


def decode_request(body: bytes | bytearray | memoryview) -> Request:
    try:
        message = _request_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a request of the EMS protocol: {error}") from error
    check_request(message)
    return message


def decode_answer(body: bytes | bytearray | memoryview) -> Answer:
    try:
        return _answer_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not an answer of the EMS protocol: {error}") from error
