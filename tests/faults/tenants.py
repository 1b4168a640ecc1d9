"""The tenants of a history: their keys, their quotas, how they are let in, and the administrator beside them.

Every connection greets and proves its key as real ones do, but that the slow part of it is done once for each key.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
from pathlib import Path
from typing import Any

import msgspec

from ems.errors import Unauthorised
from ems.pool.core.shares import Quota
from ems.pool.protocol import coding, limits, messages
from ems.pool.tenants import registry as registries
from ems.pool.tenants import scram, store
from ems.pool.tenants.gate import Pending, Principal
from ems.pool.tenants.registry import SECRET_BYTES, Key, Registry, Tenant
from tests.faults.settings import TENANTS
from tests.faults.simulated_clients import SimulatedClient
from tests.faults.times import Times

QUOTAS = (
    Quota(minimum="25%", cap="50%"),
    Quota(minimum="25%", cap="100%"),
    Quota(minimum="0", cap="75%"),
    Quota(minimum="0", cap="25%"),
    Quota(minimum="50%", cap="75%"),
)
_NONCE = bytes(limits.NONCE_BYTES)


def _salt(tenant: str) -> bytes:
    return hashlib.sha256(tenant.encode()).digest()[: scram.SALT_BYTES]


@functools.lru_cache
def _derived(secret: str, salt: bytes) -> tuple[bytes, bytes]:
    """What a key comes to, slowly: the client's half and the node's."""
    salted = hashlib.pbkdf2_hmac("sha256", secret.encode(), salt, scram.ITERATIONS)
    return hmac.digest(salted, b"Client Key", "sha256"), hmac.digest(salted, b"Server Key", "sha256")


def _key(tenant: str, number: int, expires: float | None = None) -> Key:
    seed, server = _derived(f"{tenant} {number}", _salt(tenant))
    known = scram.Verifier(hashlib.sha256(seed).digest(), server)
    return Key(id=registries.key_id(known), verifier=known, created=0.0, expires=expires)


class Tenants:
    """The tenants, in the file ``path``."""

    def __init__(self, path: Path, times: Times) -> None:
        self.path = path
        self._times = times
        self.used = dict.fromkeys(TENANTS, 0)
        """The number of the key that each tenant uses; it is its secret, too."""
        tenants = {
            name: Tenant(salt=_salt(name), quota=QUOTAS[position], keys=(_key(name, 0),))
            for position, name in enumerate(TENANTS)
        }
        self.registry = Registry(secret=bytes(SECRET_BYTES), tenants=tenants)
        self.write()

    def write(self) -> None:
        """Put what holds into the file."""
        store.write(self.path, self.registry)

    def _change(self, tenant: str, **changes: Any) -> None:
        known = self.registry.tenants[tenant]
        tenants = {**self.registry.tenants, tenant: msgspec.structs.replace(known, **changes)}
        self.registry = msgspec.structs.replace(self.registry, revision=self.registry.revision + 1, tenants=tenants)
        self.write()

    # What an administrator changes in the file

    def set_quota(self, tenant: str, quota: Quota) -> None:
        """Another share for a tenant."""
        self._change(tenant, quota=quota)

    def revoke(self, tenant: str) -> None:
        """No key of a tenant opens anything any more."""
        self._change(tenant, keys=())

    def give_key(self, tenant: str, lasts: float | None) -> None:
        """Another key for a tenant in place of what it had, which it uses from now on."""
        self.used[tenant] += 1
        expires = None if lasts is None else self._times.wall() + lasts
        self._change(tenant, keys=(_key(tenant, self.used[tenant], expires),))

    def opens(self, tenant: str) -> bool:
        """Whether the key that a tenant uses opens anything now."""
        ids = {_key(tenant, self.used[tenant]).id}
        return any(key.id in ids and key.valid(self._times.wall()) for key in self.registry.tenants[tenant].keys)

    def valid(self, principal: Principal) -> bool:
        """Whether the key of somebody who is in opens anything now."""
        keys = self.registry.tenants[principal.tenant].keys
        return any(key.id == principal.key and key.valid(self._times.wall()) for key in keys)

    # Greetings

    def greet(self, client: SimulatedClient) -> bool:
        """Greet the node as the tenant of a seat; whether it let the seat in."""
        hello = messages.Hello(1, 1, "history", os.getpid(), access_id=client.tenant, nonce=_NONCE)
        try:
            pending = client.node.tenancy.gate.greet(hello, coding.body(hello), client.peer, client.node.clock())
            assert isinstance(pending, Pending)
            seed, _ = _derived(f"{client.tenant} {self.used[client.tenant]}", _salt(client.tenant))
            signed = hmac.digest(hashlib.sha256(seed).digest(), pending.transcript, "sha256")
            proof = (int.from_bytes(seed) ^ int.from_bytes(signed)).to_bytes(len(seed))
            principal, signature = client.node.tenancy.gate.prove(
                pending, proof, client.peer, client.node.clock(), client.node.wall()
            )
        except Unauthorised:
            return False
        client.node.clients.welcome(client.client_id, principal, 1, signature)
        return True


def greet_as_administrator(client: SimulatedClient) -> None:
    """Greet the node as its own user who administers it."""
    hello = messages.Hello(1, 1, "history", os.getpid(), administers=True)
    principal = client.node.tenancy.gate.greet(hello, coding.body(hello), client.peer, client.node.clock())
    assert isinstance(principal, Principal)
    client.node.clients.welcome(client.client_id, principal, 1, b"")
