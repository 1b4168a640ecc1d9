from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ems.kthena.networking import NETWORKING, ModelRoute
from ems.kubernetes.mirror import Mirror, WatchExpired
from ems.kubernetes.objects import ObjectName, Pod, Resource
from tests.router.kthena.manifests import ROUTE

ROUTES = Resource("modelroutes", NETWORKING, "ModelRoute", ModelRoute)
PODS = Resource("pods", "v1", "Pod", Pod)
RESOURCES = (ROUTES, PODS)

_events = st.lists(
    st.tuples(st.sampled_from(["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "list"]), st.integers(0, 3), st.booleans()),
    max_size=20,
)


@given(_events)
def test_the_mirror_has_the_last_right_state_of_every_object(events: list[tuple[str, int, bool]]) -> None:
    mirror, expected = Mirror(RESOURCES), dict[str, str]()
    mirror.listed(ROUTES, [])
    wrong: set[str] = set()
    for step, (kind, number, right) in enumerate(events):
        name = f"r{number}"
        one = yaml.safe_load(ROUTE.replace("modelName: kimi-k25", f"modelName: {f'm{step}' if right else '{}'}"))
        one["metadata"] = {"name": name, "resourceVersion": str(step)}
        if kind == "list":
            mirror.listed(ROUTES, [one])
            expected = {name: f"m{step}"} if right else {key: value for key, value in expected.items() if key == name}
            wrong = set() if right else {name}
        else:
            assert mirror.event(ROUTES, {"type": kind, "object": one}) == str(step)
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
    mirror = Mirror(RESOURCES)
    mirror.listed(PODS, [])

    with pytest.raises(WatchExpired):
        mirror.event(PODS, event)
    assert ObjectName("a", "b") not in [one.key for one in mirror.objects()]
