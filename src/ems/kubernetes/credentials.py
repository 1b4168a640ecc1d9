"""How an API server is reached: out of a kubeconfig, or out of what a pod finds in its own file system.

What always holds: a token is read anew for each call, since clusters replace it while we run; no secret stands
in a message.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from ems import files
from ems.errors import ConfigError
from ems.kubernetes.manifests import load_yaml

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server is, what it is known by, and who asks."""

    server: str
    authority: str | None = None
    """Certificates in PEM form; None is those that the system trusts."""
    verify: bool = True
    token: str | None = msgspec.field(default=None)
    token_file: Path | None = None
    client: tuple[bytes, bytes] | None = None
    """The client's certificate and key in PEM form."""

    def headers(self) -> dict[str, str]:
        token = self.token
        if self.token_file is not None:
            try:
                token = self.token_file.read_text().strip()
            except OSError as error:
                raise ValueError(f"cannot read the token {self.token_file}: {error.strerror}") from None
        return {"Authorization": f"Bearer {token}"} if token else {}

    def tls(self) -> ssl.SSLContext | bool:
        if not self.server.startswith("https://"):
            return True
        try:
            context = ssl.create_default_context(cadata=self.authority)
            if not self.verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.client is not None:
                with tempfile.NamedTemporaryFile() as file:  # private, and gone after it was loaded
                    file.write(b"\n".join(self.client))
                    file.flush()
                    context.load_cert_chain(file.name)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"The certificates for {self.server} make no sense: {error}") from None
        return context


def of_pod(folder: Path = SERVICE_ACCOUNT) -> Credentials:
    """Those of the service account of the pod that we run in.

    :raises ConfigError: it runs in none.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (folder / "token").exists():
        raise ConfigError("This is no pod with a service account: give --kubeconfig instead")
    authority = files.read(folder / "ca.crt", what="the cluster's certificate").decode("ascii", "replace")
    where = f"[{host}]" if ":" in host else host
    return Credentials(server=f"https://{where}:{port}", authority=authority, token_file=folder / "token")


def of_kubeconfig(path: str, context: str | None = None) -> Credentials:
    """Those of a context of a kubeconfig, the current one if none is named.

    :raises ConfigError: the file cannot be read, is wrong, or has users who sign in by a program.
    """
    file = Path(path)
    documents = load_yaml(files.read(file, what="the kubeconfig").decode("utf-8", "replace"), source=path)
    config = documents[0] if documents and isinstance(documents[0], dict) else {}
    name = context or config.get("current-context")
    if not name:
        raise ConfigError(f"{path} has no current-context: give --kube-context")
    chosen = _named(config, "contexts", name, "context", path)
    cluster = _named(config, "clusters", chosen.get("cluster"), "cluster", path)
    user = _named(config, "users", chosen.get("user"), "user", path) if chosen.get("user") else {}
    for way in ("exec", "auth-provider", "username"):
        if way in user:
            raise ConfigError(f"{path}: the user signs in by {way!r}: expected a token, a tokenFile or a certificate")
    server = cluster.get("server")
    if not isinstance(server, str) or not server.startswith(("http://", "https://")):
        raise ConfigError(f"{path}: the cluster has the server {server!r}: expected a URL")
    authority = _pem(cluster, "certificate-authority", file)
    certificate, key = _pem(user, "client-certificate", file), _pem(user, "client-key", file)
    token, token_file = user.get("token"), user.get("tokenFile")
    return Credentials(
        server=server.rstrip("/"),
        authority=authority.decode("ascii", "replace") if authority is not None else None,
        verify=not cluster.get("insecure-skip-tls-verify", False),
        token=str(token) if token else None,
        token_file=file.parent / str(token_file) if token_file and not token else None,
        client=(certificate, key) if certificate is not None and key is not None else None,
    )


def _named(config: dict[str, Any], of: str, name: object, what: str, path: str) -> dict[str, Any]:
    entries = config.get(of)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(what), dict):
            found: dict[str, Any] = entry[what]
            return found
    raise ConfigError(f"{path} has no {what} {name!r} under {of}")


def _pem(entry: dict[str, Any], name: str, file: Path) -> bytes | None:
    inline = entry.get(f"{name}-data")
    if inline:
        try:
            return base64.b64decode(str(inline), validate=True)
        except binascii.Error:
            raise ConfigError(f"{file}: {name}-data is not in base64") from None
    named = entry.get(name)
    return files.read(file.parent / str(named), what=f"the {name}") if named else None
