"""Objects to test with, as a person would write them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

GROUP = "networking.serving.volcano.sh/v1alpha1"


def server(name: str = "pair", *, group: bool = True, **spec: Any) -> dict[str, Any]:
    selector: dict[str, Any] = {"matchLabels": {"app": name}}
    if group:
        selector["pdGroup"] = {
            "groupKey": "group",
            "prefillLabels": {"role": "prefill"},
            "decodeLabels": {"role": "decode"},
        }
    filled = {
        "model": "told",
        "inferenceEngine": "vLLM",
        "workloadSelector": selector,
        "workloadPort": {"port": 7100},
        **spec,
    }
    return {"apiVersion": GROUP, "kind": "ModelServer", "metadata": {"name": name}, "spec": filled}


def route(name: str = "asked", to: str | list[dict[str, Any]] = "pair", **spec: Any) -> dict[str, Any]:
    targets = [{"modelServerName": to}] if isinstance(to, str) else to
    filled = {"modelName": name, "rules": [{"name": "default", "targetModels": targets}], **spec}
    return {"apiVersion": GROUP, "kind": "ModelRoute", "metadata": {"name": name}, "spec": filled}


def pod(name: str, address: str, app: str = "pair", *, ready: bool = True, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": app, **labels}, "uid": "an API server's own"},
        "spec": {"containers": []},
        "status": {"podIP": address, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def with_metadata(made: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    copied = copy.deepcopy(dict(made))
    copied["metadata"].update(fields)
    return copied


def write(place: Path, *documents: Any) -> Path:
    place.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    return place
