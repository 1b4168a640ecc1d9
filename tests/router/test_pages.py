"""The pages beside completions: health, models, metrics, and instances that come and go."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from ems.router.fleet import Role
from ems.version import __version__
from tests.metric_rules import broken_rules, families, listed
from tests.router.fakes import FakeEngine, Running, completion, dead_address, running, status, until


async def change(router: Running, verb: str, body: object, expected: int = 200) -> dict[str, Any]:
    response = await router.post(f"/instances/{verb}", json=body)

    assert expected == response.status, await response.text()
    value: dict[str, Any] = json.loads(await response.read())
    return value


# -------------------------------------------------------------------------------------------------------------- health


async def test_healthcheck_counts_instances_and_requests() -> None:
    release = asyncio.Event()

    async def hold(request: web.Request, body: bytes) -> web.StreamResponse:
        await release.wait()
        return await completion(request, body)

    async with (
        FakeEngine() as p1,
        FakeEngine() as p2,
        FakeEngine(hold) as decode,
        running([p1.address, p2.address], [decode.address]) as router,
    ):
        long = asyncio.create_task(router.post())
        await decode.arrived.wait()
        page = await router.get("/healthcheck")

        assert json.loads(await page.read()) == {
            "status": "ok",
            "prefill_instances": 2,
            "decode_instances": 1,
            "request_num": 1,
        }

        release.set()
        await long
        page = await router.get("/healthcheck")

        assert json.loads(await page.read())["request_num"] == 0


async def test_health_and_readiness_follow_the_decode_instances_and_liveness_does_not() -> None:
    async with FakeEngine() as decode, running([dead_address()], [decode.address]) as router:
        await until(router.router.fleet.ready)
        for path in ("/health", "/readyz", "/livez", "/healthz"):
            assert (await router.get(path)).status == 200
        await until(lambda: not router.router.fleet.usable(Role.PREFILL))
        lines = (await (await router.get("/readyz")).text()).splitlines()

        assert lines[0] == "ready"
        assert f"[+] decode {decode.address} ok" in lines
        assert "put aside" in lines[1]

    async with running(decodes=[dead_address()]) as router:
        await until(lambda: not router.router.fleet.usable(Role.DECODE))

        found = [(await router.get(path)).status for path in ("/health", "/readyz", "/livez", "/healthz")]
        assert found == [503, 503, 200, 200]
        async with router.client.head(router.url("/livez")) as head:
            assert head.status == 200


async def test_the_version_is_told() -> None:
    async with running(decodes=[dead_address()]) as router:
        assert json.loads(await (await router.get("/version")).read()) == {"version": __version__}


# -------------------------------------------------------------------------------------------------------------- models


async def test_models_are_merged_and_listed_once() -> None:
    async with (
        FakeEngine(models=("m", "lora-p")) as prefill,
        FakeEngine(models=("m", "lora-d")) as decode,
        running([prefill.address], [decode.address]) as router,
    ):
        response = await router.get("/v1/models", headers={"Authorization": "Bearer k"})
        page = json.loads(await response.read())

        assert page["object"] == "list"
        assert [model["id"] for model in page["data"]] == ["m", "lora-d", "lora-p"]
        assert str(decode.address) == page["data"][0]["root"], "the decode instance describes what both have"
        assert decode.seen[0].headers["Authorization"] == "Bearer k"


async def test_models_do_without_the_instances_that_are_dead() -> None:
    async with FakeEngine() as decode, running([dead_address()], [dead_address(), decode.address]) as router:
        page = json.loads(await (await router.get("/v1/models")).read())

        assert [model["id"] for model in page["data"]] == ["m"]


async def test_models_of_nobody_is_a_503_and_a_common_refusal_crosses() -> None:
    async with running(decodes=[dead_address()]) as router:
        assert (await router.get("/v1/models")).status == 503

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401, body=b'{"error":"Unauthorized"}', content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/models", refuse)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    address = dead_address()
    await web.TCPSite(runner, *address).start()
    async with running(decodes=[address]) as router:
        response = await router.get("/v1/models")

        assert (response.status, await response.read()) == (401, b'{"error":"Unauthorized"}')
    await runner.cleanup()


async def test_reset_prefix_cache_reaches_everyone_and_names_who_failed() -> None:
    async with FakeEngine() as prefill, FakeEngine() as decode, running([prefill.address], [decode.address]) as router:
        response = await router.post("/reset_prefix_cache?reset_running_requests=true", data=b"")

        assert (response.status, json.loads(await response.read())["failed"]) == (200, [])
        for engine in (prefill, decode):
            assert [seen.path for seen in engine.seen] == ["/reset_prefix_cache?reset_running_requests=true"]

        decode.answer = status(500)
        response = await router.post("/reset_prefix_cache", data=b"")

        assert (502, [str(decode.address)]) == (response.status, json.loads(await response.read())["failed"])


# ----------------------------------------------------------------------------------------------------------- instances


async def test_an_added_instance_serves_once_it_is_healthy() -> None:
    async with FakeEngine() as old, FakeEngine() as new, running(decodes=[old.address]) as router:
        new.health = 503
        answer = await change(router, "add", {"type": "decode", "instances": str(new.address)})

        assert answer["current_prefill_instances"] == []
        assert [str(old.address), str(new.address)] == answer["current_decode_instances"]
        assert str(new.address) in answer["message"]

        await until(lambda: bool(new.probes))
        for _ in range(3):
            await router.post()

        assert (len(old.seen), len(new.seen)) == (3, 0)

        new.health = 200
        await until(lambda: len(router.router.fleet.usable(Role.DECODE)) == 2)
        for _ in range(2):
            await router.post()

        assert len(new.seen) >= 1


async def test_adding_prefill_turns_the_balancer_into_a_pair() -> None:
    async with FakeEngine() as prefill, FakeEngine() as decode, running(decodes=[decode.address]) as router:
        await router.post()
        await change(router, "add", {"type": "prefill", "instances": [str(prefill.address)]})
        await change(router, "add", {"type": "prefill", "instances": [str(prefill.address)] * 2})
        await until(lambda: bool(router.router.fleet.usable(Role.PREFILL)))
        await router.post()

        assert (len(prefill.seen), len(decode.seen)) == (1, 2)

        answer = await change(router, "remove", {"type": "prefill", "instances": [str(prefill.address)]})

        assert ([], [str(decode.address)]) == (answer["current_prefill_instances"], answer["current_decode_instances"])


async def test_a_removed_instance_finishes_its_requests_whatever_others_do() -> None:
    release = asyncio.Event()

    async def hold(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await release.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with FakeEngine(hold) as leaving, FakeEngine() as staying, running(decodes=[leaving.address]) as router:
        long = asyncio.create_task(router.post(json={"stream": True}))
        await leaving.arrived.wait()
        await change(router, "add", {"type": "decode", "instances": str(staying.address)})
        await until(lambda: len(router.router.fleet.usable(Role.DECODE)) == 2)
        answer = await change(router, "remove", {"type": "decode", "instances": str(leaving.address)})

        assert [str(staying.address)] == answer["current_decode_instances"]
        assert len(router.router.fleet.leaving()) == 1

        staying.answer = hold
        other = asyncio.create_task(router.post())
        await staying.arrived.wait()
        release.set()

        assert await (await long).read() == b"data: 1\n\ndata: [DONE]\n\n"
        assert (await other).status == 200
        assert router.router.fleet.leaving() == []
        assert len(leaving.seen) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"type": "both", "instances": "h:1"},
        {"type": "decode"},
        {"type": "decode", "instances": []},
        {"type": "decode", "instances": "h"},
        {"type": "decode", "instances": "h:0"},
        {"type": "decode", "instances": "h:70000"},
        {"type": "decode", "instances": "h:1e3"},
        {"type": "decode", "instances": "h:9999999999999999999999"},
        {"type": "decode", "instances": "http://h:80"},
        {"type": "decode", "instances": ["good:80", "bad host:80"]},
        {"type": "decode", "instances": [1]},
        ["decode"],
    ],
)
async def test_a_wrong_change_of_instances_changes_nothing(body: object) -> None:
    async with running(decodes=[dead_address()]) as router:
        for verb in ("add", "remove"):
            answer = await change(router, verb, body, 400)

            assert answer["error"]["code"] == "invalid_instances"
        assert len(router.instances()) == 1


async def test_removing_what_is_not_there_removes_nothing() -> None:
    here = dead_address()
    async with running(decodes=[here]) as router:
        answer = await change(router, "remove", {"type": "decode", "instances": [str(here), "other:80"]}, 404)

        assert "other:80" in answer["error"]["message"]
        assert [here] == [one.address for one in router.instances()]


# ------------------------------------------------------------------------------------------------------------- metrics


async def test_metrics_tell_what_happened() -> None:
    async with FakeEngine() as prefill, FakeEngine() as decode, running([prefill.address], [decode.address]) as router:
        for _ in range(3):
            await router.post()
        await router.post(data=b"{")
        response = await router.get("/metrics")
        page = await response.text()

    assert response.headers["Content-Type"].startswith("text/plain; version=")
    kthenas = [line for line in page.splitlines(keepends=True) if "kthena_router_" in line]
    own = [line for line in page.splitlines(keepends=True) if "kthena_router_" not in line]
    assert broken_rules("".join(kthenas), prefix="kthena_router_") == []
    assert broken_rules("".join(own), prefix="ems_") == []
    assert families(page) == listed("ems_router_") | listed("ems_build_info") | listed("kthena_router_")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return samples[name, *sorted(labels.items())]

    assert value("ems_router_requests_total", endpoint="/v1/completions", status="200") == 3
    assert value("ems_router_requests_total", endpoint="/v1/completions", status="400") == 1
    assert value("ems_router_requests_running") == 0
    assert value("ems_router_prefills_total", outcome="done") == 3
    assert value("ems_router_prefill_seconds_count") == 3
    assert value("ems_router_time_to_first_byte_seconds_count") == 3
    for role, engine in (("prefill", prefill), ("decode", decode)):
        where = {"role": role, "instance": str(engine.address)}

        assert value("ems_router_instance_up", **where) == 1
        assert value("ems_router_instance_requests_total", **where) == 3
        assert value("ems_router_instance_load_tokens", **where) == 0
