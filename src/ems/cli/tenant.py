"""``ems tenant``: who may use a node, and how much of its pool.

The verbs of ``ems key`` change the same file, so what both need is here: its change, the node that must obey, the
output.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from ems.cli.acts import figures
from ems.cli.options import Asking, Changing
from ems.cli.shown import moment, note, present, present_facts, print_json, table
from ems.config import GIB, default_tenants, format_size
from ems.errors import ConfigError, EmsError, PoolError, PoolUnavailable
from ems.pool.core.shares import Quota
from ems.pool.names import tenant_of
from ems.pool.node.audit import NAME, Act, AuditLog
from ems.pool.tenants import registry as tenancy
from ems.pool.tenants import scram, store
from ems.pool.tenants.registry import SECRET_BYTES, Registry


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Reading(Asking):
    """Which file of tenants, which node, and for whom the answer is."""

    tenants: Annotated[Path | None, Parameter(env_var="EMS_TENANTS")] = None
    """The file of tenants, default /etc/ems/tenants.json (root) or ~/.config/ems/tenants.json."""

    @property
    def file(self) -> Path:
        return self.tenants if self.tenants not in (None, Path()) else default_tenants()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Writing(Reading, Changing):
    """The same for a verb that changes the file, which the node is to obey."""


READING = Reading()
WRITING = Writing()
OBEY_SECONDS = 5.0
"""How long a node may take to read a file that was changed."""
_POLL_SECONDS = 0.05


def change(
    verb: str,
    what: Mapping[str, object],
    apply: Callable[[Registry], Registry],
    *,
    asked: Writing,
    create: bool = False,
) -> Registry:
    """Make a change of the file of tenants and write it into the audit log; what is there after it.

    In a dry run all is checked and nothing changed.
    """
    path = asked.file
    if asked.dry_run:
        return apply(store.read(path) if path.exists() or not create else Registry(secret=bytes(SECRET_BYTES)))
    log = AuditLog(path.with_name(NAME))
    with store.changing(path, create=create) as before:
        try:
            after = apply(before)
        except EmsError as error:
            log.record(Act(verb=verb, what=what, result=f"refused: {error}"))
            raise
        log.record(Act(verb=verb, what=what))
        store.write(path, after)
    return after


def change_and_tell(
    verb: str,
    what: Mapping[str, object],
    apply: Callable[[Registry], Registry],
    said: str,
    *,
    asked: Writing,
    create: bool = False,
) -> None:
    """:func:`change`, and say what was done and whether the node obeys."""
    after = change(verb, what, apply, asked=asked, create=create)
    if asked.json:
        print_json({**what, "revision": after.revision, "dry_run": asked.dry_run})
    if asked.dry_run:
        note(f"{said}, were this not a dry run: nothing was changed")
        return
    note(said)
    tell(asked, after.revision)


def tell(asked: Writing, revision: int) -> None:
    """Wait until the node obeys ``revision`` of the file, and say on stderr whether it does."""
    path = asked.at
    file = str(asked.file.absolute())
    deadline = time.monotonic() + OBEY_SECONDS
    try:
        while True:
            known: Any = figures(path).get("tenants") or {}
            if known.get("file") != file:
                note(f"the node on {path} does not read {file}, start it with 'ems node --tenants {file}'")
                return
            if known["revision"] >= revision:
                unkept = known.get("quotas_unkept")
                note(
                    f"the node on {path} has the new keys and keeps the quotas of before: {unkept}"
                    if unkept
                    else f"the node on {path} obeys"
                )
                return
            if time.monotonic() >= deadline:
                note(f"the node on {path} has not read {file} yet, see its log")
                return
            time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
    except PoolUnavailable:
        note(f"no node runs on {path}, the next one started with --tenants {file} obeys")
    except PoolError as error:
        note(f"the node on {path} could not be asked whether it obeys: {error}")


def usage(socket: Path) -> dict[str, int] | None:
    """Bytes of pages of each tenant on the running node; None when it cannot be asked."""
    used: dict[str, int] = {}
    try:
        rows: Any = figures(socket)["namespaces"]
    except EmsError:
        return None
    for row in rows:
        owner = tenant_of(row["name"])
        used[owner] = used.get(owner, 0) + row["pages"] * row["page_size"]
    return used


def add(name: str, /, *, minimum: str = "0", cap: str = "100%", asked: Writing = WRITING) -> None:
    """Let somebody in; ems key add makes the key.

    Args:
        name: The tenant's name, which is the access id of its engines.
        minimum: Memory that nobody else can take from it, such as 4GB or 25%.
        cap: Memory that it never exceeds, such as 16GB or 50%.
    """
    quota = _sensible(Quota(minimum, cap))
    what = {"tenant": name, "minimum": minimum, "cap": cap}
    salt = secrets.token_bytes(scram.SALT_BYTES)

    def apply(known: Registry) -> Registry:
        return tenancy.add_tenant(known, name, quota, salt)

    change_and_tell("tenant add", what, apply, f"tenant {name} added", asked=asked, create=True)


def set_(name: str, /, *, minimum: str | None = None, cap: str | None = None, asked: Writing = WRITING) -> None:
    """Change a tenant's quota; what is above a smaller cap leaves.

    Args:
        minimum: Memory that nobody else can take from it; as it was, unless given.
        cap: Memory that it never exceeds; as it was, unless given.
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
