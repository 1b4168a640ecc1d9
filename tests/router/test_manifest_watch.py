"""A router that is configured by manifests, in front of engines: routes, groups, changes while it runs, mistakes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ems.errors import ConfigError
from tests.router.fakes import FakeEngine, Running, running, until
from tests.router.kthena.manifests import pod, route, server, write


def placed(app: str, engine: FakeEngine, **spec: Any) -> dict[str, Any]:
    """A server of one engine, and its pod: fake engines share an address and differ in the port."""
    return server(app, group=False, workloadPort={"port": engine.address.port}, **spec)


def files(tmp_path: Path, *documents: Any) -> Path:
    return write(tmp_path / "m.yaml", *documents)


def goes_to(router: Running, model: str) -> str:
    assert router.router.manifests is not None
    target = router.router.manifests.routes.match(model, "/", {})
    return "" if target is None else target.server


async def ask(router: Running, model: str, **headers: str) -> int:
    response = await router.post(json={"model": model, "prompt": "hello"}, headers=headers)
    return response.status


async def test_requests_go_by_their_model_and_are_renamed(tmp_path: Path) -> None:
    async with FakeEngine() as one, FakeEngine() as two:
        place = files(
            tmp_path,
            placed("one", one, model="told-one"),
            placed("two", two, model="told-two"),
            pod("a", "127.0.0.1", "one"),
            pod("b", "127.0.0.1", "two"),
            route("m1", "one"),
            route("m2", "two", loraAdapters=["tuned"]),
        )
        async with running(manifests=place) as router:
            assert [await ask(router, name) for name in ("m1", "m2", "tuned", "m3")] == [200, 200, 200, 404]
            unnamed = await router.post(json={"prompt": "hello"})
            models = await (await router.get("/v1/models")).json()

    assert unnamed.status == 404
    assert (await unnamed.json())["error"]["code"] == "model_not_found"
    assert [seen.json["model"] for seen in one.seen] == ["told-one"]
    assert [seen.json["model"] for seen in two.seen] == ["told-two", "tuned"]
    assert [model["id"] for model in models["data"]] == ["m1", "m2", "tuned"]


async def test_a_changed_file_is_used_and_a_wrong_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as one, FakeEngine() as two:
        objects = [placed("one", one), placed("two", two), pod("a", "127.0.0.1", "one"), pod("b", "127.0.0.1", "two")]
        place = files(tmp_path, *objects, route("m", "one"))
        async with running(manifests=place) as router:
            assert await ask(router, "m") == 200
            kept = next(one_ for one_ in router.instances() if one_.address == one.address)

            files(tmp_path, *objects, route("m", "two"))
            router.router.reload()
            await until(lambda: goes_to(router, "m") == "default/two")
            assert await ask(router, "m") == 200
            assert len(two.seen) == 1
            assert kept in router.instances(), "who stays keeps what is known of it"

            place.write_text("a: [")
            router.router.reload()
            await until(lambda: "is not YAML" in caplog.text)
            assert await ask(router, "m") == 200

            files(tmp_path, objects[0], objects[2], route("m", "one"))
            router.router.reload()
            await until(lambda: len(router.instances()) == 1)
            assert await ask(router, "m") == 200
    assert len(one.seen) == 2


async def test_a_decode_is_of_the_group_of_its_prefill(tmp_path: Path) -> None:
    """Fake engines cannot share a port, so the groups are seen at the fleet, not at requests."""
    pods = [
        pod(f"{role}{n}", f"127.0.0.{n}", role=role, group=f"g{n}") for role in ("prefill", "decode") for n in (1, 2)
    ]
    lonely = pod("lonely", "127.0.0.3", role="prefill", group="g3")
    place = files(tmp_path, server(), route(), *pods, lonely)
    async with running(manifests=place) as router:
        groups = {(one.role.value, str(one.address)): dict(one.groups) for one in router.instances()}

    assert groups["prefill", "127.0.0.1:7100"] == {"default/pair": "g1"}
    assert groups["decode", "127.0.0.2:7100"] == {"default/pair": "g2"}
    assert len(groups) == 5


@pytest.mark.parametrize("documents", [[], [server()]])
async def test_a_start_without_a_route_is_refused(tmp_path: Path, documents: list[Any]) -> None:
    with pytest.raises(ConfigError, match="no ModelRoute is in"):
        async with running(manifests=files(tmp_path, *documents)):
            pass


async def test_traffic_policy_bounds_tries_and_silence(tmp_path: Path) -> None:
    policy = {"timeout": "200ms", "retry": {"attempts": 1, "retryInterval": "1ms"}}

    async def never(request: Any, body: bytes) -> Any:
        await asyncio.get_running_loop().create_future()

    async with FakeEngine(never) as engine:
        place = files(
            tmp_path, placed("one", engine, trafficPolicy=policy), pod("a", "127.0.0.1", "one"), route("m", "one")
        )
        async with running(manifests=place) as router:
            response = await router.post(json={"model": "m", "prompt": "hello"})

    assert response.status == 504
    assert json.loads(await response.read())["error"]["code"] == "decode_timeout"


async def test_a_routes_limit_holds_for_its_adapters_too_and_can_be_removed(tmp_path: Path) -> None:
    async with FakeEngine() as one, FakeEngine() as two:
        objects = [placed("one", one), placed("two", two), pod("a", "127.0.0.1", "one"), pod("b", "127.0.0.1", "two")]
        adapted = {"loraAdapters": ["tuned"]}
        place = files(
            tmp_path, *objects, route("m", "one", rateLimit={"inputTokensPerUnit": 1, "unit": "month"}, **adapted)
        )
        async with running(manifests=place) as router:
            assert [await ask(router, name) for name in ("m", "tuned", "m")] == [200, 429, 429]
            files(tmp_path, *objects, route("m", "two", **adapted))
            router.router.reload()
            await until(lambda: goes_to(router, "m") == "default/two")
            assert [await ask(router, name) for name in ("m", "tuned")] == [200, 200]
