"""The pages of Kthena's debugging port: what the router makes of the objects, and nothing secret of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ems.router.admission.settings import AdmissionConfig
from tests.engines.engine_pages import vllm
from tests.router.fakes import FakeEngine, Running, running, until
from tests.router.kthena.manifests import ROUTE, SERVER, documents, pod

SECRETS = """
    - modelMatch: {headers: {authorization: {exact: Bearer s3cret}, x-user: {prefix: a}}}
      targetModels: [{modelServerName: kimi-k25-pd}]
  rateLimit: {inputTokensPerUnit: 5, global: {redis: {address: "redis://me:s3cret@cache:6379"}}}
"""


async def dumped(router: Running, path: str) -> Any:
    response = await router.get(f"/debug/config_dump/{path}")

    assert response.status == 200, path
    assert "s3cret" not in await response.text()
    return await response.json()


async def test_routes_servers_and_pods_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ems.router.scraper.INTERVAL", 0.005)
    config = tmp_path / "routerConfiguration.yaml"
    config.write_text("scheduler: {plugins: {Score: {enabled: [{name: gpu-usage, weight: 1}]}}}")
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    async with FakeEngine() as prefill, FakeEngine() as decode:
        prefill.metrics = vllm(running=2, waiting=1, kv_usage=0.5, ttft=(1, 2))
        pods = [pod("p0", "prefill", prefill.address.port), pod("d0", "decode", decode.address.port)]
        (manifests / "all.yaml").write_text(documents(SERVER, ROUTE.rstrip() + SECRETS, *pods))
        async with running(manifests=manifests, router_file=config) as router:
            await until(lambda: prefill.scrapes > 1)
            [route] = (await dumped(router, "modelroutes"))["modelroutes"]
            [server] = (await dumped(router, "modelservers"))["modelservers"]
            found = {one["name"]: one for one in (await dumped(router, "pods"))["pods"]}
            for kind, one in (("modelroutes", route), ("modelservers", server), ("pods", found["p0"])):
                assert await dumped(router, f"namespaces/dev/{kind}/{one['name']}") == one
            for missing in ("gateways", "namespaces/dev/pods/p1", "namespaces/prod/pods/p0", "pods/p0", "pods/", ""):
                assert (await router.get(f"/debug/config_dump/{missing}")).status == 404

    assert (route["name"], route["namespace"], route["spec"]["modelName"]) == ("kimi-k25", "dev", "kimi-k25")
    assert list(route["spec"]["rules"][1]["modelMatch"]["headers"]) == ["authorization", "x-user"]
    assert route["spec"]["rateLimit"]["global"]["redis"]["address"] == "cache:6379"
    assert server["spec"]["workloadPort"]["port"] == 7100
    assert (server["associatedPods"], server["prefillPods"]) == (["dev/p0", "dev/d0"], ["dev/p0"])
    assert found["p0"]["metrics"] == {
        "gpuCacheUsage": 0.5,
        "requestWaitingNum": 1,
        "requestRunningNum": 2,
        "tpot": None,
        "ttft": 0.5,
    }
    assert found["d0"]["metrics"]["gpuCacheUsage"] is None
    assert (found["d0"]["engine"], found["d0"]["modelServers"]) == ("vLLM", ["dev/kimi-k25-pd"])
    assert found["d0"]["podInfo"]["podIP"] == "127.0.0.1"


async def test_they_are_for_administrators(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": []}')
    keys.chmod(0o600)
    (tmp_path / "all.yaml").write_text(documents(SERVER, ROUTE))
    async with running(manifests=tmp_path / "all.yaml", admission=AdmissionConfig(api_keys=str(keys))) as router:
        assert (await router.get("/debug/config_dump/pods")).status == 401


async def test_without_objects_there_are_no_such_pages() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        assert (await router.get("/debug/config_dump/pods")).status == 404
