"""Every object that the manifests render is one of Kubernetes, to the last field."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.rendered import ALL, Manifest, of_kind, pods, render

RELEASES = ("1.28", "1.37")
"""The oldest and the newest release of Kubernetes whose schemas they are held against."""
_OWN_RESOURCES = {"PodMonitor"}
_POD_MONITOR = {
    "spec": {"selector", "podMetricsEndpoints"},
    "podMetricsEndpoints": {"port", "path", "interval", "authorization"},
    "authorization": {"type", "credentials"},
    "credentials": {"name", "key"},
}
"""Fields of PodMonitor, whose schema comes with the Prometheus operator and not with Kubernetes."""


@pytest.mark.parametrize("release", [RELEASES[0], pytest.param(RELEASES[-1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("folder", ALL)
def test_every_object_fits_its_schema(folder: str, release: str) -> None:
    checked = 0
    for manifest in render(folder):
        if manifest["kind"] not in _OWN_RESOURCES:
            kubernetes_validate.validate(manifest, release, strict=True)
            checked += 1
    assert checked


def _unknown(pod: Manifest) -> None:
    pod["spec"]["hostPid"] = True


def _wrong_type(pod: Manifest) -> None:
    pod["spec"]["containers"][0]["ports"][0]["containerPort"] = "9410"


def _missing(pod: Manifest) -> None:
    del pod["spec"]["containers"][0]["name"]


@pytest.mark.parametrize("break_", [_unknown, _wrong_type, _missing])
def test_a_field_that_is_wrong_does_not_fit(break_: Callable[[Manifest], None]) -> None:
    manifest = copy.deepcopy(of_kind("overlays/cpu", "DaemonSet")[0])
    break_(manifest["spec"]["template"])
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, RELEASES[-1], strict=True)


@pytest.mark.parametrize("folder", [one for one in ALL if one.startswith("overlays")])
def test_pod_monitors_have_fields_that_the_operator_knows_and_ports_that_pods_have(folder: str) -> None:
    def check(name: str, value: Any) -> None:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and name in _POD_MONITOR:
                assert one.keys() <= _POD_MONITOR[name]
                for key, inner in one.items():
                    check(key, inner)

    monitors = of_kind(folder, "PodMonitor")
    assert len(monitors) == 2
    for monitor in monitors:
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        check("spec", monitor["spec"])
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        (pod,) = (one for one in pods(folder) if labels <= one["metadata"]["labels"].items())
        ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports
