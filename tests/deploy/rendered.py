"""The manifests of deploy/ as ``kubectl kustomize`` renders them, with the kubectl of this environment."""

from __future__ import annotations

import functools
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SCRIPTS = Path(sysconfig.get_path("scripts"))
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
EXAMPLES = sorted(path.name for path in (KUBERNETES / "examples").iterdir())
ALL = [*(f"overlays/{name}" for name in OVERLAYS), *(f"examples/{name}" for name in EXAMPLES)]


@functools.cache
def render(folder: str) -> tuple[Manifest, ...]:
    command = [str(SCRIPTS / "kubectl"), "kustomize", str(KUBERNETES / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""  # what is deprecated is said there
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(folder: str, *kinds: str) -> list[Manifest]:
    return [one for one in render(folder) if one["kind"] in kinds]


def named(folder: str, kind: str, name: str) -> Manifest:
    (found,) = (one for one in of_kind(folder, kind) if one["metadata"]["name"] == name)
    return found


def pods(folder: str) -> list[Manifest]:
    """The templates of all pods."""
    return [one["spec"]["template"] for one in of_kind(folder, "DaemonSet", "Deployment", "StatefulSet")]


def node_of(overlay: str) -> tuple[Manifest, Manifest]:
    """The specification of a node's pod, and its container."""
    spec = named(f"overlays/{overlay}", "DaemonSet", "ems-node")["spec"]["template"]["spec"]
    return spec, spec["containers"][0]


def config_map(folder: str, prefix: str) -> dict[str, str]:
    (found,) = (one for one in of_kind(folder, "ConfigMap") if one["metadata"]["name"].startswith(prefix))
    data: dict[str, str] = found["data"]
    return data
