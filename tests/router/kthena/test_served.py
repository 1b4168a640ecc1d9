"""A router whose manifests are files: what it serves, and what changes while it runs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import ConfigError
from ems.http.address import Address
from ems.router.admission.tls import TlsConfig
from ems.router.app import Router
from ems.router.breaker import Breaker
from ems.router.config import RouterConfig
from ems.router.fleet import Role
from ems.router.kthena.catalogue import Catalogue
from ems.router.observe.settings import Format, ObserveConfig
from tests.router.fakes import (
    FakeEngine,
    RawEngine,
    Running,
    completion,
    dead_address,
    prefilled,
    running,
    status,
    until,
)
from tests.router.kthena.manifests import ROUTE, SERVER, documents, pod, read

BODY = {"model": "kimi-k25", "prompt": "hello"}


@asynccontextmanager
async def serving(folder: Path, *texts: str) -> AsyncIterator[Running]:
    (folder / "all.yaml").write_text(documents(*texts))
    async with running(manifests=folder) as router:
        yield router


def change(folder: Path, router: Running, *texts: str) -> None:
    (folder / "all.yaml").write_text(documents(*texts))
    router.router.reload()


def ports(router: Running) -> set[int]:
    return {one.address.port for one in router.instances()}


@pytest.mark.parametrize("page", ["add", "remove"])
async def test_who_serves_is_said_by_the_objects_alone(tmp_path: Path, page: str) -> None:
    async with (
        FakeEngine() as decode,
        serving(tmp_path, SERVER, ROUTE, pod("d", "decode", decode.address.port)) as router,
    ):
        change = {"type": "decode", "instances": str(decode.address)}
        answer = await router.post(f"/instances/{page}", json=change)

        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
        assert ports(router) == {decode.address.port}


async def test_a_request_passes_prefill_and_decode_under_the_engines_name(tmp_path: Path) -> None:
    async with FakeEngine(prefilled) as prefill, FakeEngine() as decode:
        pods = [pod("p", "prefill", prefill.address.port), pod("d", "decode", decode.address.port)]
        async with serving(tmp_path, SERVER, ROUTE, *pods) as router:
            response = await router.post(json=BODY)
            listed = await (await router.get("/v1/models")).json()

    assert response.status == 200
    assert {one.json["model"] for one in (*prefill.seen, *decode.seen)} == {"kimi_k25"}
    assert "kv_transfer_params" in decode.seen[0].json
    assert listed == {
        "object": "list",
        "data": [{"id": "kimi-k25", "object": "model", "created": 0, "owned_by": "kthena"}],
    }


async def test_an_adapter_is_asked_for_by_its_own_name(tmp_path: Path) -> None:
    async with FakeEngine() as decode:
        route = ROUTE.replace("spec:", "spec:\n  loraAdapters: [fine]")
        async with serving(tmp_path, SERVER, route, pod("d", "decode", decode.address.port)) as router:
            await router.post(data=b'{"model": "fine",  "prompt": "a"}')

    assert decode.seen[0].body == b'{"model": "fine",  "prompt": "a"}'


@pytest.mark.parametrize(
    ("body", "texts", "expected"),
    [
        ({"prompt": "a"}, [SERVER, ROUTE], (404, "model not found: the request names no model")),
        ({"model": 7}, [SERVER, ROUTE], (404, "model not found: the request names no model")),
        ({"model": "other"}, [SERVER, ROUTE], (404, "route not found")),
        (BODY, [ROUTE], (404, "can't find model server dev/kimi-k25-pd")),
        (BODY, [SERVER, ROUTE], (503, "no available pods; try again later")),
    ],
)
async def test_what_nobody_serves_is_refused_as_by_kthena(
    tmp_path: Path, body: dict[str, object], texts: list[str], expected: tuple[int, str]
) -> None:
    async with serving(tmp_path, *texts) as router:
        response = await router.post(json=body)
        said = (await response.json())["error"]["message"]

    assert (response.status, said) == expected


async def test_a_prefill_hands_over_within_its_group_only(tmp_path: Path) -> None:
    async with (
        FakeEngine(prefilled) as first,
        FakeEngine(prefilled) as second,
        FakeEngine() as decode,
        FakeEngine() as other,
    ):
        pods = [
            pod("p0", "prefill", first.address.port, group="g0"),
            pod("p1", "prefill", second.address.port, group="g1"),
            pod("p2", "prefill", dead_address().port, group="g2"),
            pod("d0", "decode", decode.address.port, group="g0"),
            pod("d1", "decode", other.address.port, group="g1"),
        ]
        async with serving(tmp_path, SERVER, ROUTE, *pods) as router:
            for index in range(8):
                response = await router.post(json={**BODY, "prompt": f"{index}" * 400})
                assert response.status == 200

    assert len(first.seen) + len(second.seen) == 8
    assert [one.json["prompt"] for one in first.seen] == [one.json["prompt"] for one in decode.seen]
    assert [one.json["prompt"] for one in second.seen] == [one.json["prompt"] for one in other.seen]
    assert first.seen
    assert second.seen


async def test_another_group_computes_the_prompt_itself(tmp_path: Path) -> None:
    async def late(request: web.Request, body: bytes) -> web.StreamResponse:
        for one in running_router.instances():
            if one.role is Role.DECODE and one.groups == {"dev/kimi-k25-pd": "g0"}:
                one.breaker = Breaker(asyncio.get_running_loop().time(), trusted=False)
                one.breaker.probe_at = None
        return await prefilled(request, body)

    async with FakeEngine(late) as prefill, FakeEngine() as decode, FakeEngine() as other:
        pods = [
            pod("p0", "prefill", prefill.address.port, group="g0"),
            pod("d0", "decode", decode.address.port, group="g0"),
            pod("d1", "decode", other.address.port, group="g1"),
        ]
        async with serving(tmp_path, SERVER, ROUTE, *pods) as router:
            running_router = router
            response = await router.post(json=BODY)

    assert response.status == 200
    assert not decode.seen
    assert "kv_transfer_params" not in other.seen[0].json


async def test_a_change_counts_for_what_comes_and_leaves_what_runs(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        await go_on.wait()
        return await completion(request, body)

    async with FakeEngine(slow) as old, FakeEngine() as new:
        first_pod, second_pod = (pod("d", "decode", one.address.port) for one in (old, new))
        async with serving(tmp_path, SERVER, ROUTE, first_pod) as router:
            first = asyncio.create_task(router.post(json=BODY))
            await old.arrived.wait()
            change(tmp_path, router, SERVER, ROUTE, second_pod)
            await until(lambda: ports(router) == {new.address.port} and new.probes > 0)
            await until(lambda: router.instances()[0].breaker.usable)

            assert (await router.post(json=BODY)).status == 200
            assert len(router.router.fleet.leaving()) == 1
            go_on.set()
            assert (await first).status == 200
            assert router.router.fleet.leaving() == []

    assert len(old.seen) == len(new.seen) == 1


async def test_a_mistake_in_a_file_changes_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ems")
    async with FakeEngine() as decode:
        one = pod("d", "decode", decode.address.port)
        async with serving(tmp_path, SERVER, ROUTE, one) as router:
            change(tmp_path, router, SERVER.replace("port: 7100", "prot: 7100"), ROUTE, one)
            await until(lambda: "what was read before still counts" in caplog.text)

            assert (await router.post(json=BODY)).status == 200
            change(tmp_path, router, SERVER, ROUTE.replace("modelName: kimi-k25", "modelName: b"), one)
            await until(lambda: "it cannot change" in caplog.text)

            assert (await router.post(json=BODY)).status == 200
            change(tmp_path, router, SERVER.replace("model: kimi_k25", "model: c"), ROUTE, one)
            await until(lambda: "again" in caplog.text)
            await router.post(json=BODY)

    assert [one.json["model"] for one in decode.seen] == ["kimi_k25", "kimi_k25", "c"]
    assert caplog.text.count("there is an unknown field `prot`") == 1


async def test_files_are_looked_at_without_being_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ems.files.POLL_SECONDS", 0.01)
    async with serving(tmp_path, SERVER, ROUTE) as router:
        (tmp_path / "pods.yml").write_text(pod("d", "decode", 9))
        await until(lambda: ports(router) == {9})
        (tmp_path / "pods.yml").unlink()
        await until(lambda: ports(router) == set())


async def test_a_mistake_at_the_start_keeps_the_router_from_starting(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("kind: Other")
    for path, said in (
        (tmp_path, "a document has no kind or no apiVersion"),
        (tmp_path / "b", "Cannot read the manifest .*: No such file or directory"),
    ):
        with pytest.raises(ConfigError, match=said):
            async with Router(RouterConfig(manifests=path)):
                raise AssertionError


async def test_the_limit_of_a_route_is_no_limit_of_several_workers_without_redis(tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(documents(SERVER, ROUTE.replace("spec:", "spec:\n  rateLimit: {inputTokensPerUnit: 5}")))
    said = r"/all.yaml: ModelRoute dev/kimi-k25: each of several --workers .* add --limits-redis$"
    with pytest.raises(ConfigError, match=said):
        async with Router(RouterConfig(manifests=path, workers=2)):
            raise AssertionError


async def test_a_folder_that_cannot_be_listed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(ConfigError, match="Cannot read the manifest"):
        async with Router(RouterConfig(manifests=tmp_path)):
            raise AssertionError


async def test_the_time_of_a_request_ends_it_in_prefill_and_in_decode(tmp_path: Path) -> None:
    async def silent(request: web.Request, body: bytes) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def starts(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[]}\n\n')
        await asyncio.Event().wait()
        return response

    server = SERVER.replace("timeout: 10s", "timeout: 200ms")
    async with FakeEngine(silent) as prefill, FakeEngine(silent) as decode:
        one, two = pod("d", "decode", decode.address.port), pod("p", "prefill", prefill.address.port)
        async with serving(tmp_path, server, ROUTE, one) as router:
            response = await router.post(json=BODY)
            assert (response.status, json.loads(await response.read())["error"]["code"]) == (504, "request_timeout")
            decode.answer = starts
            response = await router.post(json=BODY)
            text = await response.read()
            assert response.status == 200
            assert text.startswith(b'data: {"choices":[]}')
            assert b"request_timeout" in text
            assert text.endswith(b"data: [DONE]\n\n")
            # A request that was too long is no failure of the instance.
            assert router.instances()[0].failures == 0
        async with serving(tmp_path, server, ROUTE, one, two) as router:
            response = await router.post(json=BODY)
            assert (response.status, json.loads(await response.read())["error"]["code"]) == (504, "request_timeout")
            assert [one.failures for one in router.instances()] == [0, 0]
    assert len(decode.seen) == 2, "what comes after the request's own time is not asked for"


@pytest.mark.parametrize("attempts", [0, 2])
async def test_attempts_of_the_policy_are_made(tmp_path: Path, attempts: int) -> None:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Close without an answer."""

    server = SERVER.replace("timeout: 10s", f"retry: {{attempts: {attempts}, retryInterval: 1ms}}")
    async with RawEngine(breaks) as decode:
        one = pod("d", "decode", decode.address.port)
        async with serving(tmp_path, server, ROUTE, one) as router:
            response = await router.post(json=BODY)

    assert response.status == 503
    assert decode.requests == attempts + 1


async def test_https_is_spoken_by_a_router_that_speaks_it_to_all(tmp_path: Path) -> None:
    secured = SERVER.replace("port: 7100", "port: 7100\n    protocol: https")
    (tmp_path / "a.yaml").write_text(documents(secured, ROUTE))

    with pytest.raises(ConfigError, match="is https, the router does not: it speaks https with --engine-tls only"):
        async with Router(RouterConfig(manifests=tmp_path)):
            raise AssertionError
    async with running(manifests=tmp_path, tls=TlsConfig(engine_tls=True)) as router:
        assert router.router.served is not None
        assert len(router.router.served.catalogue.servings) == 1


async def test_requests_are_counted_and_logged_as_by_kthena(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    one = documents(ROUTE.replace("  rules:", "  rateLimit: {inputTokensPerUnit: 50, unit: month}\n  rules:"), SERVER)
    empty = documents(ROUTE.replace("kimi-k25", "empty"), SERVER.replace("kimi-k25-pd", "empty-pd"))
    observe = ObserveConfig(access_log=Format.JSON, access_log_output=str(log))
    async with FakeEngine(prefilled) as prefill, FakeEngine(status(500)) as decode:
        pods = [pod("p-0", "prefill", prefill.address.port), pod("d-0", "decode", decode.address.port)]
        (tmp_path / "all.yaml").write_text(documents(one, empty, *pods))
        async with running(manifests=tmp_path / "all.yaml", observe=observe) as router:
            for body in (BODY, {**BODY, "prompt": "a" * 400}, {**BODY, "model": "empty"}, {"model": ""}):
                await router.post(json=body)
            page = await (await router.get("/metrics")).text()
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]

    assert (lines[0]["prefill_pod"], lines[0]["selected_pod"]) == ("p-0", "d-0")
    assert [line.get("error", {}).get("type") for line in lines] == [
        None, "input_rate_limit", "pod_discovery", "request_parsing",
    ]  # fmt: skip
    assert [line["model_name"] for line in lines] == ["kimi-k25", "kimi-k25", "empty", ""]
    assert all(isinstance(value, int) for line in lines for name, value in line.items() if name.startswith("duration_"))
    where = 'backend_name="dev/kimi-k25-pd",backend_type="model_server",error_type="request_failed",model="kimi-k25"'
    assert f"kthena_router_requests_total{{{where}" in page
    nowhere = 'backend_name="none",backend_type="none",error_type="pod_discovery",model="empty",model_route="none"'
    assert f"kthena_router_requests_total{{{nowhere}" in page
    limited = 'limit_type="input_tokens",model="kimi-k25",path="/v1/completions"'
    assert f"kthena_router_rate_limit_exceeded_total{{{limited}}} 1.0" in page


async def test_the_limit_of_a_route_limits_and_ends_with_it(tmp_path: Path) -> None:
    async with FakeEngine() as decode:
        one = pod("d", "decode", decode.address.port)
        limited = ROUTE.replace("  rules:", "  rateLimit: {inputTokensPerUnit: 5, unit: month}\n  rules:")
        async with serving(tmp_path, SERVER, limited, one) as router:
            refused = await router.post(json={**BODY, "prompt": "a" * 400})
            assert (refused.status, (await refused.json())["error"]["code"]) == (429, "rate_limit_exceeded")
            change(tmp_path, router, SERVER, ROUTE, one)
            assert (await router.post(json={**BODY, "prompt": "a" * 400})).status == 200


_ports = st.dictionaries(st.integers(1, 6), st.sampled_from(["prefill", "decode"]), max_size=5)


@given(st.lists(_ports, min_size=1, max_size=6), st.data())
def test_after_every_change_the_fleet_has_what_the_manifests_say(
    states: list[dict[int, str]], data: st.DataObject
) -> None:
    """Requests that run keep their instance until they end; nothing else of the past is left."""
    router = Router(RouterConfig(manifests=Path("nowhere")))
    assert router.served is not None
    holds = []
    for state in states:
        texts = [SERVER, ROUTE, *(pod(f"p{port}", role, port) for port, role in state.items())]
        router.served.apply(
            Catalogue(read({"a": documents(*texts)}).objects, router.served.catalogue), 0.0, trusted=True
        )
        listed = {one.address: role for role in Role for one in router.fleet.listed(role)}

        assert listed == {Address("127.0.0.1", port): Role(role) for port, role in state.items()}
        everyone = [one for role in Role for one in router.fleet.listed(role)]
        if everyone:
            holds.append(router.fleet.hold(data.draw(st.sampled_from(everyone)), 5))
    for hold in holds:
        hold.release()

    assert router.fleet.leaving() == []
    assert not any(one.load for role in Role for one in router.fleet.listed(role))
