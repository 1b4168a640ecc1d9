"""Bodies: what the router writes differs from the client's bytes in the fields of the hand-off and in nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec import Raw

from ems.engines.first_token import SHAPES_ANSWERS
from ems.engines.handoff import Bootstrap, HandoffKind, params_of
from ems.http.message import Refusal
from ems.router.handoff import decode_body, of_client, prefill_body
from ems.router.request import parse
from tests.router.fakes import HANDOFF, FakeEngine, prefilled, running
from tests.router.kthena.manifests import ROUTE, SERVER, documents, pod

NIXL = HandoffKind.NIXL
KIMI = ROUTE.replace("modelName: kimi-k25", "modelName: kimi_k25")
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

    assert expected == json.loads(prefill_body(request, NIXL))


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

    assert json.loads(prefill_body(body, NIXL)) == {
        "model": "m",
        "input": "hello",
        "max_output_tokens": 1,
        "stream": False,
        "store": False,
        "kv_transfer_params": PREFILL_PARAMS,
    }
    assert body.prompt_tokens
    assert body.output_tokens == 50


@pytest.mark.parametrize("beside", ["messages", "prompt"])
def test_a_response_is_bounded_whatever_stands_beside_its_input(beside: str) -> None:
    body = parse(b'{"input":"hello","max_output_tokens":50,"%b":[]}' % beside.encode())

    prefill = json.loads(prefill_body(body, NIXL))
    assert (prefill["max_output_tokens"], prefill["max_tokens"], prefill["store"]) == (1, 1, False)


NUMBERS = (
    b'{"a":1.50,"b":1e3,"c":123456789012345678901234567890,"d":-0.0,'
    b'"e":0.1000000000000000055511151231257827,"f":"\\u00e9\\/"}'
)


def test_nothing_is_re_encoded() -> None:
    for written in (
        prefill_body(parse(NUMBERS), NIXL),
        decode_body(parse(NUMBERS), Raw(b"{}")),
        decode_body(parse(NUMBERS[:-1] + b',"kv_transfer_params":{}}'), Raw(b"{}")),
    ):
        for piece in NUMBERS[1:-1].split(b","):
            assert piece in written


def test_the_last_of_equal_keys_counts_as_it_does_for_the_engine() -> None:
    assert b'"a":2' in prefill_body(parse(b'{"a":1,"a":2}'), NIXL)


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

    assert b'"max_tokens":1' in prefill_body(request, NIXL)


@given(st.binary())
@example(b'{"a":' + b"[" * 100_000)
def test_any_answer_of_a_prefill_has_a_handoff_or_none_or_is_an_error(answer: bytes) -> None:
    try:
        handoff = params_of(answer)
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
    handoff = params_of(answer)

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

    assert single == ("kv_transfer_params" in json.loads(prefill_body(request, NIXL)))
    assert single == (decode_body(request, Raw(b'{"remote_block_ids":[1]}')) != body)


# --------------------------------------------------------------------------------------------------------------- kinds

ASKED = (
    b'{"model": "m", "prompt": "a", "stream": true, "stream_options": {"include_usage": true}, "n": 2, '
    b'"max_tokens": 9, "kv_transfer_params": {"lmcache.tag": "x"}}'
)
FIRST = {"model": "m", "prompt": "a", "max_tokens": 1, "stream": False}


@pytest.mark.parametrize("kind", [HandoffKind.HTTP, HandoffKind.LMCACHE])
def test_a_shared_store_takes_no_fields_and_leaves_the_clients_own(kind: HandoffKind) -> None:
    request = parse(ASKED)

    assert json.loads(prefill_body(request, kind)) == {**FIRST, "kv_transfer_params": {"lmcache.tag": "x"}}
    assert decode_body(request, None) is request.body


@pytest.mark.parametrize("kind", [HandoffKind.NIXL, HandoffKind.MOONCAKE])
def test_peers_are_asked_to_keep_the_blocks_whatever_the_client_wrote(kind: HandoffKind) -> None:
    request = parse(ASKED.replace(b'"n": 2', b'"n": 1'))
    body = decode_body(request, params_of(b'{"kv_transfer_params": {"remote_port": 7}}'))

    assert json.loads(prefill_body(request, kind)) == {**FIRST, "kv_transfer_params": PREFILL_PARAMS}
    assert json.loads(body) == {**json.loads(request.body), "kv_transfer_params": {"remote_port": 7}}


def test_sglangs_engines_get_the_same_place_to_meet_and_the_same_request() -> None:
    """The first token of the answer is the prefill's, so that what shapes it stays, and so does how many there are."""
    shaped = (
        b'{"prompt": "a", "stream": true, "stream_options": {}, "n": 2, "logprobs": 1, "stop": "b", "max_tokens": 9}'
    )
    meeting = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 5}
    request, bootstrap = parse(shaped), Bootstrap("10.0.0.1", 8998, 5)
    asked = json.loads(prefill_body(request, HandoffKind.SGLANG, bootstrap))

    assert asked == {"prompt": "a", "stream": False, "n": 2, "logprobs": 1, "stop": "b", "max_tokens": 1, **meeting}
    assert json.loads(decode_body(request, None, bootstrap)) == {**json.loads(shaped), **meeting}
    assert decode_body(request, None, bootstrap).endswith(shaped[1:])


def test_a_least_number_of_tokens_is_left_beside_its_bound_and_a_clients_own_room_is_not() -> None:
    request = parse(b'{"prompt": "a", "min_tokens": 3, "max_tokens": 9, "bootstrap_room": 1}')
    bootstrap = Bootstrap("::1", 9000, 2**62)
    ours = {"bootstrap_host": "[::1]", "bootstrap_port": 9000, "bootstrap_room": 2**62}
    wanted = {"prompt": "a", "min_tokens": 3, "max_tokens": 9, **ours}

    assert json.loads(prefill_body(request, HandoffKind.SGLANG, bootstrap)) == {**wanted, "stream": False}
    assert json.loads(decode_body(request, None, bootstrap)) == wanted


# ---------------------------------------------------------------------------------------------------- the whole router


@pytest.mark.parametrize(
    ("connector", "asks"),
    [("type: http", False), ("type: lmcache", False), ("type: nixl", True), ("type: mooncake", True), (None, True)],
)
async def test_a_model_servers_connector_says_what_its_engines_get(
    tmp_path: Path, connector: str | None, asks: bool
) -> None:
    """An engine that gives parameters unasked, as one whose connectors are more than the manifest says."""
    server = SERVER.replace(
        "  kvConnector:\n    type: nixl\n", f"  kvConnector: {{{connector}}}\n" if connector else ""
    )
    body = b'{"model": "kimi_k25",  "prompt": "a"}'
    async with FakeEngine(prefilled) as prefill, FakeEngine() as decode:
        pods = [pod("p", "prefill", prefill.address.port), pod("d", "decode", decode.address.port)]
        (tmp_path / "all.yaml").write_text(documents(server.replace("model: kimi_k25\n", "model: ''\n"), KIMI, *pods))
        async with running(manifests=tmp_path) as router:
            assert (await router.post(data=body)).status == 200

    [asked], [answered] = prefill.seen, decode.seen

    assert asked.json.get("kv_transfer_params") == (PREFILL_PARAMS if asks else None)
    assert answered.json.get("kv_transfer_params") == (HANDOFF if asks else None)
    assert asks or answered.body == body


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 22, "remote_block_ids": [1]}, None),
        ({"do_remote_prefill": True, "ems_explain": True}, {"ems_explain": True}),
        ({"ems_explain": True, "lmcache.tag": "x"}, {"ems_explain": True, "lmcache.tag": "x"}),
        ({}, None),
        ([1], None),
        (None, None),
    ],
)
async def test_a_client_does_not_say_where_an_engine_fetches_kv(given: object, kept: object) -> None:
    body = {"prompt": "a", "kv_transfer_params": given}
    async with FakeEngine() as decode, running([], [decode.address]) as router:
        assert (await router.post(data=json.dumps(body).encode())).status == 200

    assert decode.seen[0].json.get("kv_transfer_params") == kept
    assert decode.seen[0].json["prompt"] == "a"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"vllm_xargs": {"kv_transfer_params": []}}, {}),
        ({"vllm_xargs": {"kv_transfer_params": "x", "a": 1}}, {"vllm_xargs": {"a": 1}}),
        ({"vllm_xargs": {"a": [1]}}, {"vllm_xargs": {"a": [1]}}),
        ({"ec_transfer_params": {"hash": {"peer_host": "10.0.0.1"}}}, {}),
        ({"vllm_xargs": {"ec_transfer_params": "x"}, "kv_transfer_params": {"remote_port": 1}}, {}),
    ],
)
def test_nor_does_a_client_by_any_other_field_in_which_engines_find_a_handoff(
    given: dict[str, Any], kept: dict[str, Any]
) -> None:
    body = of_client(parse(json.dumps({"prompt": "a", **given}).encode())).body

    assert json.loads(body) == {"prompt": "a", **kept}


def test_what_a_client_may_say_reaches_the_engine_as_its_very_bytes() -> None:
    request = parse(b'{ "prompt":"a", "kv_transfer_params": {"ems_explain" :true} }')

    assert of_client(request) is request
