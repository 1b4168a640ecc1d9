"""``ems key``: access keys of tenants.  A key is shown once, when it is made; the file has only what recognises it."""

from __future__ import annotations

import secrets
import time

from ems.cli.shown import moment, note, print_json, print_table
from ems.cli.tenancy import READING, WRITING, Reading, Writing, change, tell
from ems.config import parse_duration
from ems.pool.tenants import registry as tenancy
from ems.pool.tenants import store
from ems.pool.tenants.registry import Registry

KEY_BYTES = 32
"""Random bytes of a key."""


def add(tenant: str, /, *, ttl: str | None = None, asked: Writing = WRITING) -> None:
    """Make a key for a tenant and print it, this once, to stdout.

    Parameters
    ----------
    tenant
        The tenant; its name is the access id that goes with the key.
    ttl
        How long the key is valid, such as 12h or 90d; for ever, unless given.
    """
    now, secret = time.time(), _new()
    expires = None if ttl is None else now + parse_duration(ttl, name="--ttl")
    _, after = change(
        "key add",
        {"tenant": tenant, "expires": expires},
        lambda known: tenancy.add_key(known, tenant, secret, now, expires),
        asked=asked,
    )
    _made(after, tenant, secret, asked)


def rotate(tenant: str, /, *, overlap: str = "1d", asked: Writing = WRITING) -> None:
    """Make a key for a tenant and print it to stdout; its other keys end after the overlap.

    Parameters
    ----------
    tenant
        The tenant.
    overlap
        How long the other keys go on, such as 12h or 7d.
    """
    now, secret, seconds = time.time(), _new(), parse_duration(overlap, name="--overlap")
    _, after = change(
        "key rotate",
        {"tenant": tenant, "overlap": seconds},
        lambda known: tenancy.rotate_key(known, tenant, secret, now, seconds),
        asked=asked,
    )
    _made(after, tenant, secret, asked)


def revoke(tenant: str, key: str, /, *, asked: Writing = WRITING) -> None:
    """End a key and the connections that it opened, at once.

    Parameters
    ----------
    tenant
        The tenant.
    key
        The key's name, as ems key list has it, or all.
    """
    what: dict[str, object] = {"tenant": tenant, "key": key}
    _, after = change("key revoke", what, lambda known: tenancy.revoke_key(known, tenant, key), asked=asked)
    if asked.json:
        print_json({**what, "revision": after.revision, "dry_run": asked.dry_run})
    if asked.dry_run:
        note(f"{key} of tenant {tenant} would be revoked, nothing was changed")
        return
    note(f"{key} of tenant {tenant} is revoked")
    tell(asked, after.revision)


def list_(tenant: str, /, *, asked: Reading = READING) -> None:
    """List a tenant's keys: their names, not the keys.

    Parameters
    ----------
    tenant
        The tenant.
    """
    keys = store.read(asked.path).tenant(tenant).keys
    now = time.time()
    if asked.json:
        print_json(
            [{"key": key.id, "created": key.created, "expires": key.expires, "valid": key.valid(now)} for key in keys]
        )
        return
    rows = [(key.id, moment(key.created), moment(key.expires), "yes" if key.valid(now) else "no") for key in keys]
    print_table(("KEY", "MADE", "ENDS", "VALID"), rows)


def _new() -> str:
    return "ems_" + secrets.token_urlsafe(KEY_BYTES)


def _made(after: Registry, tenant: str, secret: str, asked: Writing) -> None:
    made = after.tenant(tenant).keys[-1]
    if asked.dry_run:
        if asked.json:
            print_json({"tenant": tenant, "revision": after.revision, "dry_run": True})
        note(f"tenant {tenant} would get a key, nothing was changed")
        return
    if asked.json:
        shown = {"access_id": tenant, "access_key": secret, "key": made.id, "expires": made.expires}
        print_json({**shown, "revision": after.revision, "dry_run": False})
    else:
        print(secret)
    note(f"this is key {made.id} of access id {tenant}, ends {moment(made.expires)}; it is not shown again")
    tell(asked, after.revision)
