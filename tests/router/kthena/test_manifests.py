"""What is read out of manifests, and the sentence for what is wrong in one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import ConfigError
from ems.router.admission.limits import Unit
from ems.router.fleet import Role
from ems.router.handoff.kinds import HandoffKind
from ems.router.kthena.catalogue import Catalogue
from ems.router.kthena.manifests import read
from ems.router.kthena.objects import ModelRoute, ModelServer, ObjectName, Pod, TrafficPolicy, parse_duration
from tests.router.kthena.manifests import ROUTE, SERVER, SERVING, documents, pod


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read({"a.yaml": text})
    return str(refused.value)


def test_defaults_are_those_of_kthena() -> None:
    [server, route] = read(
        {"a.yaml": documents(SERVER, ROUTE.replace("spec:", "spec:\n  rateLimit: {inputTokensPerUnit: 5}"))}
    ).objects

    assert isinstance(server, ModelServer)
    assert isinstance(route, ModelRoute)
    assert server.spec.workload_port.protocol == "http"
    assert server.spec.traffic_policy.seconds == 10
    assert route.spec.rules[0].target_models[0].weight == 100
    assert route.spec.rate_limit is not None
    assert (route.spec.rate_limit.input_tokens_per_unit, route.spec.rate_limit.unit) == (5, Unit.SECOND)


@pytest.mark.parametrize(
    ("engine", "connector", "kind"),
    [
        ("vLLM", "kvConnector: {type: nixl}", HandoffKind.NIXL),
        ("vLLM", "", HandoffKind.NIXL),  # what the pool's connector takes too
        ("vLLM", "kvConnector: {}", HandoffKind.HTTP),
        ("SGLang", "", HandoffKind.SGLANG),
        ("SGLang", "kvConnector: {}", HandoffKind.HTTP),  # the default of the API server applies
        ("SGLang", "kvConnector: {type: mooncake}", HandoffKind.MOONCAKE),
    ],
)
def test_the_engine_implies_its_handoff_unless_one_is_written(engine: str, connector: str, kind: HandoffKind) -> None:
    alone = SERVER[: SERVER.index("    pdGroup:")] + SERVER[SERVER.index("  workloadPort:") :]
    text = alone.replace("kvConnector:\n    type: nixl", connector).replace("vLLM", engine)
    [server] = read({"a.yaml": text}).objects

    assert isinstance(server, ModelServer)
    assert server.spec.handoff is kind


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("port: 7100", "port: 70000", "spec.workloadPort.port: Expected `int` <= 65535"),
        ("port: 7100", "prot: 7100", "spec.workloadPort: there is an unknown field `prot`"),
        ("inferenceEngine: vLLM", "inferenceEngine: TGI", "spec.inferenceEngine: Invalid enum value 'TGI'"),
        ("  inferenceEngine: vLLM\n", "", "spec: there is no required field `inferenceEngine`"),
        ("role: prefill", "role: 1", "spec.workloadSelector.pdGroup.prefillLabels[...]: Expected `str`, got `int`"),
        ("timeout: 10s", "timeout: 10", "spec.trafficPolicy.timeout: Expected `str | null`, got `int`"),
        ("timeout: 10s", "timeout: soon", "spec.trafficPolicy: 'soon' is no duration: expected one such as 10s"),
        ("timeout: 10s", "timeout: 0s", "spec.trafficPolicy: timeout is 0"),
        ("timeout: 10s", "retry: {retryInterval: 1}", "spec.trafficPolicy.retry.retryInterval: Expected `str`"),
        ("type: nixl", "type: sglang", "spec.kvConnector: type sglang cannot be written"),
        ("name: kimi-k25-pd\n", "name: Kimi\n", "ModelServer Kimi: metadata.name: Expected `str` matching regex"),
    ],
)
def test_what_is_wrong_in_a_model_server_is_named(written: str, instead: str, said: str) -> None:
    assert written in SERVER
    message = refusal(SERVER.replace(written, instead, 1))

    assert message.startswith("a.yaml: ModelServer ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("  modelName: kimi-k25\n", "", "spec: a ModelRoute needs modelName, loraAdapters or both"),
        ("  modelName: kimi-k25\n", "  loraAdapters: ['']\n", "spec.loraAdapters[0]: Expected `str` of length >= 1"),
        ("- name: default", "- modelMatch: {uri: {}}", "a match needs exact, prefix or regex"),
        ("- name: default", "- modelMatch: {uri: {regex: '(?=a)'}}", "is no regular expression of RE2"),
        ("- name: default", "- modelMatch: {url: {exact: a}}", "modelMatch: there is an unknown field `url`"),
        ("kimi-k25-pd\n", "kimi-k25-pd\n          weight: 101\n", "targetModels[0].weight: Expected `int` <= 100"),
        ("kimi-k25-pd\n", "kimi-k25-pd\n          weight: 0\n", "spec.rules[0]: the weights of targetModels are all 0"),
        ("modelServerName", "externalModelProviderName", "this router serves no external providers"),
        ("modelServerName: kimi-k25-pd", "weight: 3", "a target needs either modelServerName or"),
        ("  rules:", "  rateLimit: {unit: week}\n  rules:", "spec.rateLimit.unit: Invalid enum value 'week'"),
    ],
)
def test_what_is_wrong_in_a_model_route_is_named(written: str, instead: str, said: str) -> None:
    assert written in ROUTE
    message = refusal(ROUTE.replace(written, instead, 1))

    assert message.startswith("a.yaml: ModelRoute kimi-k25: ")
    assert said in message


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
    manifests = read({"a.yaml": documents(config, SERVING, SERVER), "b.yaml": documents("", ROUTE)})

    assert [one.kind for one in manifests.objects] == ["ModelServer", "ModelRoute"]
    assert manifests.ignored == ("a.yaml: ignored what does not concern the router: 1 ConfigMap, 1 ModelServing",)


def test_a_field_without_a_value_is_not_there() -> None:
    written = SERVER.replace("trafficPolicy:\n    timeout: 10s", "trafficPolicy:").replace("type: nixl", "type:")
    empty = pod("p", "decode", 1).replace("spec:", "spec: null\n#").replace("  annotations:", "  annotations:\n  #")
    server, one = read({"a": documents(written, empty)}).objects

    assert isinstance(server, ModelServer)
    assert isinstance(one, Pod)
    assert server.spec.traffic_policy == TrafficPolicy()
    assert server.spec.handoff is HandoffKind.HTTP
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


READY = "  conditions: [{type: Ready, status: 'True', lastProbeTime: null}]"
UNREADY = "  conditions: [{type: PodScheduled, status: 'True'}, {type: Ready, status: 'False'}]"


def test_pods_become_instances_by_their_labels() -> None:
    both = pod("d1", "decode", 7103).replace("role: decode", "role: decode\n    also: prefill")
    texts = [
        SERVER,
        pod("p0", "prefill", 7100, status=READY),
        pod("d0", "decode", 7101, group="kimi-k25-pd-1"),
        both,
        pod("away", "decode", 7102, status=UNREADY),
        pod("leaving", "decode", 7104).replace("  labels:", "  deletionTimestamp: '2026-01-01T00:00:00Z'\n  labels:"),
        pod("other", "runtime", 7105),
        pod("alone", "decode", 7106).replace("    modelserving.volcano.sh/group-name: kimi-k25-pd-0\n", ""),
        pod("elsewhere", "decode", 7107).replace("namespace: dev", "namespace: prod"),
        pod("waits", "decode", 7108).replace("podIP: 127.0.0.1", "phase: Pending"),
    ]
    catalogue = Catalogue(read({"a.yaml": documents(*texts)}).objects)
    [serving] = catalogue.servings.values()

    assert [(one.role, one.address.port, one.group) for one in serving.members] == [
        (Role.DECODE, 7101, "kimi-k25-pd-1"),
        (Role.DECODE, 7103, "kimi-k25-pd-0"),
        (Role.PREFILL, 7100, "kimi-k25-pd-0"),
    ]


def test_a_pod_with_the_labels_of_both_roles_decodes() -> None:
    server = SERVER.replace("modelserving.volcano.sh/role: prefill", "modelserving.volcano.sh/name: kimi-k25-pd")
    catalogue = Catalogue(
        read({"a.yaml": documents(server, pod("d", "decode", 7100), pod("p", "prefill", 7101))}).objects
    )
    [serving] = catalogue.servings.values()

    assert [(one.role, one.address.port) for one in serving.members] == [(Role.DECODE, 7100), (Role.PREFILL, 7101)]


def test_a_pod_without_a_port_of_its_own_has_that_of_its_server() -> None:
    text = pod("d", "decode", 1).replace('  annotations: {ems.router/port: "1"}\n', "")
    [serving] = Catalogue(read({"a.yaml": documents(SERVER, text)}).objects).servings.values()

    assert [one.address.port for one in serving.members] == [7100]


def test_the_model_of_a_route_cannot_change() -> None:
    before = Catalogue(read({"a.yaml": ROUTE}).objects)
    changed = read({"a.yaml": ROUTE.replace("modelName: kimi-k25", "modelName: kimi-k3")}).objects

    with pytest.raises(ConfigError, match=r"ModelRoute dev/kimi-k25: spec\.modelName is 'kimi-k3' and was 'kimi-k25'"):
        Catalogue(changed, before)
    assert Catalogue(changed).routes.names() == ["kimi-k3"]


def test_what_is_probably_not_meant_is_noted() -> None:
    gateway = ROUTE.replace("name: kimi-k25\n  namespace", "name: other\n  namespace").replace(
        "spec:", "spec:\n  parentRefs: [{name: g}]"
    )
    notes = Catalogue(
        read({"a.yaml": documents(SERVER, gateway, ROUTE.replace("kimi-k25-pd", "kimi"))}).objects
    ).notes()

    assert notes == [
        "ModelRoute dev/other has parentRefs and is left out: this router is no gateway",
        "ModelRoute dev/kimi-k25 names the ModelServer dev/kimi, which is not there",
        "ModelServer dev/kimi-k25-pd selects no pod: requests for it are refused until one is ready",
    ]
    prefill = Catalogue(read({"a.yaml": documents(SERVER, pod("p", "prefill", 1))}).objects).notes()
    assert prefill == [
        "ModelServer dev/kimi-k25-pd selects no pod that decodes: requests for it are refused until one is ready"
    ]


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
