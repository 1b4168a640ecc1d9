from __future__ import annotations

import pytest

from ems.engines.handoff import HandoffKind
from ems.errors import ConfigError
from ems.kthena.networking import ModelServer
from ems.router.fleet import Role
from ems.router.kthena.catalogue import Catalogue
from ems.router.kthena.objects import handoff_of
from tests.router.kthena.manifests import ROUTE, SERVER, documents, pod, read


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
    assert handoff_of(server.spec) is kind


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
