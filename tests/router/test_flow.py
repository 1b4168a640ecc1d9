"""The way of a request: prefill, then decode, and what each of them gets to see."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from aiohttp import web

from tests.router.fakes import ANSWER, HANDOFF, FakeEngine, completion, prefilled, running, status

BODY = (
    b'{ "model":"m", "messages":[{"role":"user","content":"caf\\u00e9 \xc3\xa9"}],\n'
    b'  "temperature": 0.10, "seed": 123456789012345678901234567890, "max_tokens":100, "max_completion_tokens": 90,\n'
    b'  "min_tokens": 5, "stream": false, "stream_options": {"include_usage": true} }'
)


async def test_prefill_computes_one_token_and_decode_gets_the_clients_bytes() -> None:
    """With a hand-off through the pool, decode sees exactly what the client sent."""
    async with FakeEngine() as prefill, FakeEngine() as decode, running([prefill.address], [decode.address]) as router:
        response = await router.post(
            "/v1/chat/completions", data=BODY, headers={"Content-Type": "application/json", "X-Request-Id": "abc-1"}
        )

        assert (response.status, await response.read()) == (200, ANSWER)
        assert response.headers["Content-Type"] == "application/json"
        assert str(len(ANSWER)) == response.headers["Content-Length"]
        assert response.headers["X-Request-Id"] == "abc-1"

    [asked], [answered] = prefill.seen, decode.seen

    assert answered.body == BODY
    assert "/v1/chat/completions" == asked.path == answered.path
    assert "abc-1" == asked.headers["X-Request-Id"] == answered.headers["X-Request-Id"]

    expected = json.loads(BODY)
    del expected["stream_options"], expected["min_tokens"]
    expected |= {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
    expected["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }

    assert expected == asked.json


async def test_the_handoff_of_prefill_is_put_into_the_decode_request() -> None:
    async with (
        FakeEngine(prefilled) as prefill,
        FakeEngine() as decode,
        running([prefill.address], [decode.address]) as router,
    ):
        await router.post(data=BODY)

    [answered] = decode.seen

    assert {**json.loads(BODY), "kv_transfer_params": HANDOFF} == answered.json
    assert answered.body.endswith(BODY.lstrip(b"{"))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize"])
async def test_what_generates_no_tokens_is_for_one_instance(path: str) -> None:
    async with FakeEngine() as prefill, FakeEngine() as decode, running([prefill.address], [decode.address]) as router:
        body = b'{"model":"m", "input":["a", "b"]}'
        response = await router.post(path, data=body)

        assert (response.status, await response.read()) == (200, ANSWER)

    assert not prefill.seen
    assert [(path, body)] == [(seen.path, seen.body) for seen in decode.seen]


async def test_a_response_is_prefilled_too() -> None:
    async with FakeEngine() as prefill, FakeEngine() as decode, running([prefill.address], [decode.address]) as router:
        assert (await router.post("/v1/responses", json={"model": "m", "input": "hello"})).status == 200

    assert [seen.json["max_output_tokens"] for seen in prefill.seen] == [1]
    assert [seen.json for seen in decode.seen] == [{"model": "m", "input": "hello"}]


async def test_without_prefill_instances_it_is_a_plain_balancer() -> None:
    async with FakeEngine() as one, FakeEngine() as two, running(decodes=[one.address, two.address]) as router:
        for _ in range(4):
            assert (await router.post()).status == 200

    assert (len(one.seen), len(two.seen)) == (2, 2)


async def test_serial_requests_go_round() -> None:
    """Equal loads must not send everything to the first instance of a role."""
    async with FakeEngine() as p1, FakeEngine() as p2, FakeEngine() as d1, FakeEngine() as d2:
        async with running([p1.address, p2.address], [d1.address, d2.address]) as router:
            for _ in range(6):
                await router.post()

        assert [len(engine.seen) for engine in (p1, p2, d1, d2)] == [3, 3, 3, 3]


async def test_new_requests_avoid_the_busy_instance() -> None:
    release = asyncio.Event()

    async def hold(request: web.Request, body: bytes) -> web.StreamResponse:
        await release.wait()
        return await completion(request, body)

    async with FakeEngine(hold) as one, FakeEngine() as two, running(decodes=[one.address, two.address]) as router:
        long = asyncio.create_task(router.post(json={"model": "m", "prompt": "x" * 8000}))
        await one.arrived.wait()
        for _ in range(3):
            await router.post()

        assert (len(one.seen), len(two.seen)) == (1, 3)

        release.set()

        assert (await long).status == 200


async def test_the_clients_headers_cross_and_hop_by_hop_ones_do_not() -> None:
    headers = {
        "Authorization": "Bearer secret",
        "X-Custom": "caf\u00e9",
        "Traceparent": "00-1-2-3",
        "Accept-Encoding": "gzip",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
        "Proxy-Authorization": "Basic x",
    }
    async with FakeEngine() as prefill, FakeEngine() as decode, running([prefill.address], [decode.address]) as router:
        await router.post(json={"model": "m", "prompt": "p"}, headers=headers)

    [asked], [answered] = prefill.seen, decode.seen
    for seen in (asked, answered):
        assert seen.headers["Authorization"] == "Bearer secret"
        assert seen.headers["X-Custom"] == "caf\u00e9"
        assert seen.headers["Traceparent"] == "00-1-2-3"
        assert seen.headers["Content-Type"] == "application/json"
        for name in ("X-Hop", "TE", "Proxy-Authorization", "Transfer-Encoding"):
            assert name not in seen.headers
    assert answered.headers["Accept-Encoding"] == "gzip"
    assert "Accept-Encoding" not in asked.headers


async def test_a_request_id_is_made_when_the_client_has_none() -> None:
    async with FakeEngine() as prefill, FakeEngine() as decode, running([prefill.address], [decode.address]) as router:
        first, second = await router.post(), await router.post()

    assert first.headers["X-Request-Id"] != second.headers["X-Request-Id"]
    assert first.headers["X-Request-Id"] == prefill.seen[0].headers["X-Request-Id"]
    assert first.headers["X-Request-Id"] == decode.seen[0].headers["X-Request-Id"]


async def test_the_answers_headers_cross_and_the_date_is_not_doubled() -> None:
    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        headers = {"X-Engine": "e1", "Set-Cookie": "a=b", "X-Request-Id": "theirs", "Keep-Alive": "timeout=5"}
        return web.Response(body=b"\x1f\x8b-not-gzip", content_type="text/x-odd", headers=headers)

    async with FakeEngine(answer) as decode, running(decodes=[decode.address]) as router:
        response = await router.post(headers={"X-Request-Id": "mine"})

    assert await response.read() == b"\x1f\x8b-not-gzip"
    assert response.headers["Content-Type"] == "text/x-odd"
    assert response.headers["X-Engine"] == "e1"
    assert response.headers["Set-Cookie"] == "a=b"
    assert response.headers.getall("X-Request-Id") == ["mine"]
    assert len(response.headers.getall("Date")) == 1
    assert "Keep-Alive" not in response.headers


async def test_the_query_crosses() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        await router.post("/v1/completions?a=1&b=%20x%2F")

    assert [seen.path for seen in decode.seen] == ["/v1/completions?a=1&b=%20x%2F"]


@pytest.mark.parametrize("code", [400, 401, 404, 422])
async def test_a_prefills_client_error_is_the_answer(code: int) -> None:
    """Decode would say the same, so it is not even asked."""
    async with (
        FakeEngine(status(code)) as prefill,
        FakeEngine() as decode,
        running([prefill.address], [decode.address]) as router,
    ):
        response = await router.post()

        assert code == response.status
        assert await response.read() == b'{"error":{"message":"no","type":"X","param":null,"code":0}}'
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["X-Engine"] == "e"
        assert len(prefill.seen) == 1
        assert not decode.seen


@pytest.mark.parametrize("code", [400, 404, 429, 500, 503])
async def test_a_decodes_error_keeps_its_status_and_body(code: int) -> None:
    async with FakeEngine() as prefill, FakeEngine(status(code, b"exactly this")) as decode:
        async with running([prefill.address], [decode.address]) as router:
            response = await router.post()

            assert (code, b"exactly this") == (response.status, await response.read())
            assert response.headers["X-Engine"] == "e"

        assert len(decode.seen) == 1


async def test_a_large_body_crosses_both_ways() -> None:
    large = json.dumps({"model": "m", "prompt": "y" * (5 << 20)}).encode()

    async def echo(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(body=body)

    async with FakeEngine(echo) as decode, running(decodes=[decode.address]) as router:
        response = await router.post(data=io.BytesIO(large))

        same = large == await response.read()  # compared apart: nobody wants to read the difference

        assert same


async def test_many_at_once_all_get_their_own_answer() -> None:
    async def echo(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(body=json.loads(body)["prompt"].encode())

    async with (
        FakeEngine() as prefill,
        FakeEngine(echo) as one,
        FakeEngine(echo) as two,
        running([prefill.address], [one.address, two.address]) as router,
    ):
        prompts = [f"prompt {number}" for number in range(100)]
        responses = await asyncio.gather(*(router.post(json={"model": "m", "prompt": p}) for p in prompts))

        assert [p.encode() for p in prompts] == [await response.read() for response in responses]
        assert len(one.seen) + len(two.seen) == 100
        assert abs(len(one.seen) - len(two.seen)) <= 10
