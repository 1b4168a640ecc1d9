"""What is read out of manifests, and the sentence for what is none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import ConfigError
from ems.kthena.networking import KvConnector, ModelServer, TrafficPolicy
from ems.kubernetes.objects import ObjectName, Pod, parse_duration
from ems.router.kthena.objects import EnginePod
from tests.router.kthena.manifests import ROUTE, SERVER, SERVING, documents, pod, read


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read({"a.yaml": text})
    return str(refused.value)


BOMB = "".join(f"a{at}: &a{at} [*a{at - 1}, *a{at - 1}]\n" for at in range(1, 41))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "a.yaml is no YAML: "),
        ("- 1", "a.yaml: a document is no object"),
        ("a: 1", "a.yaml: a document has no kind or no apiVersion"),
        ("apiVersion: v1\na: &a0 [0, 0]\n" + BOMB + "kind: *a40", "a.yaml is no YAML: its aliases repeat too much"),
        ("a: &a {b: *a}", "a.yaml is no YAML: its aliases repeat too much"),
        ("a: !!bool x", "a.yaml is no YAML: "),
        ("a: &a [*a]\nb: !!python/object:os.system {}", "a.yaml is no YAML: "),
        (SERVER.replace("v1alpha1", "v1"), "a.yaml: ModelServer has apiVersion"),
        (documents(SERVER, SERVER), "a.yaml: ModelServer dev/kimi-k25-pd is there twice: it also stands in a.yaml"),
        (pod("p", "prefill", 0), "a.yaml: Pod p: ems.router/port is '0', expected a port from 1 to 65535"),
    ],
)
def test_what_is_no_manifest_is_said(text: str, said: str) -> None:
    assert refusal(text).startswith(said)


def test_other_kinds_are_ignored_with_one_line_a_file() -> None:
    config = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: scripts}\ndata: {prefill.sh: 'exit 1'}"
    found = read({"a.yaml": documents(config, SERVING, SERVER), "b.yaml": documents("", ROUTE)})

    assert [one.kind for one in found.objects] == ["ModelServer", "ModelRoute"]
    assert found.ignored == ("a.yaml: 1 ConfigMap, 1 ModelServing",)


def test_a_field_without_a_value_is_not_there() -> None:
    written = SERVER.replace("trafficPolicy:\n    timeout: 10s", "trafficPolicy:").replace("type: nixl", "type:")
    empty = pod("p", "decode", 1).replace("spec:", "spec: null\n#").replace("  annotations:", "  annotations:\n  #")
    server, one = read({"a": documents(written, empty)}).objects

    assert isinstance(server, ModelServer)
    assert isinstance(one, EnginePod)
    assert server.spec.traffic_policy == TrafficPolicy()
    assert server.spec.kv_connector == KvConnector()
    assert one.port is None


def test_a_list_as_kubectl_prints_it_is_its_items() -> None:
    items = "\n".join("  " + line for line in pod("p", "decode", 7100).strip().splitlines())
    text = f"apiVersion: v1\nkind: List\nitems:\n-{items[1:]}"
    [one] = read({"pods.yaml": text}).objects

    assert isinstance(one, Pod)
    assert one.key == ObjectName("dev", "p")


def test_texts_that_look_like_dates_stay_texts() -> None:
    text = pod("p", "decode", 7100).replace(
        "  labels:", "  creationTimestamp: 2026-01-01T00:00:00Z\n  labels:\n    day: 2026-01-01"
    )
    [one] = read({"a.yaml": text}).objects

    assert one.metadata.labels["day"] == "2026-01-01"
    assert one.metadata.creation_timestamp is not None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10s", 10), ("1m30s", 90), ("100ms", 0.1), ("1.5h", 5400), ("0", 0), ("2us", 2e-6), ("1h0m1s", 3601)],
)
def test_durations_are_read_as_go_writes_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@given(st.text("0123456789.smhnu -+e", max_size=8))
def test_what_is_no_duration_is_refused(text: str) -> None:
    said = ""
    try:
        assert parse_duration(text) >= 0
    except ValueError as error:
        said = str(error)
    assert not said or "is no duration" in said


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["spec", "metadata", "rules", "name"]), inner, max_size=3)
    ),
)


@given(_json, st.sampled_from(["ModelServer", "ModelRoute", "Pod", "List"]))
def test_whatever_stands_in_a_file_is_read_or_refused_with_a_sentence(value: object, kind: str) -> None:
    version = "v1" if kind in ("Pod", "List") else "networking.serving.volcano.sh/v1alpha1"
    text = msgspec.json.encode({"apiVersion": version, "kind": kind, "metadata": value, "spec": value, "items": value})
    said = "a.yaml"
    try:
        read({"a.yaml": text.decode()})
    except ConfigError as error:
        said = str(error)
    assert said.startswith("a.yaml")
