"""``ems tenant``: who may use a node, and how much of its pool."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from ems.cli.shown import moment, present, present_facts, table
from ems.cli.tenancy import READING, WRITING, Reading, Writing, change_and_tell, usage
from ems.config import GIB, format_size
from ems.errors import ConfigError
from ems.pool.core.shares import Quota
from ems.pool.tenants import registry as tenancy
from ems.pool.tenants import scram, store
from ems.pool.tenants.registry import Registry


def add(name: str, /, *, minimum: str = "0", cap: str = "100%", asked: Writing = WRITING) -> None:
    """Let somebody in; ems key add makes the key.

    Parameters
    ----------
    name
        The tenant's name, which is the access id of its engines.
    minimum
        Memory that nobody else can take from it, such as 4GB or 25%.
    cap
        Memory that it never exceeds, such as 16GB or 50%.
    """
    quota = _sensible(Quota(minimum, cap))
    what = {"tenant": name, "minimum": minimum, "cap": cap}
    salt = secrets.token_bytes(scram.SALT_BYTES)

    def apply(known: Registry) -> Registry:
        return tenancy.add_tenant(known, name, quota, salt)

    change_and_tell("tenant add", what, apply, f"tenant {name} added", asked=asked, create=True)


def set_(name: str, /, *, minimum: str | None = None, cap: str | None = None, asked: Writing = WRITING) -> None:
    """Change a tenant's quota; what is above a smaller cap leaves.

    Parameters
    ----------
    minimum
        Memory that nobody else can take from it; as it was, unless given.
    cap
        Memory that it never exceeds; as it was, unless given.
    """
    if minimum is None and cap is None:
        raise ConfigError("nothing is to be changed, give --minimum or --cap")
    what: dict[str, object] = {"tenant": name, "minimum": minimum, "cap": cap}

    def apply(known: Registry) -> Registry:
        old = known.tenant(name).quota
        quota = _sensible(Quota(old.minimum if minimum is None else minimum, old.cap if cap is None else cap))
        what.update(minimum=quota.minimum, cap=quota.cap)
        return tenancy.set_quota(known, name, quota)

    change_and_tell("tenant set", what, apply, f"tenant {name} changed", asked=asked)


def _sensible(quota: Quota) -> Quota:
    """``quota``, if it can be kept in a pool of some size."""
    if all(quota.within(size).minimum > quota.within(size).cap for size in (GIB, GIB << 20)):
        raise ConfigError(f"minimum is {quota.minimum}, expected at most the cap, which is {quota.cap}")
    return quota


def remove(name: str, /, *, asked: Writing = WRITING) -> None:
    """Remove a tenant: its connections end at once, its pages leave the node's memory.

    What tiers below memory have of it stays there until it is cleared with `ems clear --tenant`.
    """
    change_and_tell(
        "tenant remove",
        {"tenant": name},
        lambda known: tenancy.remove_tenant(known, name),
        f"tenant {name} removed",
        asked=asked,
    )


def list_(*, asked: Reading = READING) -> None:
    """List the tenants, with what each of them has in the running node."""
    known = store.read(asked.file)
    used = usage(asked.at)
    rows: list[dict[str, Any]] = [
        {
            "tenant": name,
            "minimum": tenant.quota.minimum,
            "cap": tenant.quota.cap,
            "keys": len(tenant.keys),
            "bytes": None if used is None else used.get(name, 0),
        }
        for name, tenant in sorted(known.tenants.items())
    ]
    cells = [(*list(row.values())[:4], "?" if row["bytes"] is None else format_size(row["bytes"])) for row in rows]
    present({"items": rows}, table(("TENANT", "MINIMUM", "CAP", "KEYS", "BYTES"), cells), asked.output)


def show(name: str, /, *, asked: Reading = READING) -> None:
    """Show one tenant and its keys."""
    tenant = store.read(asked.file).tenant(name)
    used = usage(asked.at)
    held = None if used is None else used.get(name, 0)
    keys = [{"key": key.id, "created": key.created, "expires": key.expires} for key in tenant.keys]
    report = {"tenant": name, **msgspec.to_builtins(tenant.quota), "bytes": held, "keys": keys}
    facts = [
        ("tenant", name),
        ("quota", f"at least {tenant.quota.minimum}, at most {tenant.quota.cap}"),
        ("pages", "no node could be asked" if held is None else format_size(held)),
    ]
    facts += [("key", f"{key.id}, made {moment(key.created)}, ends {moment(key.expires)}") for key in tenant.keys]
    present_facts(report, [facts], asked.output)
