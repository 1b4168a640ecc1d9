"""What an administrator may look at over HTTP: the same as the verbs say, and nothing that changes something."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

import pytest

from ems.pool.administration.service import AdminService
from ems.pool.http.app import build_app
from ems.pool.protocol.acts import List, Show
from ems.pool.service.handling import Measured
from tests.pool.brain import PAGE, chain, core_of, save

if TYPE_CHECKING:
    from ems.pool.node.pool_node import Node

NAMES = "acme/model/01/0.0", "acme/model/01/0.1", "other/mo del/02/0.0"
TOKEN = "the token"
PAGES = ["/admin/list", "/admin/show", "/admin/health", "/status"]


class Held:
    """A node's brain with six pages; what it is asked is counted."""

    def __init__(self) -> None:
        self.core = core_of(4, 4, 4, 4)
        for count, name in enumerate(NAMES, 1):
            save(self.core, self.core.open_namespace(name, PAGE), chain(name, count))
        self.service = AdminService(self.core)
        self.measured = Measured(())
        self.admin = self.handler = self
        self.asked = 0
        self.ill: dict[str, object] = {}

    def figures(self) -> Mapping[str, Any]:
        self.asked += 1
        return {
            "pid": 1,
            "release": "1.0",
            "tiers": (),
            "clients": 0,
            "uptime_seconds": 0.0,
            **self.core.stats(),
            **self.ill,
        }

    def look(self, act: List | Show) -> Mapping[str, Any]:
        self.asked += 1
        return self.service.do(act, 7.0)


@pytest.fixture
def held() -> Held:
    return Held()


def get(
    held: Held,
    path: str,
    *,
    method: str = "GET",
    private: bool = False,
    token: str = TOKEN,
    given: str = f"Bearer {TOKEN}",
    **query: str,
) -> tuple[int, Any]:
    """Status of the answer, and its body: JSON by its keys, or a text."""
    headers = [(b"authorization", given.encode())] if given else []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": urlencode(query).encode(),
        "headers": headers,
    }
    sent: list[Any] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(build_app(cast("Node", held), private=private, token=token)(scope, receive, send))
    body = b"".join(one.get("body", b"") for one in sent)
    kind = dict(sent[0]["headers"]).get(b"content-type", b"")
    return sent[0]["status"], json.loads(body) if kind == b"application/json" else body.decode()


def test_the_list_says_what_the_pool_holds(held: Held) -> None:
    status, body = get(held, "/admin/list")
    assert status == 200
    assert [(row["namespace"], row["pages"]) for row in body["items"]] == [(NAMES[2], 3), (NAMES[1], 2), (NAMES[0], 1)]
    status, body = get(held, "/admin/list", by="tenant")
    assert [(row["tenant"], row["pages"], row["bytes"]) for row in body["items"]] == [
        ("acme", 3, 3 * PAGE),
        ("other", 3, 3 * PAGE),
    ]
    assert get(held, "/admin/list", by="colour") == (
        400,
        {"error": "by is 'colour', expected one of namespace, model, tenant"},
    )


def test_a_namespace_and_a_page_are_shown(held: Held) -> None:
    status, body = get(held, "/admin/show", what=NAMES[2])
    assert (status, body["kind"], body["model"]) == (200, "namespace", "mo del")
    (last,) = chain(NAMES[0], 1)
    status, body = get(held, "/admin/show", what=last.hex())
    assert (status, body["kind"]) == (200, "key")
    assert [(row["namespace"], row["state"]) for row in body["namespaces"]] == [(NAMES[0], "present")]


@pytest.mark.parametrize(
    ("what", "status", "sentence"),
    [
        ("", 400, "nothing is named"),
        ("nobody", 404, "nothing here is called"),
        ("x" * 2000, 404, "expected at most 1024"),
    ],
    ids=["nothing", "unknown", "too long"],
)
def test_what_is_not_there_is_said_in_a_sentence(held: Held, what: str, status: int, sentence: str) -> None:
    got, body = get(held, "/admin/show", what=what)
    assert got == status
    assert sentence in body["error"]
    assert not body["error"].endswith(".")


def test_health_is_a_status_for_scripts_too(held: Held) -> None:
    status, body = get(held, "/admin/health")
    assert (status, body["well"]) == (200, True)
    held.ill = {"draining": True}
    status, body = get(held, "/admin/health")
    assert (status, body["well"]) == (503, False)
    assert [check["name"] for check in body["checks"] if not check["well"]] == ["draining"]


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("token", ["", "the token"], ids=["no token", "a token"])
@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer wrong", "the token", "Bearer the tokenn"])
@pytest.mark.parametrize("private", [False, True], ids=["open", "tenants"])
def test_who_does_not_know_the_token_sees_nothing(held: Held, path: str, token: str, given: str, private: bool) -> None:
    status, body = get(held, path, private=private, token=token, given=given, what=NAMES[0])
    assert status == 401
    assert "bearers of the token" in body
    assert held.asked == 0


@pytest.mark.parametrize("path", PAGES)
def test_the_bearer_of_the_token_sees_it(held: Held, path: str) -> None:
    given = "Bearer the token"
    assert get(held, path, private=True, token="the token", given=given, what=NAMES[0])[0] == 200


@pytest.mark.parametrize("given", ["", "Bearer wrong"])
def test_metrics_without_the_token_have_figures_and_no_names(held: Held, given: str) -> None:
    status, body = get(held, "/metrics", given=given)
    assert status == 200
    assert "ems_pool_namespaces 3.0" in body
    assert not any(name in body for name in (*NAMES, "acme", "namespace=", "tier="))
    assert all(name in get(held, "/metrics")[1] for name in NAMES)
    assert get(held, "/metrics", given=given, private=True)[0] == 401


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(held: Held, path: str, method: str) -> None:
    assert get(held, path, method=method)[0] == 405
    assert held.asked == 0


async def test_metrics_cost_the_same_however_often_they_are_asked_for(held: Held) -> None:
    now = 0.0
    app = build_app(cast("Node", held), token=TOKEN, clock=lambda: now)

    async def ask(given: str) -> None:
        headers = [(b"authorization", given.encode())]
        scope = {"type": "http", "method": "GET", "path": "/metrics", "query_string": b"", "headers": headers}

        async def send(_: object) -> None:
            return

        await app(scope, None, send)  # type: ignore[arg-type] # nobody sends it a body

    for now in (0.0, 0.5, 0.9):  # noqa: B007 - the clock
        for _ in range(10):
            await ask("")
            await ask(f"Bearer {TOKEN}")
    assert held.asked == 2, "one page with names, one without"
    now = 1.0
    await ask("")
    assert held.asked == 3
