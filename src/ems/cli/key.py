"""``ems key``: access keys of tenants.  A key is shown once, when it is made; the file has only what recognises it."""

from __future__ import annotations

import os
import secrets
import stat
import sys
import time
from pathlib import Path

from ems.cli.shown import moment, note, present, print_json, table
from ems.cli.tenant import READING, WRITING, Reading, Writing, change, change_and_tell, tell
from ems.config import parse_duration
from ems.errors import ConfigError
from ems.pool.tenants import registry as tenancy
from ems.pool.tenants import store
from ems.pool.tenants.registry import Registry

KEY_BYTES = 32


def add(tenant: str, /, *, ttl: str | None = None, out: Path | None = None, asked: Writing = WRITING) -> None:
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


def rotate(tenant: str, /, *, overlap: str = "1d", out: Path | None = None, asked: Writing = WRITING) -> None:
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


def revoke(tenant: str, key: str, /, *, asked: Writing = WRITING) -> None:
    """End a key and the connections that it opened, at once.

    Args:
        key: The key's name, as ems key list has it, or all.
    """
    change_and_tell(
        "key revoke",
        {"tenant": tenant, "key": key},
        lambda known: tenancy.revoke_key(known, tenant, key),
        f"{key} of tenant {tenant} is revoked",
        asked=asked,
    )


def list_(tenant: str, /, *, asked: Reading = READING) -> None:
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
