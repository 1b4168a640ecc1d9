"""Objects that are followed on an API server: lists, watches, and what goes wrong with them."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import ConfigError
from ems.router.config import ClusterAccess
from ems.router.kthena.credentials import of_kubeconfig, of_pod
from ems.router.kthena.mirror import Mirror, WatchExpired
from ems.router.kthena.objects import PORT_ANNOTATION, ModelRoute, ObjectName
from tests.router.admission.certificates import Authority
from tests.router.fakes import FakeEngine, Running, prefilled, running, until
from tests.router.kthena.api import FakeApiServer
from tests.router.kthena.manifests import ROUTE, SERVER, pod

READY = "  conditions: [{type: Ready, status: 'True'}]"
BODY = {"model": "kimi-k25", "prompt": "hello"}
EVERYTHING = {"modelservers", "modelroutes", "pods"}


def loaded(text: str) -> dict[str, Any]:
    one: dict[str, Any] = yaml.safe_load(text)
    return one


def kubeconfig(folder: Path, url: str, *, authority: str | None = None, **user: Any) -> str:
    path = folder / "config"
    path.write_text(
        json.dumps(
            {
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority": authority}}],
                "users": [{"name": "u", "user": user or {"token": "token-1"}}],
            }
        )
    )
    return str(path)


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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"users": [{"name": "u", "user": {"exec": {}}}]}, "the user signs in by 'exec'"),
        ({"clusters": []}, "has no cluster 'c' under clusters"),
        ({"contexts": None}, "has no context 'here' under contexts"),
        ({"clusters": [{"name": "c", "cluster": {"server": "c"}}]}, "the cluster has the server 'c': expected a URL"),
        ({"users": [{"name": "u", "user": {"client-key-data": "?"}}]}, "client-key-data is not in base64"),
        ({"users": [{"name": "u", "user": {"client-key": "none"}}]}, "Cannot read the client-key"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = Path(kubeconfig(tmp_path, "https://c"))
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    with pytest.raises(ConfigError) as refused:
        of_kubeconfig(str(path))
    assert said in str(refused.value)


def test_certificates_may_stand_in_the_kubeconfig(tmp_path: Path) -> None:
    text = base64.b64encode(b"pem").decode()
    user = {"client-certificate-data": text, "client-key-data": text, "token": "t"}
    credentials = of_kubeconfig(kubeconfig(tmp_path, "https://c/", **user))

    assert (credentials.server, credentials.client) == ("https://c", (b"pem", b"pem"))
    assert credentials.headers() == {"Authorization": "Bearer t"}
    with pytest.raises(ConfigError, match="The certificates for https://c make no sense"):
        credentials.tls()


def test_a_pod_finds_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="this is no pod with a service account"):
        of_pod(tmp_path)
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_text("pem")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    credentials = of_pod(tmp_path)

    assert (credentials.server, credentials.authority) == ("https://[fd00::1]:6443", "pem")
    assert credentials.headers() == {"Authorization": "Bearer t"}


_events = st.lists(
    st.tuples(st.sampled_from(["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "list"]), st.integers(0, 3), st.booleans()),
    max_size=20,
)


@given(_events)
def test_the_mirror_has_the_last_right_state_of_every_object(events: list[tuple[str, int, bool]]) -> None:
    mirror, expected = Mirror(), dict[str, str]()
    mirror.listed("modelroutes", [])
    wrong: set[str] = set()
    for step, (kind, number, right) in enumerate(events):
        name = f"r{number}"
        one = loaded(ROUTE.replace("modelName: kimi-k25", f"modelName: {f'm{step}' if right else '{}'}"))
        one["metadata"] = {"name": name, "resourceVersion": str(step)}
        if kind == "list":
            mirror.listed("modelroutes", [one])
            expected = {name: f"m{step}"} if right else {key: value for key, value in expected.items() if key == name}
            wrong = set() if right else {name}
        else:
            assert mirror.event("modelroutes", {"type": kind, "object": one}) == str(step)
            if kind == "DELETED":
                expected.pop(name, None)
                wrong.discard(name)
            elif kind != "BOOKMARK" and right:
                expected[name] = f"m{step}"
                wrong.discard(name)
            elif kind != "BOOKMARK":
                wrong.add(name)

        found = [one for one in mirror.objects() if isinstance(one, ModelRoute)]
        assert {one.metadata.name: one.spec.model_name for one in found} == expected
        assert len(mirror.problems) == len(wrong)
    assert not mirror.complete


@pytest.mark.parametrize("event", [None, {}, {"type": "ERROR", "object": {"code": 410}}, {"type": "ADDED"}])
def test_an_event_that_makes_no_sense_ends_the_watch(event: object) -> None:
    mirror = Mirror()
    mirror.listed("pods", [])

    with pytest.raises(WatchExpired):
        mirror.event("pods", event)
    assert ObjectName("a", "b") not in [one.key for one in mirror.objects()]
