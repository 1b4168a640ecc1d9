"""Tenants and their keys: what the node knows of them, and every change to that.

What always holds: no key is in here, only what it takes to recognise one (:mod:`ems.pool.tenants.scram`); an access id
that is unknown is asked the same question as one that is known, and the same work is done before either is refused;
each change makes a registry of the next revision out of one that stays as it was.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Annotated

import msgspec

from ems.errors import ConfigError
from ems.pool.core.shares import Quota
from ems.pool.names import is_tenant
from ems.pool.tenants import scram

FORMAT = 1
MAX_TENANTS = 1024
MAX_KEYS = 4
"""Keys of one tenant, those that end soon among them."""
SECRET_BYTES = 32
KEY_ID = 12
"""Characters of the name of a key."""


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One access key of a tenant: how to recognise it, since when, until when (both in seconds since 1970)."""

    id: str
    verifier: scram.Verifier
    created: float
    expires: float | None = None

    def valid(self, wall: float) -> bool:
        return self.expires is None or wall < self.expires


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tenant: its keys, all hashed with ``salt``, and its share of the pool."""

    salt: Annotated[bytes, msgspec.Meta(min_length=scram.SALT_BYTES)]
    quota: Quota = Quota()
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()


class Registry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All tenants of a node.  ``secret`` is random; questions to unknown access ids are made with it."""

    format: int = FORMAT
    revision: int = 0
    iterations: Annotated[int, msgspec.Meta(ge=scram.ITERATIONS, le=scram.MOST_ITERATIONS)] = scram.ITERATIONS
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    tenants: Annotated[dict[str, Tenant], msgspec.Meta(max_length=MAX_TENANTS)] = {}

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(f"the tenants file has format {self.format}, this release knows {FORMAT}; upgrade EMS")
        for name in self.tenants:
            if not is_tenant(name):
                raise ConfigError(
                    f"a tenant is called {name[:80]!r}, expected 1 to 64 letters, digits and . _ @ + - that begin with "
                    "no sign"
                )

    # What the node asks

    def salt_for(self, access_id: str) -> bytes:
        """The salt that whoever calls itself ``access_id`` is asked with, whether there is such a tenant or not."""
        made_up = hmac.digest(self.secret, b"salt of " + access_id.encode(errors="replace"), "sha256")
        known = self.tenants.get(access_id)
        return made_up[: scram.SALT_BYTES] if known is None else known.salt

    def recognise(self, access_id: str, message: bytes, proof: bytes, wall: float) -> tuple[str, bytes] | None:
        """The id of the key with which ``proof`` was made and the node's own proof; None when there is none."""
        tenant = self.tenants.get(access_id)
        keys = () if tenant is None else tenant.keys
        found: tuple[str, bytes] | None = None
        unusable = self._unusable_key
        for position in range(MAX_KEYS):
            key = keys[position] if position < len(keys) else unusable
            signature = scram.signature(key.verifier, message)
            if scram.proves(key.verifier, message, proof) and key.valid(wall):
                found = key.id, signature
        return found

    @property
    def _unusable_key(self) -> Key:
        """A key that nobody has, to be compared where there is none."""
        digest = hashlib.sha256(self.secret).digest()
        return Key(id="", verifier=scram.Verifier(digest, digest), created=0.0, expires=0.0)

    def admits(self, access_id: str, key_id: str, wall: float) -> bool:
        """Whether the key ``key_id`` of ``access_id``, proven earlier, still opens anything."""
        tenant = self.tenants.get(access_id)
        return tenant is not None and any(key.id == key_id and key.valid(wall) for key in tenant.keys)

    def quotas(self) -> Mapping[str, Quota]:
        return {name: tenant.quota for name, tenant in self.tenants.items()}

    def tenant(self, name: str) -> Tenant:
        """The tenant ``name``.  Raises ConfigError: there is none."""
        known = self.tenants.get(name)
        if known is None:
            raise ConfigError(f"there is no tenant {name!r}, see 'ems tenant list'")
        return known


# Changes


def _changed(registry: Registry, tenants: dict[str, Tenant]) -> Registry:
    return msgspec.structs.replace(registry, revision=registry.revision + 1, tenants=tenants)


def _with(registry: Registry, name: str, tenant: Tenant) -> Registry:
    return _changed(registry, {**registry.tenants, name: tenant})


def add_tenant(registry: Registry, name: str, quota: Quota, salt: bytes) -> Registry:
    """With another tenant, who has no key yet.

    Raises ConfigError: there is one of that name, or it cannot be one's name.
    """
    if name in registry.tenants:
        raise ConfigError(f"there is a tenant {name!r} already, change it with 'ems tenant set'")
    if len(registry.tenants) >= MAX_TENANTS:
        raise ConfigError(f"there are {len(registry.tenants)} tenants, which is the most")
    return _with(registry, name, Tenant(salt=salt, quota=quota))


def set_quota(registry: Registry, name: str, quota: Quota) -> Registry:
    return _with(registry, name, msgspec.structs.replace(registry.tenant(name), quota=quota))


def remove_tenant(registry: Registry, name: str) -> Registry:
    registry.tenant(name)
    return _changed(registry, {other: tenant for other, tenant in registry.tenants.items() if other != name})


def add_key(registry: Registry, name: str, secret: str, wall: float, expires: float | None = None) -> Registry:
    """With the key ``secret`` for a tenant; keys that are over are dropped.

    Raises ConfigError: the tenant has too many keys.
    """
    tenant = registry.tenant(name)
    verifier = scram.verifier(secret, tenant.salt, registry.iterations)
    key = Key(id=key_id(verifier), verifier=verifier, created=wall, expires=expires)
    kept = tuple(one for one in tenant.keys if one.valid(wall) and one.id != key.id)
    if len(kept) >= MAX_KEYS:
        raise ConfigError(f"tenant {name} has {len(kept)} keys, which is the most; revoke one with 'ems key revoke'")
    return _with(registry, name, msgspec.structs.replace(tenant, keys=(*kept, key)))


def rotate_key(registry: Registry, name: str, secret: str, wall: float, overlap: float) -> Registry:
    """With the key ``secret`` in place of all others of the tenant, which end ``overlap`` seconds from now."""
    end = wall + overlap
    tenant = registry.tenant(name)
    ending = tuple(
        msgspec.structs.replace(key, expires=end if key.expires is None else min(key.expires, end))
        for key in tenant.keys
    )
    return add_key(_with(registry, name, msgspec.structs.replace(tenant, keys=ending)), name, secret, wall)


def revoke_key(registry: Registry, name: str, key: str) -> Registry:
    """Without the key called ``key`` of a tenant, or without any when it is ``all``.

    Raises ConfigError: the tenant has no such key.
    """
    tenant = registry.tenant(name)
    kept = () if key == "all" else tuple(one for one in tenant.keys if one.id != key)
    if len(kept) == len(tenant.keys) and key != "all":
        raise ConfigError(f"tenant {name} has no key {key!r}, see 'ems key list {name}'")
    return _with(registry, name, msgspec.structs.replace(tenant, keys=kept))


def key_id(verifier: scram.Verifier) -> str:
    """The name of a key, by which people speak of it: it says nothing about the key."""
    return hashlib.sha256(b"ems key id" + verifier.stored_key).hexdigest()[:KEY_ID]
