"""``ems tenant`` and ``ems key``: who may use a node, how much of its pool, with which access keys.

A key is shown once, when it is made; the file of tenants has only what recognises it.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
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
from ems.config import GIB, default_tenants, format_size, parse_duration
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
KEY_BYTES = 32
Change = Callable[[Registry], Registry]
OBEY_SECONDS = 5.0
"""How long a node may take to read a file that was changed."""
_POLL_SECONDS = 0.05


def change(verb: str, what: Mapping[str, object], apply: Change, *, asked: Writing, create: bool = False) -> Registry:
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
    verb: str, what: Mapping[str, object], apply: Change, said: str, *, asked: Writing, create: bool = False
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
    path, file = asked.at, str(asked.file.absolute())
    try:
        note(f"the node on {path} {_obedience(path, file, revision)}")
    except PoolUnavailable:
        note(f"no node runs on {path}, the next one started with --tenants {file} obeys")
    except PoolError as error:
        note(f"the node on {path} could not be asked whether it obeys: {error}")


def _obedience(path: Path, file: str, revision: int) -> str:
    deadline = time.monotonic() + OBEY_SECONDS
    while True:
        known: Any = figures(path).get("tenants") or {}
        if known.get("file") != file:
            return f"does not read {file}, start it with 'ems node --tenants {file}'"
        if known["revision"] >= revision:
            unkept = known.get("quotas_unkept")
            return f"has the new keys and keeps the quotas of before: {unkept}" if unkept else "obeys"
        if time.monotonic() >= deadline:
            return f"has not read {file} yet, see its log"
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop


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
    what, said = {"tenant": name}, f"tenant {name} removed"
    change_and_tell("tenant remove", what, lambda known: tenancy.remove_tenant(known, name), said, asked=asked)


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


# Keys


def add_key(tenant: str, /, *, ttl: str | None = None, out: Path | None = None, asked: Writing = WRITING) -> None:
    """Make a key for a tenant and print it, this once, to stdout, or write it into a file of its own.

    Args:
        tenant: The tenant; its name is the access id that goes with the key.
        ttl: How long the key is valid, such as 12h or 90d; for ever, unless given.
        out: A new file for the key, which nobody else can read; nothing is printed then.
    """
    now, secret = time.time(), _new()
    _refuse_taken(out)
    expires = None if ttl is None else now + parse_duration(ttl, name="--ttl")
    what = {"tenant": tenant, "expires": expires}
    after = change("key add", what, lambda known: tenancy.add_key(known, tenant, secret, now, expires), asked=asked)
    _made(after, tenant, secret, out, asked)


def rotate_key(tenant: str, /, *, overlap: str = "1d", out: Path | None = None, asked: Writing = WRITING) -> None:
    """Make a key for a tenant and print it, or write it into a file; its other keys end after the overlap.

    Args:
        overlap: How long the other keys go on, such as 12h or 7d.
        out: A new file for the key, which nobody else can read; nothing is printed then.
    """
    _refuse_taken(out)
    now, secret, seconds = time.time(), _new(), parse_duration(overlap, name="--overlap")
    what = {"tenant": tenant, "overlap": seconds}
    after = change(
        "key rotate", what, lambda known: tenancy.rotate_key(known, tenant, secret, now, seconds), asked=asked
    )
    _made(after, tenant, secret, out, asked)


def revoke_key(tenant: str, key: str, /, *, asked: Writing = WRITING) -> None:
    """End a key and the connections that it opened, at once.

    Args:
        key: The key's name, as ems key list has it, or all.
    """
    what, said = {"tenant": tenant, "key": key}, f"{key} of tenant {tenant} is revoked"
    change_and_tell("key revoke", what, lambda known: tenancy.revoke_key(known, tenant, key), said, asked=asked)


def list_keys(tenant: str, /, *, asked: Reading = READING) -> None:
    """List a tenant's keys: their names, not the keys."""
    keys = store.read(asked.file).tenant(tenant).keys
    now = time.time()
    rows = [{"key": key.id, "created": key.created, "expires": key.expires, "valid": key.valid(now)} for key in keys]
    cells = [(key.id, moment(key.created), moment(key.expires), "yes" if key.valid(now) else "no") for key in keys]
    present({"items": rows}, table(("KEY", "MADE", "ENDS", "VALID"), cells), asked.output)


def _new() -> str:
    return "ems_" + secrets.token_urlsafe(KEY_BYTES)


def _refuse_taken(out: Path | None) -> None:
    """Before a key is made that could not be written then."""
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"{out} is there already, give a new file as --out")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}, make it or give a new file elsewhere as --out")


def _write_private(path: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write the key into {path}: {error.strerror}; it is lost, revoke it and make another"
        ) from error


def _warn_of_readers() -> None:
    """The shell made the file that stdout goes to, with the mode that its umask gives."""
    try:
        facts = os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):
        return
    if stat.S_ISREG(facts.st_mode) and facts.st_mode & 0o077:
        mode = stat.S_IMODE(facts.st_mode)
        note(f"warning: others can read the file with the key (mode {mode:o}), chmod 600 it or use --out FILE")


def _made(after: Registry, tenant: str, secret: str, out: Path | None, asked: Writing) -> None:
    made = after.tenant(tenant).keys[-1]
    if asked.dry_run:
        if asked.json:
            print_json({"tenant": tenant, "revision": after.revision, "dry_run": True})
        note(f"tenant {tenant} would get a key, nothing was changed")
        return
    if out is not None:
        _write_private(out, f"{secret}\n")
    shown = {} if out is not None else {"access_key": secret}
    if asked.json:
        more = {"key": made.id, "expires": made.expires, "revision": after.revision, "dry_run": False}
        print_json({"access_id": tenant, **shown, **more})
    elif shown:
        print(secret)
    if shown:
        _warn_of_readers()
    note(f"this is key {made.id} of access id {tenant}, ends {moment(made.expires)}; it is not shown again")
    tell(asked, after.revision)
