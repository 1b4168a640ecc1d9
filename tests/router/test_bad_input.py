"""Bad input from clients: one clear error in OpenAI's form, and no engine is bothered."""

from __future__ import annotations

import asyncio
import json

import pytest

from ems.router.request import MOST_OF_A_NAME
from tests.router.fakes import FakeEngine, Running, dead_address, running, status


async def raw(router: Running, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*router.address)
    writer.write(request)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": "m",}', "invalid_json"),
        (b'{"model": "m"} trailing', "invalid_json"),
        (b"\xff\xfe\x00", "invalid_json"),
        (b'{"\xff": 1}', "invalid_json"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        (b"[]", "invalid_body"),
        (b'"text"', "invalid_body"),
        (b"null", "invalid_body"),
        (b"17", "invalid_body"),
    ],
)
async def test_what_is_no_json_object_is_a_400(body: bytes, code: str) -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        response = await router.post(data=body, headers={"X-Request-Id": "r"})
        error = json.loads(await response.read())["error"]

        assert response.status == 400
        assert (code, "invalid_request_error", None) == (error["code"], error["type"], error["param"])
        assert response.headers["X-Request-Id"] == "r"
        assert not decode.seen


@pytest.mark.parametrize("body", [b"{}", b'{"model":"unknown","prompt":"x"}', b'{"prompt":7}'])
async def test_what_only_the_engine_can_judge_is_judged_by_it(body: bytes) -> None:
    verdict = b'{"error":{"message":"The model `unknown` does not exist.","type":"NotFoundError","code":404}}'
    async with (
        FakeEngine(status(404, verdict)) as prefill,
        FakeEngine() as decode,
        running([prefill.address], [decode.address]) as router,
    ):
        response = await router.post(data=body)

        assert (404, verdict) == (response.status, await response.read())


async def test_a_model_whose_name_is_no_text_is_for_the_engine_to_refuse() -> None:
    async with FakeEngine(status(400)) as decode, running(decodes=[decode.address]) as router:
        assert (await router.post(data=b'{"model":"\xff"}')).status == 400
        assert decode.seen


async def test_a_model_whose_name_is_too_long_to_be_kept_is_a_404() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        assert (await router.post(json={"model": "m" * MOST_OF_A_NAME})).status == 200

        response = await router.post(json={"model": "m" * (MOST_OF_A_NAME + 1)})

        assert response.status == 404
        assert json.loads(await response.read())["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("given", [b"\xe9", b"x" * 129, b"a\tb", b""])
async def test_a_request_id_that_cannot_be_kept_is_replaced(given: bytes) -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n"

        answer = await raw(router, head + b"x-request-id: " + given + b"\r\n\r\n{}")

        assert b"x-request-id: " + decode.seen[0].headers["X-Request-Id"].encode() + b"\r\n" in answer
        assert len(decode.seen[0].headers["X-Request-Id"]) == 32


async def test_a_body_over_the_limit_is_a_413() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address], max_body_bytes=1000) as router:
        assert (await router.post(data=b'{"a":"' + b"x" * 900 + b'"}')).status == 200

        told = await router.post(data=b"x" * 1001)

        assert told.status == 413
        assert json.loads(await told.read())["error"]["code"] == "body_too_large"

        async def pieces() -> object:
            for _ in range(11):
                yield b"x" * 100

        assert (await router.post(data=pieces())).status == 413, "also when no length was announced"


async def test_a_body_that_does_not_come_is_a_408() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address], body_timeout=0.1) as router:
        reader, writer = await asyncio.open_connection(*router.address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        async with asyncio.timeout(30):
            line = await reader.readline()
        writer.close()

        assert line.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/images", "/v1/completions/", "/docs", "/%00"])
async def test_an_unknown_page_is_a_404(path: str) -> None:
    async with running(decodes=[dead_address()]) as router:
        response = await router.post(path)

        assert response.status == 404
        assert json.loads(await response.read())["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/models", "GET"),
        ("POST", "/health", "GET, HEAD"),
        ("GET", "/instances/add", "POST"),
    ],
)
async def test_a_wrong_method_is_a_405(method: str, path: str, allowed: str) -> None:
    async with running(decodes=[dead_address()]) as router, router.client.request(method, router.url(path)) as response:
        assert response.status == 405
        assert allowed == response.headers["Allow"]
        assert json.loads(await response.read())["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "request_", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST /v1/completions HTTP/9\r\n\r\n"]
)
async def test_what_is_no_http_is_refused_and_the_router_lives(request_: bytes) -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        assert (await raw(router, request_)).startswith(b"HTTP/1.1 400 ")
        assert (await router.post()).status == 200


async def test_a_defect_of_the_router_is_a_500_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("secret detail")

    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        monkeypatch.setattr("ems.router.app.parse", fail)
        response = await router.post()
        body = await response.read()

        assert response.status == 500
        assert json.loads(body)["error"]["code"] == "internal_error"
        assert b"secret" not in body
        assert "secret detail" in caplog.text, "the log has it"


async def test_header_bytes_outside_ascii_do_no_harm() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-odd: \xff\xfe\r\nx-utf: \xc3\xa9\r\n"
        request += b"x-request-id: \xe9\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"

        assert (await raw(router, request)).startswith(b"HTTP/1.1 200 ")
        assert decode.seen[0].headers["X-Utf"] == "\u00e9"
