"""Encryption at rest: AES-256-GCM, a key a pack, derived from one secret or from a secret a tenant.

A pack's key is HKDF-SHA256 of the secret with the pack's random salt and its namespace, whose name says whose it
is: two tenants' pages never share a key.  A page is bound to its names: moved under another key, or to another
namespace, it does not open.  Secrets are read once, at the start, and never shown.
"""

from __future__ import annotations

import os
import secrets
from importlib.util import find_spec
from pathlib import Path

from ems.errors import ConfigError
from ems.pool.tenants.names import tenant_of

SALT_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
LEAST_SECRET = 16
MOST_SECRET = 4096
_TAILS = b"ems tails"


class Secrets:
    """The secrets in ``path``: a file for all tenants, or a folder with a file ``TENANT.key`` for each.

    Raises:
        ConfigError: there are none, or they cannot be used.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("cryptography") is None:
            raise ConfigError("key= of a tier needs the package cryptography: pip install 'ems-kv[tiers]'")
        self._common: bytes | None = None
        self._of: dict[str, bytes] = {}
        try:
            if path.is_dir():
                self._of = {file.stem: _secret(file) for file in sorted(path.glob("*.key"))}
            else:
                self._common = _secret(path)
        except OSError as error:
            raise ConfigError(f"cannot read the key {path}: {error.strerror}; name a file with a secret") from error
        if self._common is None and not self._of:
            raise ConfigError(f"{path} has no files TENANT.key, put one there for each tenant or name a single file")

    def cipher(self, namespace: str, salt: bytes) -> PackCipher | None:
        """What seals and opens a pack of ``namespace``; None where its tenant has no secret here."""
        # On an open node the tenant is what the engine says it is: the first part of the name.
        tenant = tenant_of(namespace) or namespace.split("/", 1)[0]
        secret = self._common or self._of.get(tenant)
        return None if secret is None else PackCipher(secret, namespace, salt)

    def new(self, namespace: str) -> PackCipher | None:
        """The same for a new pack."""
        return self.cipher(namespace, secrets.token_bytes(SALT_BYTES))

    def unseal_tails(self, sealed: bytes, namespace: str, salt: bytes) -> bytes | None:
        """What :meth:`PackCipher.seal_tails` sealed, None without the right secret."""
        cipher = self.cipher(namespace, salt)
        return None if cipher is None else cipher.open(sealed[NONCE_BYTES:], sealed[:NONCE_BYTES], _TAILS)


def _secret(file: Path) -> bytes:
    if file.stat().st_mode & 0o077:
        raise ConfigError(f"the key {file} can be read by others, chmod 600 it")
    with file.open("rb") as opened:
        secret = opened.read(MOST_SECRET + 1).strip()
    if not LEAST_SECRET <= len(secret) <= MOST_SECRET:
        raise ConfigError(
            f"the key {file} has {len(secret)} bytes, expected {LEAST_SECRET} to {MOST_SECRET}; "
            "'openssl rand -base64 32' makes one"
        )
    return secret


class PackCipher:
    """Seals and opens the pages of one pack."""

    def __init__(self, secret: bytes, namespace: str, salt: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self.salt = salt
        key = HKDF(SHA256(), 32, salt, b"ems-tier-v1\0" + namespace.encode()).derive(secret)
        self._aead = AESGCM(key)

    def seal(self, page: bytes | memoryview, names: bytes) -> tuple[bytes, bytes]:
        """``(nonce, sealed)`` of ``page``, which opens only with the same ``names``."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce, self._aead.encrypt(nonce, page, names)

    def seal_tails(self, tails: bytes) -> bytes:
        """``tails`` sealed, with what opens them in front."""
        nonce, sealed = self.seal(tails, _TAILS)
        return nonce + sealed

    def open(self, sealed: bytes | bytearray | memoryview, nonce: bytes, names: bytes) -> bytes | None:
        """What was sealed with these ``names``; None when it was not, or was changed since."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(nonce, sealed, names)
        except (InvalidTag, ValueError):
            return None
