"""Which server a request goes to: Kthena's rules, by example and over random configurations."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.router.config import Address
from ems.router.fleet import Role
from ems.router.kthena.inventory import Place, places
from ems.router.kthena.objects import ModelRoute, ModelServer, Pod, StringMatch
from ems.router.kthena.routes import Routes
from tests.router.kthena.manifests import pod, route, server, with_metadata


def routes_of(*documents: dict[str, Any], servers: tuple[str, ...] = ("a", "b", "pair"), seed: int = 0) -> Routes:
    made = [msgspec.convert(one, ModelRoute) for one in documents]
    known = {f"default/{name}": msgspec.convert(server(name), ModelServer) for name in servers}
    return Routes({one.metadata.path: one for one in made}, known, random.Random(seed))


def found(routes: Routes, model: str, path: str = "/v1/completions", **headers: str) -> tuple[str, str] | None:
    target = routes.match(model, path, headers)
    return None if target is None else (target.server.removeprefix("default/"), target.model)


def rule(to: str, **match: Any) -> dict[str, Any]:
    return {"modelMatch": match, "targetModels": [{"modelServerName": to}]}


def test_a_model_is_renamed_and_an_adapter_is_not() -> None:
    routes = routes_of(route("asked", loraAdapters=["tuned"]))

    assert found(routes, "asked") == ("pair", "told")
    assert found(routes, "tuned") == ("pair", "tuned")
    assert found(routes, "other") is None
    assert routes.models == ["asked", "tuned"]


def test_a_name_that_is_a_model_is_no_adapter() -> None:
    routes = routes_of(route("x", "a"), with_metadata(route("y", "b", loraAdapters=["x"]), name="second"))

    assert found(routes, "x") == ("a", "told")


def test_the_first_rule_that_matches_counts() -> None:
    rules = [
        rule("a", headers={"X-Tier": {"exact": "premium"}}, uri={"prefix": "/v1/chat"}),
        rule("b", body={"model": "asked"}, headers={"x-tier": {"regex": "^p"}}),
        {"targetModels": [{"modelServerName": "pair"}]},
    ]
    routes = routes_of(route("asked", rules=rules))
    tier = "x-tier"

    assert found(routes, "asked", "/v1/chat/completions", **{tier: "premium"}) == ("a", "told")
    assert found(routes, "asked", "/v1/completions", **{tier: "premium"}) == ("b", "told")
    assert found(routes, "asked", "/v1/completions", **{tier: "basic"}) == ("pair", "told")


@pytest.mark.parametrize(
    ("match", "text", "matches"),
    [
        (StringMatch(exact="a", prefix="b"), "b", False),
        (StringMatch(prefix="a", regex="b"), "b", False),
        (StringMatch(regex="b"), "abc", True),
        (StringMatch(exact=""), "", True),
        (StringMatch(), "", False),
    ],
)
def test_exact_counts_before_prefix_before_regex(match: StringMatch, text: str, matches: bool) -> None:
    assert matches is match.matches(text)


def test_the_oldest_route_of_a_model_wins_and_one_without_a_server_gives_way() -> None:
    old = with_metadata(route("m", "gone"), name="old", creationTimestamp="2024-01-01T00:00:00Z")
    young = with_metadata(route("m", "a"), name="young", creationTimestamp="2025-01-01T00:00:00Z")
    younger = with_metadata(route("m", "b"), name="another", creationTimestamp="2025-01-02T00:00:00Z")

    assert found(routes_of(younger, young, old), "m") == ("a", "told")


def test_a_route_for_a_gateway_is_not_used() -> None:
    assert found(routes_of(route("m", "a", parentRefs=[{"name": "gateway"}])), "m") is None


def test_another_namespace_has_servers_of_its_own() -> None:
    assert found(routes_of(with_metadata(route("m", "a"), namespace="dev")), "m") is None


def test_weights_are_shares() -> None:
    targets = [{"modelServerName": name, "weight": weight} for name, weight in (("a", 50), ("b", 30), ("pair", 0))]
    routes = routes_of(route("m", targets))
    drawn = [found(routes, "m") for _ in range(8000)]

    assert ("pair", "told") not in drawn
    assert 0.60 < drawn.count(("a", "told")) / 8000 < 0.65


@given(
    st.lists(st.tuples(st.sampled_from("mn"), st.sampled_from(["a", "b", "gone"])), max_size=5), st.sampled_from("mno")
)
def test_a_target_is_always_of_a_route_of_the_model_and_there(given_routes: list[tuple[str, str]], model: str) -> None:
    documents = [with_metadata(route(name, to), name=f"r{place}") for place, (name, to) in enumerate(given_routes)]
    target = found(routes_of(*documents), model)
    there = [to for name, to in given_routes if name == model and to != "gone"]

    assert (target is None) == (not there)
    assert target is None or target[0] == there[0], "without a time the order is that of the names"


def test_pods_are_instances_by_their_labels() -> None:
    pods = [
        pod("p", "10.0.0.1", role="prefill", group="g0"),
        pod("d", "10.0.0.2", role="decode", group="g0"),
        pod("neither", "10.0.0.3", role="router"),
        pod("other", "10.0.0.4", "other", role="decode"),
        pod("starting", "10.0.0.5", role="decode", ready=False),
        pod("without", "", role="decode"),
        with_metadata(pod("leaving", "10.0.0.6", role="decode"), deletionTimestamp="2025-01-01T00:00:00Z"),
        with_metadata(pod("elsewhere", "10.0.0.7", role="decode"), namespace="dev"),
    ]
    made = [msgspec.convert(one, Pod) for one in pods]
    pair, whole = (msgspec.convert(server(group=group), ModelServer) for group in (True, False))

    assert [
        Place(Role.PREFILL, Address("10.0.0.1", 7100), "g0"),
        Place(Role.DECODE, Address("10.0.0.2", 7100), "g0"),
    ] == list(places(pair, made))
    assert [Place(Role.DECODE, Address(f"10.0.0.{n}", 7100), "") for n in (1, 2, 3)] == list(places(whole, made))


def test_a_pod_with_both_labels_decodes() -> None:
    spec = {
        "matchLabels": {"app": "pair"},
        "pdGroup": {"groupKey": "g", "prefillLabels": {"app": "pair"}, "decodeLabels": {"app": "pair"}},
    }
    made = msgspec.convert(server(workloadSelector=spec), ModelServer)
    [place] = places(made, [msgspec.convert(pod("x", "10.0.0.1"), Pod)])

    assert Role.DECODE is place.role
