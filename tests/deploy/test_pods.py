"""What the pods need is there: ports of probes, volumes, secrets, networks, users, images."""

from __future__ import annotations

import itertools

import pytest

from tests.deploy.rendered import ALL, EXAMPLES, KUBERNETES, OVERLAYS, Manifest, node_of, of_kind, pods, render

SECRETS = {
    "ems-tenants": {"tenants.json"},
    "ems-http-token": {"token"},
    "ems-cluster-seal": {"seal.key"},
    "ems-tenant-default": {"access-id", "access-key"},
}
"""What secrets.sh makes for the tenant "default"."""
ROOT_MAY = {"ems-node"}
"""Workloads that run as root, and why is said there."""


def containers(folder: str) -> list[tuple[Manifest, Manifest]]:
    return [(pod, container) for pod in pods(folder) for container in pod["spec"]["containers"]]


@pytest.mark.parametrize("folder", ALL)
def test_probes_ask_a_port_that_the_container_has(folder: str) -> None:
    for _, container in containers(folder):
        ports = {port["name"] for port in container["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports


@pytest.mark.parametrize("folder", ALL)
def test_volumes_and_mounts_match_and_maps_are_there(folder: str) -> None:
    maps = {one["metadata"]["name"]: one["data"] for one in of_kind(folder, "ConfigMap")}
    claims = {
        claim["metadata"]["name"]
        for one in of_kind(folder, "StatefulSet")
        for claim in one["spec"]["volumeClaimTemplates"]
    }
    for pod, container in containers(folder):
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts - claims == volumes.keys()
        for mount in container["volumeMounts"]:
            if "configMap" in volumes.get(mount["name"], {}):
                assert mount["subPath"] in maps[volumes[mount["name"]]["configMap"]["name"]]


@pytest.mark.parametrize("folder", ALL)
def test_secrets_are_those_that_the_script_makes_and_none_is_in_the_manifests(folder: str) -> None:
    assert of_kind(folder, "Secret") == []
    for pod, container in containers(folder):
        for volume in pod["spec"].get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["secretName"] in SECRETS
        for variable in container.get("env", []):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert reference["key"] in SECRETS[reference["name"]]


@pytest.mark.parametrize("folder", ALL)
def test_selectors_select_the_pods_of_their_own(folder: str) -> None:
    labels = [pod["metadata"]["labels"].items() for pod in pods(folder)]
    for one in of_kind(folder, "Service"):
        assert sum(one["spec"]["selector"].items() <= items for items in labels) == 1
    for one in of_kind(folder, "DaemonSet", "Deployment", "StatefulSet", "PodDisruptionBudget"):
        assert sum(one["spec"]["selector"]["matchLabels"].items() <= items for items in labels) == 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_open_ports_that_pods_have_and_cover_every_pod(overlay: str) -> None:
    folder = f"overlays/{overlay}"
    policies = of_kind(folder, "NetworkPolicy")
    for pod in pods(folder):
        labels = pod["metadata"]["labels"].items()
        assert any(one["spec"]["podSelector"]["matchLabels"].items() <= labels for one in policies)
    ports = {port["name"] for _, container in containers(folder) for port in container["ports"]} | {53}
    for one in policies:
        rules = itertools.chain(one["spec"]["ingress"], one["spec"]["egress"])
        opened = {port["port"] for rule in rules for port in rule.get("ports", [])}
        assert opened <= ports


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_ours_runs_with_as_few_rights_as_it_can(overlay: str) -> None:
    for pod, container in containers(f"overlays/{overlay}"):
        own, of_pod = container["securityContext"], pod["spec"]["securityContext"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert "privileged" not in own
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert of_pod.get("runAsNonRoot", False) or pod["metadata"]["labels"]["app.kubernetes.io/name"] in ROOT_MAY
        assert pod["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("folder", ALL)
def test_every_container_is_limited_and_its_image_has_a_release(folder: str) -> None:
    for _, container in containers(folder):
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        _, _, tag = container["image"].rpartition(":")
        assert tag
        assert tag != "latest"
        assert "/" in container["image"]


def test_engines_and_nodes_meet_at_one_socket() -> None:
    spec, _ = node_of("cpu")
    (place,) = (one["hostPath"]["path"] for one in spec["volumes"] if one["name"] == "socket")
    for example in (one for one in EXAMPLES if one != "router"):
        for pod, container in containers(f"examples/{example}"):
            variables = {one["name"]: one.get("value") for one in container["env"]}
            assert variables["EMS_SOCKET"] == f"{place}/node.sock"
            assert place in {one.get("hostPath", {}).get("path") for one in pod["spec"]["volumes"]}


@pytest.mark.parametrize("overlay", ["ascend", "cce"])
def test_hosts_with_npus_bring_their_network_and_its_file(overlay: str) -> None:
    spec, container = node_of(overlay)
    assert spec["hostNetwork"] is True
    assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "/etc/hccn.conf" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_cce_asks_for_as_many_npus_as_it_limits() -> None:
    for _, container in containers("examples/vllm-cce"):
        resources = container["resources"]
        assert resources["limits"]["huawei.com/ascend-1980"] == resources["requests"]["huawei.com/ascend-1980"] == "8"


def test_every_folder_of_manifests_is_rendered() -> None:
    """A base or a component that no overlay uses would be checked by nobody."""
    assert {one.parent.name for one in KUBERNETES.glob("*/kustomization.yaml")} == {"node", "cluster"}
    names = {one["metadata"]["name"] for one in render("overlays/cpu")}
    assert {"ems-node", "ems-master", "ems-etcd"} <= names
