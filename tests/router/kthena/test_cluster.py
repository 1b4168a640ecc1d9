"""Objects that are followed on an API server: lists, watches, and what goes wrong with them."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ems.kubernetes.access import ClusterAccess
from ems.router.kthena.objects import PORT_ANNOTATION
from tests.kit.certificates import Authority
from tests.kubernetes.api import FakeApiServer
from tests.kubernetes.kubeconfigs import kubeconfig
from tests.router.fakes import FakeEngine, Running, prefilled, running, until
from tests.router.kthena.manifests import ROUTE, SERVER, pod

READY = "  conditions: [{type: Ready, status: 'True'}]"
BODY = {"model": "kimi-k25", "prompt": "hello"}
EVERYTHING = {"modelservers", "modelroutes", "pods"}


def loaded(text: str) -> dict[str, Any]:
    one: dict[str, Any] = yaml.safe_load(text)
    return one


@asynccontextmanager
async def following(api: FakeApiServer, folder: Path, **access: Any) -> AsyncIterator[Running]:
    cluster = ClusterAccess(kubeconfig=kubeconfig(folder, api.url, **access.pop("user", {})), **access)
    async with running(cluster=cluster) as router:
        yield router


def ports(router: Running) -> list[int]:
    return sorted(one.address.port for one in router.instances())


def decode_pod(name: str, port: int) -> dict[str, Any]:
    return loaded(pod(name, "decode", port, status=READY))


async def test_what_the_server_has_is_served_and_what_changes_there_too(tmp_path: Path) -> None:
    async with FakeApiServer() as api, FakeEngine(prefilled) as prefill, FakeEngine() as decode, FakeEngine() as new:
        api.put("modelservers", loaded(SERVER))
        api.put("modelroutes", loaded(ROUTE))
        api.put("pods", loaded(pod("p", "prefill", prefill.address.port, status=READY)))
        api.put("pods", decode_pod("d", decode.address.port))
        async with following(api, tmp_path) as router:
            await until(lambda: router.router.fleet.ready() and api.watching == EVERYTHING)
            assert (await router.post(json=BODY)).status == 200

            api.put("pods", decode_pod("new", new.address.port))
            api.put("pods", loaded(pod("d", "decode", decode.address.port, status=READY.replace("True", "False"))))
            await until(lambda: ports(router) == sorted([prefill.address.port, new.address.port]))
            await until(router.router.fleet.ready)
            assert (await router.post(json=BODY)).status == 200

            api.delete("modelroutes", "dev", "kimi-k25")
            await until(lambda: router.router.served is not None and not router.router.served.models())
            assert (await router.post(json=BODY)).status == 404

    assert len(decode.seen) == len(new.seen) == 1
    assert sorted(one for one in api.calls if "watch" not in one) == [
        "/api/v1/pods",
        "/apis/networking.serving.volcano.sh/v1alpha1/modelroutes",
        "/apis/networking.serving.volcano.sh/v1alpha1/modelservers",
    ]


async def test_a_watch_that_ends_goes_on_where_it_was(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        api.put("modelservers", loaded(SERVER))
        async with following(api, tmp_path) as router:
            await until(lambda: api.watching == EVERYTHING)
            api.put("pods", decode_pod("a", 1))
            api.bookmark("pods")
            await until(lambda: ports(router) == [1])
            api.cut()
            api.put("pods", decode_pod("b", 2))
            await until(lambda: ports(router) == [1, 2])

    assert api.calls.count("/api/v1/pods") == 1


async def test_what_the_server_has_forgotten_is_listed_anew(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        api.put("modelservers", loaded(SERVER))
        api.put("pods", decode_pod("a", 1))
        async with following(api, tmp_path) as router:
            await until(lambda: api.watching == EVERYTHING and ports(router) == [1])
            del api.objects["pods"]["dev", "a"]  # nobody is told
            api.put("pods", decode_pod("b", 2))
            api.forget()
            await until(lambda: ports(router) == [2])

    assert api.calls.count("/api/v1/pods") == 2


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        api.page = 2
        api.put("modelservers", loaded(SERVER))
        for port in range(1, 6):
            api.put("pods", decode_pod(f"p{port}", port))
        async with following(api, tmp_path) as router:
            await until(lambda: ports(router) == [1, 2, 3, 4, 5])

    assert api.calls.count("/api/v1/pods") == 3


async def test_what_is_known_is_served_while_the_server_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeApiServer() as api, FakeEngine() as decode:
        api.put("modelservers", loaded(SERVER))
        api.put("modelroutes", loaded(ROUTE))
        api.put("pods", decode_pod("d", decode.address.port))
        async with following(api, tmp_path) as router:
            await until(lambda: router.router.fleet.ready() and api.watching == EVERYTHING)
            api.broken = 3
            api.cut()
            await until(lambda: "it answers 500" in caplog.text)
            assert (await router.post(json=BODY)).status == 200
            await until(lambda: api.watching == EVERYTHING)

    assert ports(router) == [decode.address.port]


async def test_an_object_that_is_wrong_counts_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeApiServer() as api:
        api.put("modelservers", loaded(SERVER))
        api.put("modelroutes", loaded(ROUTE.replace("modelName: kimi-k25", "modelName: ''")))
        api.put("pods", decode_pod("a", 1))
        async with following(api, tmp_path) as router:
            await until(lambda: api.watching == EVERYTHING and ports(router) == [1])
            api.put("modelservers", loaded(SERVER.replace("port: 7100", "port: 0")))
            await until(lambda: "spec.workloadPort.port: Expected `int` >= 1" in caplog.text)
            api.put("pods", decode_pod("b", 2))
            await until(lambda: ports(router) == [1, 2])

            wrong = decode_pod("d", 4)
            wrong["metadata"]["annotations"][PORT_ANNOTATION] = "0" * 8 + "100000"
            api.put("pods", wrong)
            await until(lambda: "expected a port from 1 to 65535" in caplog.text)
            api.put("pods", decode_pod("c", 3))
            await until(lambda: ports(router) == [1, 2, 3])

    assert caplog.text.count("ModelRoute kimi-k25: spec: a ModelRoute needs modelName, loraAdapters or both") == 1


async def test_a_server_that_wants_another_protocol_is_left_out_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secured = SERVER.replace("port: 7100", "port: 7100\n    protocol: https").replace(
        "name: kimi-k25-pd", "name: other", 1
    )
    async with FakeApiServer() as api:
        api.put("modelservers", loaded(SERVER))
        api.put("modelservers", loaded(secured))
        api.put("pods", decode_pod("a", 1))
        async with following(api, tmp_path) as router:
            await until(lambda: ports(router) == [1])
            api.put("pods", decode_pod("b", 2))
            await until(lambda: ports(router) == [1, 2])
            assert {tuple(one.groups) for one in router.instances()} == {("dev/kimi-k25-pd",)}

    assert caplog.text.count("ModelServer dev/other: spec.workloadPort.protocol is https, the router does not") == 1


async def test_a_token_that_is_replaced_is_read_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text("token-1\n")
    async with FakeApiServer() as api:
        api.put("modelservers", loaded(SERVER))
        async with following(api, tmp_path, user={"tokenFile": "token"}, namespace="dev") as router:
            await until(lambda: api.watching == EVERYTHING)
            api.token = "token-2"
            api.cut()
            await until(lambda: "it answers 401: it does not accept the token" in caplog.text)
            (tmp_path / "token").write_text("token-2\n")
            router.router.reload()
            await until(lambda: api.watching == EVERYTHING)

    assert "/api/v1/namespaces/dev/pods" in api.calls
    assert "token-" not in caplog.text


@pytest.mark.parametrize("signed_by", ["authority", "other"])
async def test_the_server_and_the_router_prove_who_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, signed_by: str
) -> None:
    """With the authority and a client's certificate of the kubeconfig; another authority's server is not believed."""
    authority, _ = Authority(tmp_path), Authority(tmp_path, "other")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
    tls.load_cert_chain(*authority.sign("server"))
    tls.verify_mode = ssl.CERT_REQUIRED
    certificate, key = authority.sign("client")
    user = {"token": "token-1", "client-certificate": certificate, "client-key": key}
    async with FakeApiServer(tls) as api:
        api.put("modelservers", loaded(SERVER))
        api.put("pods", decode_pod("a", 1))
        place = kubeconfig(tmp_path, api.url, authority=f"{signed_by}.pem", **user)
        async with running(cluster=ClusterAccess(kubeconfig=place)) as router:
            if signed_by == "other":
                await until(lambda: "certificate verify failed" in caplog.text)
            else:
                await until(lambda: ports(router) == [1])

    assert bool(api.calls) is (signed_by == "authority")


async def test_a_server_that_talks_nonsense_is_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeApiServer() as api:
        api.put("modelservers", loaded(SERVER))
        api.put("pods", decode_pod("a", 1))
        api.nonsense = 3
        async with following(api, tmp_path) as router:
            await until(lambda: ports(router) == [1])

    assert caplog.text.count("The API server did not give") == 3
