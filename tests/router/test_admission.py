"""Admission and what is seen from outside, on a router that serves."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from ems import files
from ems.kthena.rate_limit import RateLimit, Unit
from ems.router.admission.keys import ApiKey, KeyFile
from ems.router.admission.settings import AdmissionConfig
from ems.router.admission.tls import TlsConfig
from ems.router.observe.settings import Format, ObserveConfig
from tests.kit.certificates import Authority
from tests.router.admission.api_keys import digest_of, new_key
from tests.router.fakes import FakeEngine, Running, completion, running, status, until

DAY = RateLimit(input_tokens_per_unit=100, unit=Unit.MONTH)


def key_file(path: Path, **keys: dict[str, Any]) -> dict[str, str]:
    """Write a file with these keys; what clients send of each."""
    made = {name: new_key() for name in keys}
    listed = tuple(ApiKey(id=name, sha256=digest_of(made[name]), **facts) for name, facts in keys.items())
    path.touch(0o600)
    path.write_bytes(msgspec.json.encode(KeyFile(keys=listed)))
    return made


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def held(engine: FakeEngine) -> asyncio.Event:
    """Let the engine answer only when the event is set."""
    let = asyncio.Event()

    async def answer(request: Any, body: bytes) -> Any:
        await let.wait()
        return await completion(request, body)

    engine.answer = answer
    return let


def gates(router: Running) -> tuple[int, int, int]:
    gate = router.router.admission.gate
    return gate.queue.running, gate.queue.waiting, len(gate._waiting)


async def test_keys_open_the_router_and_stay_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = key_file(path, alice={"models": ("m",)}, boss={"administers": True})
    async with (
        FakeEngine() as prefill,
        FakeEngine() as decode,
        running([prefill.address], [decode.address], admission=AdmissionConfig(api_keys=str(path))) as router,
    ):
        assert (await router.post()).status == 401
        refused = await router.post(headers=bearer("x"))
        assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert (await router.post(headers=bearer(keys["alice"]))).status == 200
        other = {"model": "other", "prompt": "x"}
        assert (await router.post(headers=bearer(keys["alice"]), json=other)).status == 403
        for engine in (prefill, decode):
            assert [set(one.headers) & {"Authorization", "X-Api-Key"} for one in engine.seen] == [set()]
        assert (await router.get("/v1/models")).status == 401
        assert (await router.get("/v1/models", headers=bearer(keys["alice"]))).status == 200
        change = {"type": "decode", "instances": str(decode.address)}
        for name, expected in (("alice", 403), ("boss", 200)):
            assert (await router.post("/instances/add", headers=bearer(keys[name]), json=change)).status == expected


async def test_a_key_that_is_revoked_opens_nothing_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "POLL_SECONDS", 0.01)
    path = tmp_path / "keys.json"
    before = key_file(path, alice={})
    async with (
        FakeEngine() as decode,
        running(decodes=[decode.address], admission=AdmissionConfig(api_keys=str(path))) as router,
    ):
        assert (await router.post(headers=bearer(before["alice"]))).status == 200
        known = router.router.admission.gate.keys
        key_file(path, bob={}, carol={})
        await until(lambda: router.router.admission.gate.keys is not known)
        assert (await router.post(headers=bearer(before["alice"]))).status == 401


async def test_engines_get_the_routers_key_or_the_clients_when_told(tmp_path: Path) -> None:
    secret = tmp_path / "engine.key"
    secret.touch(0o600)
    secret.write_text("for-engines\n")
    keys = key_file(tmp_path / "keys.json", alice={})
    file = str(tmp_path / "keys.json")
    sent = bearer(keys["alice"])
    expected = (
        (AdmissionConfig(api_keys=file, engine_key=str(secret)), "Bearer for-engines"),
        (AdmissionConfig(api_keys=file, forward_credentials=True), sent["Authorization"]),
        (AdmissionConfig(), sent["Authorization"]),
    )
    for admission, seen in expected:
        async with FakeEngine() as decode, running(decodes=[decode.address], admission=admission) as router:
            await router.post(headers=sent)
            assert decode.seen[0].headers.getall("Authorization") == [seen]


async def test_limits_hold_and_what_fails_costs_nothing() -> None:
    prompt = {"model": "m", "prompt": "x" * 300}
    async with (
        FakeEngine() as decode,
        running(decodes=[decode.address], admission=AdmissionConfig(limit=DAY)) as router,
    ):
        decode.answer = status(500)
        assert (await router.post(json=prompt)).status == 500
        decode.answer = completion
        assert (await router.post(json=prompt)).status == 200
        refused = await router.post(json=prompt)
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) > 0
        assert (await refused.json())["error"]["code"] == "rate_limit_exceeded"
        never = await router.post(json={"model": "m", "prompt": "x" * 3000})
        assert (never.status, never.headers["x-should-retry"], "Retry-After" in never.headers) == (429, "false", False)
        assert (await never.json())["error"]["message"].endswith(
            "never fit into the limit of 100; send a shorter prompt"
        )
        page = await (await router.get("/metrics")).text()
        assert (
            'kthena_router_rate_limit_exceeded_total{limit_type="input_tokens",model="m",path="/v1/completions"} 2.0'
            in page
        )


async def test_places_are_given_in_turn_and_none_is_lost() -> None:
    admission = AdmissionConfig(max_running=1, queue_size=1)
    async with FakeEngine() as decode, running(decodes=[decode.address], admission=admission) as router:
        let = held(decode)
        first = asyncio.create_task(router.post())
        await decode.arrived.wait()
        second = asyncio.create_task(router.post())
        await until(lambda: gates(router) == (1, 1, 1))
        full = await router.post()
        assert (full.status, full.headers["Retry-After"]) == (503, "1")
        second.cancel()  # its client leaves
        await until(lambda: gates(router) == (1, 0, 0))
        third = asyncio.create_task(router.post())
        await until(lambda: gates(router) == (1, 1, 1))
        let.set()
        assert [(await first).status, (await third).status] == [200, 200]
        await until(lambda: gates(router) == (0, 0, 0))


async def test_says_why_a_request_went_where_it_went() -> None:
    async with (
        FakeEngine() as prefill,
        FakeEngine() as one,
        FakeEngine() as other,
        running([prefill.address], [one.address, other.address]) as router,
    ):
        await router.post(headers={"X-Request-Id": "a b"})
        found = await (await router.get("/debug/requests/a%20b")).json()
        assert (await router.get("/debug/requests/none")).status == 404
        assert [row["request_id"] for row in (await (await router.get("/debug/requests")).json())["requests"]] == [
            "a b"
        ]

    attempts = found["choice"]["attempts"]
    assert [attempt["role"] for attempt in attempts] == ["prefill", "decode"]
    assert {score["instance"] for score in attempts[1]["scores"]} == {str(one.address), str(other.address)}
    assert found["answer"]["status"] == 200
    assert 0 <= found["times"]["prefill_done"] <= found["times"]["first_byte"] <= found["times"]["ended"]


async def test_each_request_is_a_line_of_the_access_log(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    observe = ObserveConfig(access_log=Format.JSON, access_log_output=str(path))
    async with FakeEngine() as decode, running(decodes=[decode.address], observe=observe) as router:
        await router.post(headers={"X-Request-Id": "one"})
        await router.post(data=b"{", headers={"X-Request-Id": "two"})
        await router.get("/health")
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]

    assert [(line["request_id"], line["status_code"]) for line in lines] == [("one", 200), ("two", 400)]
    assert lines[0]["selected_pod"] == str(decode.address)
    assert lines[1]["error"]["type"] == "request_parsing"


async def test_both_sides_may_speak_tls(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    certificate, key = ca.sign("router")
    client = ssl.create_default_context(cafile=str(ca.file))
    tls = TlsConfig(certificate=certificate, key=key)
    async with FakeEngine() as decode, running(decodes=[decode.address], tls=tls) as inner:
        outer_tls = TlsConfig(engine_tls=True, engine_authority=str(ca.file))
        async with running(decodes=[inner.address], tls=outer_tls) as outer:
            assert (await outer.post()).status == 200
        async with aiohttp.ClientSession() as session:
            url = f"https://{inner.address}/v1/completions"
            async with session.post(url, json={"model": "m", "prompt": "x"}, ssl=client) as response:
                assert response.status == 200
