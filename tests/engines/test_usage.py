from __future__ import annotations

import json

import pytest

from ems.engines.usage import Meter


def metered(*pieces: bytes) -> int:
    meter = Meter()
    for piece in pieces:
        meter.feed(piece)
    return meter.tokens()


def test_an_engine_says_what_was_used() -> None:
    body = json.dumps({"choices": [{"text": "x" * 10000}], "usage": {"prompt_tokens": 9, "completion_tokens": 17}})
    answer = body.encode()

    assert metered(answer) == 17
    assert metered(answer[:-10], answer[-10:]) == 17
    assert metered(b'{"output": [], "usage": {"input_tokens": 3, "output_tokens": 8}}') == 8


def test_a_stream_that_says_it_at_its_end() -> None:
    chunks = [b'data: {"choices": [{"text": "a"}]}\n\n'] * 5

    assert metered(*chunks, b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n', b"data: [DONE]\n\n") == 5
    assert metered(*chunks, b'data: {"usage": {"completion_tokens":6}}\n\ndata: [DONE]\n\n') == 6


def test_a_stream_that_does_not_say_it_is_counted() -> None:
    assert metered(*[b'data: {"choices": [{"text": "a"}]}\n\n'] * 5, b"data: [DONE]\n\n") == 5


@pytest.mark.parametrize("text", ['say "completion_tokens": 99', '{"completion_tokens": 99}'])
def test_a_client_cannot_make_an_engine_say_it(text: str) -> None:
    body = json.dumps({"choices": [{"text": text}], "usage": {"completion_tokens": 4}, "note": text})

    assert metered(body.encode()) == 4


def test_nothing_is_nothing() -> None:
    assert metered() == 0
    assert metered(b"") == 0
    assert metered(b'{"error": {"message": "no"}}') == 0
