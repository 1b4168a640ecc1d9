"""Proof that a pack was written by a node that has the tier's secret; encryption as well where the tier has ``key=``.

A pack's key is derived (HKDF-SHA256) from a secret, the pack's random salt and its namespace, whose name says whose it
is: two tenants' pages never share a key.  What always holds: a page opens only under the names and in the namespace
that it was sealed with; secrets are read once, at the start, and never shown.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ems.errors import ConfigError
from ems.pool.names import tenant_of
from ems.pool.tiers.settings import TierConfig

SALT_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
LEAST_SECRET = 16
MOST_SECRET = 4096


class SealKeys:
    """The secrets of one tier: one that is ``common`` to all tenants, or one ``by_tenant``."""

    def __init__(self, common: bytes | None, by_tenant: Mapping[str, bytes] | None = None, *, encrypts: bool) -> None:
        self._common = common
        self._by_tenant = by_tenant or {}
        self._purpose = b"ems-tier-encrypt-v2\0" if encrypts else b"ems-tier-seal-v2\0"
        self.encrypts = encrypts

    @classmethod
    def of(cls, secrets: Mapping[str, bytes], *, encrypts: bool) -> SealKeys:
        """Those of :attr:`secrets`."""
        return cls(secrets.get(""), secrets, encrypts=encrypts)

    @property
    def secrets(self) -> dict[str, bytes]:
        """By tenant, or the only one under an empty name."""
        return dict(self._by_tenant) if self._common is None else {"": self._common}

    @property
    def fingerprints(self) -> dict[str, str]:
        """Eight hex digits that tell secrets apart, by tenant, or of the only one under an empty name.

        They tell nothing about a secret that was made at random; a weak one may be guessed by them.
        """
        label = b"ems-seal-fingerprint"
        return {name: hmac.digest(one, label, "sha256").hex()[:8] for name, one in self.secrets.items()}

    def pack(self, namespace: str, salt: bytes | None = None) -> PackSeal | None:
        """What seals and opens the pack of ``namespace`` that has this ``salt``, or one that is new.

        None where its tenant has no secret here.
        """
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        # On an open node the tenant is what the engine says it is: the first part of the name.
        tenant = tenant_of(namespace) or namespace.split("/", 1)[0]
        secret = self._common or self._by_tenant.get(tenant)
        if secret is None:
            return None
        salt = salt or secrets.token_bytes(SALT_BYTES)
        key = HKDF(SHA256(), 32, salt, self._purpose + namespace.encode()).derive(secret)
        return PackSeal(key, salt, self.encrypts)


class PackSeal:
    """Seals and opens the pages of one pack (AES-256-GCM)."""

    def __init__(self, key: bytes, salt: bytes, encrypts: bool) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._key = key
        self._aead = AESGCM(key)
        self.salt = salt
        self.encrypts = encrypts

    def derived(self, purpose: bytes) -> bytes:
        """Another secret of 32 bytes, which tells nothing about this one."""
        return hmac.digest(self._key, purpose, "sha256")

    def seal(self, data: bytes | memoryview, names: bytes) -> tuple[bytes, bytes, bytes | memoryview]:
        """Nonce, tag and stored form of ``data``, which opens only with the same ``names``."""
        nonce = os.urandom(NONCE_BYTES)
        if not self.encrypts:
            return nonce, self._tag(data, nonce, names), data
        sealed = memoryview(self._aead.encrypt(nonce, data, names))
        return nonce, bytes(sealed[-TAG_BYTES:]), sealed[:-TAG_BYTES]

    def _tag(self, data: bytes | bytearray | memoryview, nonce: bytes, names: bytes) -> bytes:
        # The names are what is encrypted, so that nothing large is copied; nobody needs them back.
        return self._aead.encrypt(nonce, names, data)[-TAG_BYTES:]

    def open(
        self, stored: bytes | bytearray | memoryview, nonce: bytes, tag: bytes, names: bytes
    ) -> bytes | bytearray | memoryview | None:
        """What was sealed with these ``names``; None when it was not, or was changed since."""
        if not self.encrypts:
            return stored if hmac.compare_digest(self._tag(stored, nonce, names), tag) else None
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(nonce, b"".join((stored, tag)), names)
        except InvalidTag:
            return None


def open_keys(config: TierConfig, *, make: bool = True) -> SealKeys | None:
    """What seals the pages of the tier.

    The key of a folder that names none is made where there is none yet; None without ``make``.

    Raises ConfigError: there is none, or it cannot be used.
    """
    if config.key is not None:
        return read_keys(config.key, encrypts=True)
    path = given_seal_key(config) or (default_seal_key() if config.kind == "dir" else None)
    if path is None:
        raise ConfigError(
            f"{config.name} can be written by more than this node: give seal_key=FILE, a secret of all its nodes "
            "('openssl rand -base64 32 > FILE && chmod 600 FILE')"
        )
    if config.kind == "dir" and config.seal_key is None:
        if make:
            make_key(path)
        elif not path.exists():
            return None
    return read_keys(path, encrypts=False)


def read_keys(path: Path, *, encrypts: bool, of_any_user: bool = False) -> SealKeys:
    """The secrets in ``path``: a file for all tenants, or a folder with a file ``TENANT.key`` for each.

    They may be ``of_any_user`` for who only looks whether another user's node can use them.

    Raises ConfigError: there are none, or they cannot be used.
    """
    try:
        if not path.is_dir():
            return SealKeys(_secret(path, of_any_user), encrypts=encrypts)
        by_tenant = {file.stem: _secret(file, of_any_user) for file in sorted(_files(path))}
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}; name a file with a secret") from error
    if not by_tenant:
        raise ConfigError(f"{path} has no files TENANT.key, put one there for each tenant or name a single file")
    return SealKeys(None, by_tenant, encrypts=encrypts)


def _files(folder: Path) -> list[Path]:
    # Not by a pattern, which finds nothing in a folder that may not be read.
    return [file for file in folder.iterdir() if file.suffix == ".key"]


def _secret(file: Path, of_any_user: bool) -> bytes:
    with file.open("rb") as opened:
        status = os.fstat(opened.fileno())
        if not (of_any_user or status.st_uid in {0, os.geteuid()}):
            raise ConfigError(f"the key {file} belongs to another user, who may change it; chown it to the node's user")
        if status.st_mode & 0o077:
            raise ConfigError(f"the key {file} can be read or changed by other users, chmod 600 it")
        secret = opened.read(MOST_SECRET + 1).strip()
    if not LEAST_SECRET <= len(secret) <= MOST_SECRET:
        raise ConfigError(
            f"the key {file} has {len(secret)} bytes, expected {LEAST_SECRET} to {MOST_SECRET}; "
            "'openssl rand -base64 32' makes one"
        )
    return secret


def given_seal_key(config: TierConfig) -> Path | None:
    """The key that the tier's settings name, or the environment where they name none."""
    given = os.environ.get("EMS_SEAL_KEY")
    return config.seal_key or (Path(given) if given else None)


def default_seal_key() -> Path:
    """Where the key of this user's folders is: a file that outlives a restart of the host."""
    if os.geteuid() == 0:
        return Path("/var/lib/ems/seal.key")
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "ems" / "seal.key"


def make_key(path: Path) -> None:
    """See to it that ``path`` is a key; nodes that do so at the same time get the same one.

    Raises ConfigError: it cannot be made.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        if path.exists():
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, secrets.token_hex(32).encode() + b"\n")
            os.fsync(descriptor)
            with suppress(FileExistsError):
                path.hardlink_to(new)
        finally:
            os.close(descriptor)
            new.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot make the key {path} that seals the pages of a tier: {error.strerror}; "
            "name a file with a secret by seal_key= or EMS_SEAL_KEY"
        ) from error
