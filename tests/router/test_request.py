"""Bodies: what the router writes differs from the client's bytes in its own fields and in nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec import Raw

from ems.router.handoff.first_token import SHAPES_ANSWERS
from ems.router.reply import Refusal
from ems.router.request import (
    DEFAULT_OUTPUT,
    IMAGE_TOKENS,
    OUTPUT_CAP,
    REQUEST_OVERHEAD,
    decode_body,
    handoff_of,
    parse,
    prefill_body,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
OWN = ("max_tokens", "max_completion_tokens", "stream", "kv_transfer_params", *sorted(SHAPES_ANSWERS))
KEYS = st.sampled_from([*OWN, "model", "prompt", "messages", "temperature", "tools"]) | st.text(max_size=4)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=8)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """Return an object and one of the many ways to write it."""
    value = draw(OBJECTS)
    text = json.dumps(
        value,
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 0, 2])),
        separators=draw(st.sampled_from([None, (",", ":"), (" , ", " : ")])),
    )
    blank = draw(st.sampled_from(["", " ", "\r\n\t "]))
    try:
        return value, (blank + text + blank).encode()
    except UnicodeEncodeError:  # a lone surrogate, which cannot be sent unescaped
        return value, (blank + json.dumps(value) + blank).encode()


def no_surrogates(value: object) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in json.dumps(value, ensure_ascii=False))


PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@given(bodies().filter(lambda pair: no_surrogates(pair[0])))
def test_prefill_gets_the_clients_fields_with_one_token_and_no_stream(pair: tuple[dict[str, Any], bytes]) -> None:
    value, body = pair
    expected = {key: one for key, one in value.items() if key not in SHAPES_ANSWERS}
    expected |= {"max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL_PARAMS}
    expected |= {key: 1 for key in ("max_completion_tokens",) if key in value}
    request = parse(body)
    if not request.single:
        del expected["kv_transfer_params"]

    assert expected == json.loads(prefill_body(request))


@given(bodies())
def test_decode_gets_the_very_bytes_when_there_is_no_handoff(pair: tuple[dict[str, Any], bytes]) -> None:
    value, body = pair
    if no_surrogates(value):
        assert body is decode_body(parse(body), None)


@given(bodies().filter(lambda pair: no_surrogates(pair[0])), st.dictionaries(st.text(max_size=5), st.integers()))
@example(({}, b"{}"), {})
@example(({}, b" { \n} "), {"remote_port": 1})
@example(({"kv_transfer_params": 1, "a": 0.5}, b'{"kv\\u005ftransfer_params": 1, "a": 0.50}'), {})
def test_decode_differs_in_the_handoff_only(pair: tuple[dict[str, Any], bytes], handoff: dict[str, int]) -> None:
    value, body = pair
    request = parse(body)
    assume(request.single)
    written = decode_body(request, Raw(json.dumps(handoff).encode()))
    pairs = json.loads(written, object_pairs_hook=list)

    assert {**value, "kv_transfer_params": handoff} == json.loads(written)
    assert [key for key, _ in pairs].count("kv_transfer_params") == 1
    if "kv_transfer_params" not in value:
        _, _, rest = body.partition(b"{")

        assert written.endswith(rest), "the client's bytes follow as they were"


def test_a_response_is_bounded_in_its_own_way_and_not_kept() -> None:
    body = parse(b'{"model":"m","input":"hello","max_output_tokens":50,"stream":true,"store":true,"background":true}')

    assert json.loads(prefill_body(body)) == {
        "model": "m",
        "input": "hello",
        "max_output_tokens": 1,
        "stream": False,
        "store": False,
        "kv_transfer_params": PREFILL_PARAMS,
    }
    assert body.prompt_tokens
    assert body.output_tokens == 50


NUMBERS = (
    b'{"a":1.50,"b":1e3,"c":123456789012345678901234567890,"d":-0.0,'
    b'"e":0.1000000000000000055511151231257827,"f":"\\u00e9\\/"}'
)


def test_nothing_is_re_encoded() -> None:
    for written in (
        prefill_body(parse(NUMBERS)),
        decode_body(parse(NUMBERS), Raw(b"{}")),
        decode_body(parse(NUMBERS[:-1] + b',"kv_transfer_params":{}}'), Raw(b"{}")),
    ):
        for piece in NUMBERS[1:-1].split(b","):
            assert piece in written


def test_the_last_of_equal_keys_counts_as_it_does_for_the_engine() -> None:
    assert b'"a":2' in prefill_body(parse(b'{"a":1,"a":2}'))


@given(st.binary())
@example(b'{"a":' + b"[" * 100_000)
@example(b'{"\\ud800":1}')
@example(b'{"a":NaN}')
@example(b'{"max_tokens":' + b"9" * 10_000 + b"}")
@example(b"\xef\xbb\xbf{}")
def test_any_bytes_are_a_request_or_refused(body: bytes) -> None:
    try:
        request = parse(body)
    except Refusal:
        return

    assert b'"max_tokens":1' in prefill_body(request)


@given(st.binary())
@example(b'{"a":' + b"[" * 100_000)
def test_any_answer_of_a_prefill_has_a_handoff_or_none_or_is_an_error(answer: bytes) -> None:
    try:
        handoff = handoff_of(answer)
    except ValueError:
        return

    assert handoff is None or isinstance(handoff, Raw)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"{}", None),
        (b'{"kv_transfer_params":null}', None),
        (b'{"kv_transfer_params": null }', None),
        (b'{"kv_transfer_params": {"score": 0.10} ,"x":1}', b'{"score": 0.10}'),
    ],
)
def test_the_handoff_keeps_its_bytes(answer: bytes, expected: bytes | None) -> None:
    handoff = handoff_of(answer)

    assert expected == (None if handoff is None else bytes(handoff))


@pytest.mark.parametrize(
    ("fields", "single"),
    [
        ({"prompt": "a"}, True),
        ({"messages": [{"role": "user"}, {"role": "user"}]}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": ["a"]}, True),
        ({"prompt": [[1, 2]]}, True),
        ({"prompt": "a", "n": 1, "best_of": None, "use_beam_search": False}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1, 2], [3]]}, False),
        ({"prompt": []}, False),
        ({"prompt": "a", "n": 2}, False),
        ({"prompt": "a", "n": "1"}, False),
        ({"prompt": "a", "best_of": 3}, False),
        ({"prompt": "a", "use_beam_search": True}, False),
        ({"prompt_embeds": ["x", "y"]}, False),
    ],
)
def test_a_handoff_is_for_one_sequence_only(fields: dict[str, Any], single: bool) -> None:
    """The blocks of the first prompt of a batch must never be taken for those of the others."""
    body = json.dumps({**fields, "kv_transfer_params": None}).encode()
    request = parse(body)

    assert single == ("kv_transfer_params" in json.loads(prefill_body(request)))
    assert single == (decode_body(request, Raw(b'{"remote_block_ids":[1]}')) != body)


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 0),
        ({"prompt": "x" * 398}, 100),
        ({"prompt": list(range(100))}, 100),
        ({"prompt": [[1, 2, 3], [4, 5]]}, 5),
        ({"prompt": ["x" * 194, "y" * 194]}, 99),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, 258),
        ({"prompt": None}, 1),
        ({"prompt": 7}, 0),
    ],
)
def test_the_prompts_tokens_are_estimated_from_its_size(fields: dict[str, Any], tokens: int) -> None:
    assert tokens == parse(json.dumps(fields).encode()).prompt_tokens


def test_inlined_media_count_by_piece_not_by_size() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBOR" * 100_000}}
    request = parse(json.dumps({"messages": [{"role": "user", "content": [image, image]}]}).encode())

    assert 2 * IMAGE_TOKENS < request.prompt_tokens < 2 * IMAGE_TOKENS + 200


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, DEFAULT_OUTPUT),
        ({"max_tokens": 10}, 10),
        ({"max_tokens": 10, "max_completion_tokens": 20}, 20),
        ({"max_tokens": 10**9}, OUTPUT_CAP),
        ({"max_tokens": 10**40}, OUTPUT_CAP),
        ({"max_tokens": -5}, 0),
        ({"max_tokens": None}, DEFAULT_OUTPUT),
        ({"max_tokens": "many"}, DEFAULT_OUTPUT),
    ],
)
def test_the_answers_tokens_are_bounded(fields: dict[str, Any], tokens: int) -> None:
    request = parse(json.dumps(fields).encode())

    assert tokens == request.output_tokens
    assert tokens + REQUEST_OVERHEAD == request.decode_cost
