from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from ems.errors import ConfigError
from ems.kubernetes.credentials import of_kubeconfig, of_pod
from tests.kubernetes.kubeconfigs import kubeconfig


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"users": [{"name": "u", "user": {"exec": {}}}]}, "the user signs in by 'exec'"),
        ({"clusters": []}, "has no cluster 'c' under clusters"),
        ({"contexts": None}, "has no context 'here' under contexts"),
        ({"current-context": ""}, "has no current-context: give --kube-context"),
        ({"clusters": [{"name": "c", "cluster": {"server": "c"}}]}, "the cluster has the server 'c': expected a URL"),
        ({"users": [{"name": "u", "user": {"client-key-data": "?"}}]}, "client-key-data is not in base64"),
        ({"users": [{"name": "u", "user": {"client-key": "none"}}]}, "Cannot read the client-key"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = Path(kubeconfig(tmp_path, "https://c"))
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    with pytest.raises(ConfigError) as refused:
        of_kubeconfig(str(path))
    assert said in str(refused.value)


def test_certificates_may_stand_in_the_kubeconfig(tmp_path: Path) -> None:
    text = base64.b64encode(b"pem").decode()
    user = {"client-certificate-data": text, "client-key-data": text, "token": "t"}
    credentials = of_kubeconfig(kubeconfig(tmp_path, "https://c/", **user))

    assert (credentials.server, credentials.client) == ("https://c", (b"pem", b"pem"))
    assert credentials.headers() == {"Authorization": "Bearer t"}
    with pytest.raises(ConfigError, match="The certificates for https://c make no sense"):
        credentials.tls()


def test_a_pod_finds_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="This is no pod with a service account"):
        of_pod(tmp_path)
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_text("pem")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    credentials = of_pod(tmp_path)

    assert (credentials.server, credentials.authority) == ("https://[fd00::1]:6443", "pem")
    assert credentials.headers() == {"Authorization": "Bearer t"}
