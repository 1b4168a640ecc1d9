"""What a node shows over HTTP, and that nothing else can be done there."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import resource
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from uvicorn import Config
from uvicorn.server import ServerState

from ems.pool.client.answers import Namespace
from ems.pool.http import server
from ems.pool.http.server import PAUSE_SECONDS, Exchange, Paced
from ems.pool.node.client_limits import MAX_HTTP
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.metric_rules import broken_rules
from tests.pool.brain import chain
from tests.pool.conftest import PAGE
from tests.pool.tenants.people import ANN, registry_of, save

pytestmark = pytest.mark.process

BEARER = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a node that holds three pages."""
    token = tmp_path_factory.mktemp("http") / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    flags = ["--size", "1MB", "--segment-size", "256KB", "--http-port", "0", "--http-token-file", str(token)]
    with NodeProcess(*flags) as node:
        node.wait_touched()
        client, namespace = node.client(), Namespace('a "quoted" \\ name', PAGE)
        client.commit(client.reserve(namespace, bytes(16), chain("x", 3)))
        client.lookup(namespace, b"".join(chain("x", 4)), lease=True)
        until(lambda: "http=http://" in node.log, "the node says where it serves HTTP")
        yield node.log.split("http=http://")[1].split()[0]
        client.close()


def get(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Status, content type and body of an answer."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get_content_type(), answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/health", "/livez"])
def test_it_lives(web: str, path: str) -> None:
    assert get(web, path)[0] == 200


def test_it_is_ready_and_says_what_it_checked(web: str) -> None:
    status, _, body = get(web, "/readyz")
    assert status == 200
    assert body.splitlines() == ["[+]socket ok", "[+]index ok"]


def test_it_says_its_version_and_its_figures(web: str) -> None:
    from ems import __version__

    assert json.loads(get(web, "/version")[2]) == {"version": __version__}
    figures = json.loads(get(web, "/status", **BEARER)[2])
    assert figures["leases"] == 1
    assert figures["counters"]["keys_hit"] == 3
    (row,) = json.loads(get(web, "/admin/list", **BEARER)[2])["items"]
    assert (row["pages"], row["leases"]) == (3, 1)
    assert json.loads(get(web, f"/admin/show?what={chain('x', 1)[0].hex()}", **BEARER)[2])["kind"] == "key"
    assert json.loads(get(web, "/admin/health", **BEARER)[2])["well"]


def test_metrics_are_in_the_usual_form(web: str) -> None:
    status, kind, body = get(web, "/metrics", **BEARER)
    assert (status, kind) == (200, "text/plain")
    samples = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in body.splitlines() if line[0] != "#"}
    assert samples["ems_pool_capacity_bytes"] == 1 << 20
    assert samples["ems_pool_used_bytes"] >= 3 * PAGE
    assert samples["ems_pool_clients"] == 1
    assert samples["ems_pool_keys_looked_up_total"] == 4
    assert samples["ems_pool_keys_hit_total"] == 3
    assert samples["ems_pool_pages_committed_total"] == 3
    assert samples["ems_pool_pages_evicted_total"] == 0
    assert samples['ems_pool_namespace_pages{namespace="a \\"quoted\\" \\\\ name"}'] == 3
    assert broken_rules(body, prefix="ems_") == []


@pytest.mark.parametrize("path", ["/", "/docs", "/metrics/../../etc/passwd"])
def test_nothing_else_is_there(web: str, path: str) -> None:
    assert get(web, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_cannot_be_written_to(web: str, method: str) -> None:
    assert get(web, "/status", method)[0] == 405


@pytest.mark.parametrize("token", ["", "the token"])
def test_a_node_with_tenants_shows_its_figures_to_bearers_of_its_token_only(tmp_path: Path, token: str) -> None:
    save(tmp_path / "tenants.json", registry_of(ANN))
    (tmp_path / "token").write_text(f"{token}\n")
    (tmp_path / "token").chmod(0o600)
    flags = ["--size", "1MB", "--http-port", "0", "--tenants", str(tmp_path / "tenants.json")]
    if token:
        flags += ["--http-token-file", str(tmp_path / "token")]
    with NodeProcess(*flags) as node:
        until(lambda: "http=http://" in node.log, "the node says where it serves HTTP")
        address = node.log.split("http=http://")[1].split()[0]
        for path in ("/metrics", "/status", "/admin/list", "/admin/health"):
            for given in ("", "Bearer ", "Bearer wrong", token):
                status, _, body = get(address, path, **({"Authorization": given} if given else {}))
                assert (status, "namespaces" in body) == (401, False)
                assert "bearers of the token" in body
            assert get(address, path, Authorization=f"Bearer {token}")[0] == (200 if token else 401)
        assert get(address, "/health")[0] == 200


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602], ids=oct)
def test_a_token_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(mode)
    node = NodeProcess("--size", "1MB", "--http-port", "0", "--http-token-file", str(tmp_path / "token"))
    with pytest.raises(AssertionError, match="can be read or changed by others"), node:
        pass


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n", b"GET /health HTTP/1.1\r\n\r\n"])
def test_who_connects_and_says_half_keeps_nobody_out(said: bytes) -> None:
    """More connections than the node may have open files: engines come in, and so does who asks something."""
    with NodeProcess("--size", "1MB", "--http-port", "0") as node, contextlib.ExitStack() as stack:
        until(lambda: "http=http://" in node.log, "the node says where it serves HTTP")
        host, _, port = node.log.split("http=http://")[1].split()[0].rpartition(":")
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (128, 128))
        for _ in range(200):
            half = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            half.sendall(said)
        client = node.client()
        stack.callback(client.close)
        client.connect()
        assert get(f"{host}:{port}", "/health")[0] == 200
        assert len(list(Path(f"/proc/{node.pid}/fd").iterdir())) < 100
        client.stats()


@pytest.mark.parametrize(
    "request_in_many_parts",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 50_000,
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a:b\r\n" * 10_000 + b"\r\n",
    ],
    ids=["chunks", "fields"],
)
def test_what_comes_in_thousands_of_parts_is_refused_before_these_are_read(request_in_many_parts: bytes) -> None:
    with NodeProcess("--size", "1MB", "--http-port", "0") as node:
        node.wait_touched()
        until(lambda: "http=http://" in node.log and "segments touched" in node.log, "the node says all that it has to")
        host, _, port = node.log.split("http=http://")[1].split()[0].rpartition(":")
        before = node.log
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                with contextlib.suppress(ConnectionError):  # it is closed before all of that was sent
                    connection.sendall(request_in_many_parts)
                with contextlib.suppress(ConnectionError):
                    assert connection.recv(1 << 10)[:13] in (b"HTTP/1.1 400 ", b"")
        assert get(f"{host}:{port}", "/health")[0] == 200
        assert node.log == before, "strangers fill no log"


async def test_requests_are_answered_one_after_the_other_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    refused: list[int] = []

    async def app(*_: object) -> None:
        return

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async def send(message: Any) -> None:
        if "status" in message:
            refused.append(message["status"])

    paced = Paced(app)  # type: ignore[arg-type] # no more of one than this
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 7.0)
    for _ in range(2 * MAX_HTTP):
        await paced({"type": "http"}, None, send)  # type: ignore[arg-type] # nobody sends it a body
    monkeypatch.undo()
    assert waited == pytest.approx([number * PAUSE_SECONDS for number in range(len(waited))])
    assert MAX_HTTP <= len(waited) <= MAX_HTTP + 1
    assert refused == [503] * (2 * MAX_HTTP - len(waited))


def exchanges(count: int) -> tuple[list[Exchange], list[int]]:
    """Connections that are waited for, and the numbers of those that were ended."""
    config = Config(PlainTextResponse(), log_config=None)
    config.load()
    waiting: dict[Exchange, None] = {}
    ended: list[int] = []
    made = [Exchange(waiting, config, ServerState()) for _ in range(count)]
    for number, one in enumerate(made):
        one.transport = SimpleNamespace(abort=partial(ended.append, number))  # type: ignore[assignment]
        one._waits()
    return made, ended


async def test_who_waited_longest_goes_for_who_comes() -> None:
    made, ended = exchanges(MAX_HTTP)
    made[0]._waits()
    assert ended == []
    more, _ = exchanges(1)
    more[0]._waiting = made[0]._waiting
    more[0]._waits()
    assert ended == [1]
    for one in [*made, *more]:
        one._forget()


async def test_who_takes_too_long_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "EXCHANGE_SECONDS", 0.0)
    made, ended = exchanges(3)
    made[1]._forget()
    for _ in range(10):
        await asyncio.sleep(0)
    assert sorted(ended) == [0, 2]
    assert not made[0]._waiting
