"""Short hands for tests of tenants: registries, proofs, a file and a node that reads it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ems.pool.core.shares import Quota
from ems.pool.tenants import registry as tenancy
from ems.pool.tenants import store
from ems.pool.tenants.registry import Registry
from ems.pool.tenants.scram import Credentials

ANN = Credentials("ann", "ems_key of ann")
BOB = Credentials("bob", "ems_key of bob")
SALT = b"0123456789abcdef"


def registry_of(*people: Credentials, **quotas: Quota) -> Registry:
    """A registry with ``people``, a key each."""
    registry = Registry(secret=bytes(range(32)))
    for one in people:
        registry = tenancy.add_tenant(registry, one.access_id, quotas.get(one.access_id, Quota()), SALT)
        registry = tenancy.add_key(registry, one.access_id, one.access_key, 0.0)
    return registry


def save(path: Path, registry: Registry) -> Registry:
    """Put ``registry`` into the file as its next revision."""
    with store.changing(path, create=True) as before:
        after = msgspec.structs.replace(registry, revision=before.revision + 1)
        store.write(path, after)
    return after
