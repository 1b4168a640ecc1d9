"""Which server a request goes to, beside a plain account of Kthena's rules."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.kthena.networking import NETWORKING, ModelRoute
from ems.kthena.routes import Routes
from ems.kubernetes.objects import decode
from ems.router.kthena.objects import RESOURCES


def route(name: str, *, created: int | None = None, **spec: Any) -> ModelRoute:
    spec.setdefault("rules", [{"targetModels": [{"modelServerName": name}]}])
    metadata = {"name": name} | ({} if created is None else {"creationTimestamp": f"2026-01-01T00:00:{created:02}Z"})
    made = decode(
        {"apiVersion": NETWORKING, "kind": "ModelRoute", "metadata": metadata, "spec": spec}, RESOURCES, source="test"
    )
    assert isinstance(made, ModelRoute)
    return made


def where(
    routes: Routes, model: str, path: str = "/v1/completions", headers: dict[str, str] | None = None, seed: int = 0
) -> str | None:
    target = routes.match(model, path, lambda name: (headers or {}).get(name, ""), random.Random(seed))
    return None if target is None else target.server.name


def test_the_oldest_route_of_a_model_counts_in_whatever_order_they_come() -> None:
    young, old, undated = (
        route("young", created=2, modelName="m"),
        route("old", created=1, modelName="m"),
        route("a", modelName="m"),
    )

    for order in ([young, old, undated], [undated, old, young]):
        assert where(Routes(order), "m") == "old"


def test_a_route_that_does_not_take_a_request_leaves_it_to_the_next() -> None:
    picky = route("picky", created=1, modelName="m", rules=[
        {"modelMatch": {"headers": {"X-Tier": {"exact": "premium"}}}, "targetModels": [{"modelServerName": "large"}]}
    ])  # fmt: skip
    routes = Routes([picky, route("plain", created=2, modelName="m")])

    assert where(routes, "m", headers={"x-tier": "premium"}) == "large"
    assert where(routes, "m", headers={"x-tier": "basic"}) == "plain"
    assert where(routes, "m") == "plain"
    assert where(routes, "n") is None


def test_adapters_are_matched_by_name_after_models() -> None:
    routes = Routes([route("base", modelName="m", loraAdapters=["a", "n"]), route("own", modelName="n")])

    assert (where(routes, "a"), where(routes, "n"), where(routes, "b")) == ("base", "own", None)
    for model, adapter in (("a", True), ("m", False), ("n", False)):
        target = routes.match(model, "/", lambda _: "", random.Random(0))
        assert target is not None
        assert target.adapter is adapter
    assert routes.names() == ["m", "n", "a"]


def test_a_route_of_a_gateway_takes_nothing() -> None:
    assert where(Routes([route("a", modelName="m", parentRefs=[{"name": "gateway"}])]), "m") is None


@pytest.mark.parametrize(
    ("match", "text", "taken"),
    [
        ({"exact": "a"}, "a", True),
        ({"exact": "a"}, "ab", False),
        ({"exact": "", "prefix": "x"}, "", True),
        ({"exact": "a", "regex": ".*"}, "b", False),
        ({"prefix": "a", "regex": "zzz"}, "ab", True),
        ({"regex": "b+"}, "abbc", True),
        ({"regex": "^b+$"}, "abbc", False),
        ({"regex": r"^\pL+$"}, "Ärger", True),
    ],
)
def test_exact_counts_before_prefix_and_prefix_before_regex(match: dict[str, str], text: str, taken: bool) -> None:
    rules = [{"modelMatch": {"headers": {"h": match}}, "targetModels": [{"modelServerName": "s"}]}]

    assert (where(Routes([route("r", modelName="m", rules=rules)]), "m", headers={"h": text}) is not None) is taken


def test_a_limit_has_the_scope_of_its_route() -> None:
    limited = route("r", modelName="m", rateLimit={"outputTokensPerUnit": 9, "unit": "minute"})
    target = Routes([limited]).match("m", "/", lambda _: "", random.Random(0))

    assert target is not None
    [(scope, limit)] = target.limits
    assert (scope, limit.output_tokens_per_unit) == ("route/default/r", 9)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=16).filter(any), st.randoms(use_true_random=False))
def test_weights_are_shares_of_their_sum(weights: list[int], draw: random.Random) -> None:
    targets = [{"modelServerName": f"s{index}", "weight": weight} for index, weight in enumerate(weights)]
    routes = Routes([route("r", modelName="m", rules=[{"targetModels": targets}])])
    rounds = 50
    found: Counter[str] = Counter()
    for _ in range(rounds):
        target = routes.match("m", "/", lambda _: "", draw)
        assert target is not None
        found[target.server.name] += 1

    assert all(weights[int(name[1:])] for name in found)


def test_weights_that_do_not_sum_to_a_hundred_are_normalised() -> None:
    targets = [{"modelServerName": "a", "weight": 50}, {"modelServerName": "b", "weight": 30}]
    routes, draw = Routes([route("r", modelName="m", rules=[{"targetModels": targets}])]), random.Random(7)
    found = Counter(str(routes.match("m", "/", lambda _: "", draw)) for _ in range(8000))

    assert sorted(found.values()) == pytest.approx([3000, 5000], rel=0.05)


_words = st.sampled_from(["", "a", "b", "ab", "ba"])
_matches = st.fixed_dictionaries({}, optional={"exact": _words, "prefix": _words, "regex": _words}).filter(bool)
_rules = st.lists(
    st.fixed_dictionaries(
        {"headers": st.dictionaries(st.sampled_from(["h", "I"]), _matches)},
        optional={"uri": _matches, "body": st.fixed_dictionaries({"model": _words})},
    ),
    min_size=1,
    max_size=3,
)
_routes = st.lists(
    st.tuples(
        st.sampled_from(["", "m", "n"]),
        st.lists(st.sampled_from(["m", "n", "l"]), max_size=2),
        _rules,
        st.integers(0, 59),
    ),
    max_size=4,
)


def _takes(match: dict[str, str], text: str) -> bool:
    if "exact" in match:
        return text == match["exact"]
    if "prefix" in match:
        return text.startswith(match["prefix"])
    return re.search(match["regex"], text) is not None


@given(_routes, st.sampled_from(["m", "n", "l"]), _words, st.dictionaries(st.sampled_from(["h", "i"]), _words))
def test_every_request_goes_where_a_plain_account_sends_it(
    drawn: list[tuple[str, list[str], list[dict[str, Any]], int]], model: str, path: str, headers: dict[str, str]
) -> None:
    made = []
    for index, (name, adapters, matches, created) in enumerate(drawn):
        if not name and not adapters:
            continue
        rules = [
            {"modelMatch": match, "targetModels": [{"modelServerName": f"s{index}-{place}"}]}
            for place, match in enumerate(matches)
        ]
        made.append(route(f"r{index}", created=created, modelName=name, loraAdapters=adapters, rules=rules))
    by_age = sorted(made, key=lambda one: (one.metadata.creation_timestamp, one.key))
    candidates = [one for one in by_age if one.spec.model_name == model] or [
        one for one in by_age if model in one.spec.lora_adapters
    ]
    expected = None
    for one in candidates:
        for rule in one.spec.rules:
            match: dict[str, Any] = msgspec.to_builtins(rule.model_match)
            plain = {key: {k: v for k, v in value.items() if v is not None} for key, value in match["headers"].items()}
            uri = {k: v for k, v in (match["uri"] or {}).items() if v is not None}
            if (
                expected is None
                and (not match["body"] or match["body"]["model"] in ("", model))
                and all(_takes(value, headers.get(key.lower(), "")) for key, value in plain.items())
                and (not uri or _takes(uri, path))
            ):
                expected = rule.target_models[0].model_server_name

    assert where(Routes(made), model, path, headers) == expected
